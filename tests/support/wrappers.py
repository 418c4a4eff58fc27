"""torch's wrapper and ours by name, a module for them, and what ranks compare."""

import builtins
import inspect
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.parallel
from batches import rows
from torch import distributed, nn
from torch.autograd import profiler

import paceline.nn.parallel
from paceline import MixedPrecision
from paceline.comm import pending
from paceline.comm.native_threads import wait_until_asleep

WRAPPERS: dict[str, Any] = {
    "torch": torch.nn.parallel.DistributedDataParallel,
    "paceline": paceline.nn.parallel.DistributedDataParallel,
}
# What the installed torch's wrapper takes; older versions lack some of what ours takes in each.
TORCHS_OPTIONS = frozenset(inspect.signature(WRAPPERS["torch"]).parameters)
WIDTH = 4
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def refusal(act: Callable[[], object]) -> tuple[str, str] | None:
    """The built-in type and the message of the error that ``act`` raises; None if it raises none."""
    try:
        act()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == builtins.__name__]
        return kinds[0], str(error)
    return None


def options_for(wrapper: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options as this wrapper takes them: without those of no effect on results that torch lacks."""
    if wrapper == "paceline":
        return options
    named = dict(options)
    if "forward_sync_buffers" in options and "forward_sync_buffers" not in TORCHS_OPTIONS:
        named["broadcast_buffers"] = named.pop("forward_sync_buffers")
    return {name: value for name, value in named.items() if name in TORCHS_OPTIONS}


class Net(nn.Module):
    """Two layers and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x * self.scale).tanh())


def two_layers() -> nn.Sequential:
    """Two layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2))


def raise_planned(*_: object) -> None:
    """A hook that fails."""
    raise ZeroDivisionError("planned")


def train(net: nn.Module, rank: int, step: int = 0) -> None:
    """One step, without an optimizer."""
    net.zero_grad()
    net(rows(rank, step).to(next(net.parameters()).dtype)).square().mean().backward()


def grads(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


def of_whole_batch(net: nn.Module, step: int = 0, ranks: tuple[int, ...] = (0, 1)) -> list[torch.Tensor]:
    """The gradients that one process has for the rows of all ranks."""
    net.zero_grad()
    for rank in ranks:
        x = rows(rank, step).to(next(net.parameters()).dtype)
        (net(x).square().mean() / len(ranks)).backward()
    return grads(net)


def be_impatient() -> None:
    """Look around soon when a wait takes long, for tests in which one will."""
    soon = timedelta(seconds=0.3)
    pending.SLOW_AFTER = pending.SLOW_EVERY = soon
    pending.WorkPending._first_look = pending.WorkPending._next_look = soon


def everyones(value: Any, group: Any = None) -> list[Any]:
    box = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(box, value, group=group)
    return box


def equal_on_all(tensors: list[torch.Tensor], group: Any = None) -> bool:
    first, *others = everyones([tensor.detach() for tensor in tensors], group)
    return all(_same(first, theirs) for theirs in others)


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def assert_equal_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(mine, other), f"tensor {index} is off by {(mine - other).abs().max():.3g}"


def collectives(act: Callable[[], object]) -> Counter[str]:
    """Every collective that ``act`` begins, as torch's profiler sees them."""
    with profiler.profile() as profile:
        act()
        wait_until_asleep()  # gloo's threads say that a collective is over before the profiler knows it
    return Counter(event.name for event in profile.function_events if event.name.startswith("gloo:"))
