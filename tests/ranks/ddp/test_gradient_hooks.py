"""What users do to gradients, and what they keep of them, beside the wrapper."""

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel
from paceline.testing import RankPool

WIDE = 32768  # elements from which a gradient is taken at once
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


class Net(nn.Module):
    """Two large parameters and two small ones; each gradient is the input times a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(WIDE))
        self.second = nn.Parameter(torch.ones(WIDE))
        self.third = nn.Parameter(torch.ones(4))
        self.fourth = nn.Parameter(torch.ones(4))

    def forward(self, x: float, skip: tuple[str, ...] = ()) -> Tensor:
        used = [(name, p) for name, p in self.named_parameters() if name not in skip]
        return sum(((index + 1) * x * p).sum() for index, (_, p) in enumerate(used))  # type: ignore[return-value]


def make(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net().double(), **options)


# Post-accumulate hooks.


def double_it(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def replace_it(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 2


def hooked(rank: int, view: bool, when: str, way: str, act: Callable[[Tensor], None]) -> None:
    net = Net().double()
    seen: list[float] = []

    def register() -> None:
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.flatten()[0])))
            parameter.register_post_accumulate_grad_hook(act)

    if when == "before":
        register()
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=view, bucket_cap_mb=1e-5)
    if when == "after":
        register()
    for step in range(3):
        ddp.zero_grad()
        seen.clear()
        out = ddp(rank + 1.0) if way == "forward" else net(rank + 1.0)
        if step == 0 and when == "between":
            register()
        out.backward()
        assert sorted(seen) == [(rank + 1.0) * (index + 1) for index in range(4)]
        for index, parameter in enumerate(net.parameters()):
            assert parameter.grad is not None
            assert parameter.grad.unique().tolist() == [2 * 1.5 * (index + 1)]


@VIEWS
@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("way", ["forward", "not the wrapper's forward"])
@pytest.mark.parametrize("act", [double_it, replace_it])
def test_hooks_see_the_local_gradient_and_what_they_make_of_it_is_averaged(
    pair: RankPool, view: bool, when: str, way: str, act: Callable[[Tensor], None]
) -> None:
    pair.run(hooked, view, when, way, act)


def dropped(rank: int) -> None:
    ddp = make()
    net = ddp.module
    for parameter in (net.first, net.third):
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    if rank == 0:
        net.second.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for _ in range(3):
        ddp.zero_grad()
        ddp(rank + 1.0).backward()
        assert net.first.grad is None
        assert net.third.grad is None
        assert net.second.grad.unique().tolist() == [2.0]
        assert net.fourth.grad.unique().tolist() == [6.0]


def test_a_hook_may_drop_its_gradient(pair: RankPool) -> None:
    pair.run(dropped)


# References to gradients.

KEEP: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "a slice": lambda grad: grad[1:5],
    "flat": lambda grad: grad.view(-1, 2),
    "numpy": lambda grad: grad.numpy(),
    "storage": lambda grad: grad.untyped_storage(),
    "memory": lambda grad: memoryview(grad.numpy()),
    "graph": lambda grad: (torch.ones((), dtype=torch.float64, requires_grad=True) * grad).sum(),
    "of another parameter": lambda grad: _adopted(grad),
    "dlpack": lambda grad: torch.from_dlpack(grad),
}


def _adopted(grad: Tensor) -> Tensor:
    other = nn.Parameter(torch.zeros_like(grad))
    other.grad = grad
    return other


def value(kept: Any) -> float:
    if isinstance(kept, nn.Parameter):
        kept = kept.grad
    if isinstance(kept, torch.UntypedStorage):
        return float(torch.tensor([], dtype=torch.float64).set_(kept)[7])
    if isinstance(kept, Tensor) and kept.grad_fn is not None:
        (scale,) = torch.autograd.grad(
            kept, kept.grad_fn.next_functions[0][0].next_functions[0][0].variable, retain_graph=True
        )
        return float(scale) / WIDE
    return float(torch.as_tensor(kept).flatten()[1])


def kept_over_steps(rank: int, what: str) -> None:
    ddp = make()
    kept: list[tuple[Any, float]] = []
    for step in range(5):
        ddp.zero_grad()
        ddp((rank + 1.0) * 3**step).backward()
        kept.append((KEEP[what](ddp.module.first.grad), 1.5 * 3**step))
        if what != "storage":
            for own, then in kept:
                assert value(own) == then, f"step {step}: {value(own)}, was {then}"
    if what == "storage":
        assert len({value(own) for own, _ in kept}) == 5


@pytest.mark.parametrize("what", KEEP)
def test_what_is_kept_of_a_gradient_stays_as_it_was(pair: RankPool, what: str) -> None:
    pair.run(kept_over_steps, what)


def identity(rank: int, skips: str) -> None:
    ddp = make()
    net = ddp.module
    ddp(rank + 1.0).backward()
    ddp.zero_grad()
    ddp(rank + 1.0).backward()
    held = {name: p.grad for name, p in net.named_parameters()}
    net.first.grad.mul_(rank + 1)  # each rank's own, as if clipped by a local norm
    net.third.grad.mul_(rank + 1)
    skipped = ("first", "third") if skips == "all" or (skips == "one" and rank == 1) else ()
    for _ in range(2):
        ddp(rank + 1.0, skipped).backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is held[name], f"{name} has another tensor for gradient"
            torch.testing.assert_close(parameter.grad, held[name])
    if skips == "all":
        assert held["first"].unique().tolist() == [1.5 * (rank + 1)]


@pytest.mark.parametrize("skips", ["none", "one", "all"])
def test_a_gradient_that_is_not_cleared_stays_the_same_tensor(pair: RankPool, skips: str) -> None:
    pair.run(identity, skips)


def out_of_place(rank: int, how: str) -> None:
    ddp = make()
    net = ddp.module
    ddp(rank + 1.0).backward()
    ddp.zero_grad()
    ddp(rank + 1.0).backward()
    held = net.first.grad
    then = held.clone()
    if how == "create_graph":
        (ddp(rank + 2.0) ** 2).backward(create_graph=True)
    else:
        net.first.register_hook(lambda _: setattr(net.first, "grad", None))
        ddp(rank + 2.0).backward()
    assert net.first.grad is not held
    torch.testing.assert_close(held, then)
    net.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("how", ["create_graph", "cleared by a hook"])
def test_a_gradient_that_was_let_go_in_backward_is_not_written_to(pair: RankPool, how: str) -> None:
    pair.run(out_of_place, how)


def swapped(rank: int) -> None:
    ddp = make()
    net = ddp.module
    for step in range(4):
        ddp(rank + 1.0).backward()
        first, second = net.first.grad.clone(), net.second.grad.clone()
        net.first.grad, net.second.grad = net.second.grad, net.first.grad
        ddp(rank + 1.0).backward()
        torch.testing.assert_close(net.first.grad, second + 1.5)
        torch.testing.assert_close(net.second.grad, first + 3.0)
        if step % 2:
            ddp.zero_grad(set_to_none=False)


def test_gradients_may_change_places(pair: RankPool) -> None:
    pair.run(swapped)


def packed(rank: int) -> None:
    ddp = make()
    for _ in range(2):
        ddp.zero_grad()
        ddp(rank + 1.0).backward()
    grad = ddp.module.second.grad
    twin = copy.deepcopy(ddp.module)
    copies = [pickle.loads(pickle.dumps(grad)), copy.deepcopy(grad)]
    ddp.zero_grad(set_to_none=False)
    assert [each.unique().tolist() for each in copies] == [[3.0], [3.0]]
    copies[1].fill_(9.0)
    assert grad.unique().tolist() == [0.0]
    twin(1.0).backward()
    assert twin.first.grad.unique().tolist() == [1.0]


def test_copied_and_packed_gradients_are_their_own(pair: RankPool) -> None:
    pair.run(packed)


def emptied(rank: int) -> None:
    ddp = make(transport="c10d")  # shared memory cannot be given back by halves, and torch says so
    for _ in range(4):
        ddp(rank + 1.0).backward()
        grads = [p.grad for p in ddp.parameters()]
        assert [grad.unique().tolist() for grad in grads] == [[1.5 * (index + 1)] for index in range(4)]
        ddp.zero_grad()
        grads[0].untyped_storage().resize_(0)  # a way of users to give memory back at once
        del grads


def test_a_gradient_whose_memory_was_given_back(pair: RankPool) -> None:
    pair.run(emptied)


def clipped(rank: int, view: bool) -> None:
    ddp = make(gradient_as_bucket_view=view)
    plain = Net().double()
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1, foreach=True) for net in (ddp, plain)]
    for step in range(5):
        (0.5 * plain(1.0 + step) + 0.5 * plain(2.0 + step)).backward()
        ddp(rank + 1.0 + step).backward()
        for net, optimizer in zip((ddp, plain), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    for mine, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@VIEWS
def test_clipping_and_an_optimizer_of_many_tensors(pair: RankPool, view: bool) -> None:
    pair.run(clipped, view)


# What is left when the wrapper is gone.


class Keeping(Net):
    def forward(self, x: float, skip: tuple[str, ...] = ()) -> Tensor:
        self.last = super().forward(x, skip)
        return self.last


def freed(_: int, kind: str, view: bool) -> None:
    net: Net = (Keeping() if kind == "keeps its output" else Net()).double()
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=view)
    for step in range(3):
        ddp.zero_grad()
        out = ddp(1.0)
        if kind == "raised" and step == 2:
            out.grad_fn.register_prehook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                out.backward()
        else:
            out.backward()
    watched = [weakref.ref(thing) for thing in (ddp, ddp._reducer, net, net.first, net.third)]
    del net, ddp, out
    gc.collect()
    assert [ref() is None for ref in watched] == [True] * 5


@VIEWS
@pytest.mark.parametrize("kind", ["plain", "keeps its output", "raised"])
def test_nothing_keeps_a_wrapper_or_its_module(pair: RankPool, kind: str, view: bool) -> None:
    pair.run(freed, kind, view)


def alone_again(_: int) -> None:
    net = Net().double()
    ddp = DistributedDataParallel(net)
    ddp(1.0).backward()
    del ddp
    gc.collect()
    ref = weakref.ref(net.third)
    before = len(gc.get_referrers(net.third))
    count = sys.getrefcount(net.third)
    for _ in range(100):
        net(1.0).backward()
    assert len(gc.get_referrers(net.third)) <= before + 1
    assert sys.getrefcount(net.third) <= count + 2
    del net
    gc.collect()
    assert ref() is None


def test_a_module_trains_on_without_its_wrapper_and_nothing_piles_up(pair: RankPool) -> None:
    pair.run(alone_again)
