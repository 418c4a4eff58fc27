"""The reducer of a small module, built as the wrapper builds it; the group's other ranks are a script."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from scripted_steps import GradsBySlot, OtherRank, OtherRanks, assert_grads, mean, random_grads
from torch import Tensor, nn

from paceline.ddp.build import build_reducer
from paceline.ddp.reducer.autograd_hooks import at_start_of_backward
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.reducer.step_report import RankReport
from paceline.ddp.state.buffers import ModuleBuffers
from paceline.ddp.state.wrapped_module import wrap_module
from paceline.options import CapOptions, WrapperOptions
from paceline.testing import ScriptedGroup

# Slots: 0 is the weight of the last layer, 1 its bias, 2 and 3 those of the first.
ALL = (0, 1, 2, 3)
TINY_MB = 1e-6


class Net(nn.Module):
    """Two layers, of which the first can be left out; gradients do not come in the order of the guess."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)
        self.first = nn.Linear(3, 3)

    def forward(self, x: Tensor, *, skip: bool = False) -> Tensor:
        return self.last(x if skip else self.first(x).tanh())


class Rank:
    """This rank: a module, its reducer, and the script of the others."""

    def __init__(
        self,
        *others: OtherRank,
        rank: int = 0,
        cap_mb: float = TINY_MB,
        frozen: str = "",
        group: ScriptedGroup | None = None,
        delayed: Sequence[str] = (),
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.net = Net().double()
        self.parameters = [*self.net.parameters()]
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(not frozen or not name.startswith(frozen))
        self.others = OtherRanks(*others or [OtherRank()])
        self.group = group or ScriptedGroup(rank, max(len(others), 1) + 1, self.others)
        self.buffers = ModuleBuffers(self.net, ())
        self.reducer: Reducer = build_reducer(
            wrap_module(self.net, delayed, device_ids=None, output_device=None),
            self.group,  # type: ignore[arg-type]  # stands in for a group
            self.buffers,
            None,
            WrapperOptions(caps=CapOptions(cap_mb, None, 1024), **options),
            static_graph=False,
        )
        self.others.context = lambda: self.reducer.context

    def loss(self, x: Tensor, **how: Any) -> Tensor:
        """A forward, as the wrapper's does it."""
        self.reducer.prepare()
        output = self.net(x, **how)
        at_start_of_backward([output], self.reducer.begin, synced=self.reducer.syncs, but=[x])
        if self.reducer.syncs:
            self.reducer.turns.expect(self.reducer)
        return output.square().mean()

    def step(self, x: Tensor, *others: OtherRank, **how: Any) -> None:
        """A whole step, with what the other ranks do in it."""
        self.zero_grad()
        if others:
            self.others.in_next_step(*others)
        self.loss(x, **how).backward()

    def accumulate(self, x: Tensor) -> None:
        """A pass that is not synced."""
        self.reducer.syncs = False
        try:
            self.loss(x).backward()
        finally:
            self.reducer.syncs = True

    def zero_grad(self) -> None:
        self.net.zero_grad()

    def alone(self, x: Tensor, **how: Any) -> dict[int, Tensor]:
        """The gradients that this module has without other ranks."""
        loss = self.net(x, **how).square().mean()
        used = [each for each in self.parameters if each.requires_grad]
        grads = torch.autograd.grad(loss, used, allow_unused=True)
        slots = [slot for slot in ALL if self.parameters[slot].requires_grad]
        return {slot: grad for slot, grad in zip(slots, grads, strict=True) if grad is not None}

    def assert_mean(self, *grads: GradsBySlot) -> None:
        used = {slot for each in grads for slot in each}
        zeros = [torch.zeros_like(each).detach() for each in self.parameters]
        wanted = {slot: mean(*(each.get(slot, zeros[slot]) for each in grads)) for slot in used}
        assert_grads(self.parameters, wanted)


def rows(count: int = 4) -> Tensor:
    return torch.randn(count, 3, dtype=torch.double)


def assert_works(this: Rank) -> None:
    """The next step is like any other."""
    x, other = rows(), random_grads(this.parameters)
    this.step(x, OtherRank(other))
    this.assert_mean(this.alone(x), other)
    this.reducer.check_finished()


def assert_weighted_step(this: Rank, *, finalize: Callable[[], None] = lambda: None) -> None:
    """Two passes of this rank and one of the other count by their weights."""
    this.zero_grad()
    x, y, other = rows(3), rows(2), random_grads(this.parameters)
    sums = {slot: 4 * grad for slot, grad in other.items()}
    this.others.in_next_step(OtherRank(sums, report=RankReport(weight=4.0)))
    with this.reducer.weigh(3):
        this.accumulate(x)
    with this.reducer.weigh(2):
        this.loss(y).backward()
    finalize()
    first, second = this.alone(x), this.alone(y)
    wanted = {slot: (3 * first[slot] + 2 * second[slot] + 4 * other[slot]) / 9 for slot in ALL}
    assert_grads(this.parameters, wanted)
