"""Calls leave no threads, objects or memory behind."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import TWO
from torch import nn

from paceline import DataParallel


class Net(nn.Module):
    """Elementwise only: for more, each new thread would start helpers of its own, which takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.register_buffer("mean", torch.zeros(64))
        self.act = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach()[0], 0.1)
        return self.act((x - self.mean) * self.weight)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise KeyError(gradient.shape)


class FailsForward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError(x.shape)


class Apply(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FailsBackward.apply(x)


def train(wrapper: nn.Module, x: torch.Tensor) -> None:
    wrapper(x).square().mean().backward()


def infer(wrapper: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        wrapper(x)


def forward_only(wrapper: nn.Module, x: torch.Tensor) -> None:
    wrapper(x)


def penalise(wrapper: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(wrapper(x).sum(), x, create_graph=True)
    torch.autograd.grad(slope.square().sum(), [*wrapper.parameters()], allow_unused=True)


def fail(wrapper: nn.Module, x: torch.Tensor) -> None:
    try:
        train(wrapper, x)
    except KeyError:
        return
    raise AssertionError("no error came")


def fails_forward() -> nn.Module:
    return nn.Sequential(Net(), FailsForward())


def fails_backward() -> nn.Module:
    return nn.Sequential(Net(), Apply())


USES = {
    "train": (Net, train),
    "infer": (Net, infer),
    "forward only": (Net, forward_only),
    "penalise": (Net, penalise),
    "fail in forward": (fails_forward, fail),
    "fail in backward": (fails_backward, fail),
}

each_use = pytest.mark.parametrize(("make", "use"), USES.values(), ids=USES.keys())


def native_threads() -> set[str]:
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


def wait_until_gone(known: set[str]) -> None:
    """Wait for other threads than the known: one that has been joined takes a moment more to end."""
    until = time.monotonic() + 5.0
    while extra := native_threads() - known:
        assert time.monotonic() < until, f"still running: {extra}"
        time.sleep(0.01)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@each_use
def test_calls_leave_no_thread_and_no_memory(
    make: Callable[[], nn.Module], use: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    wrapper, x = DataParallel(make().double(), TWO), torch.randn(448, 64, dtype=torch.double)
    for _ in range(20):
        use(wrapper, x)
    gc.collect()
    threads, natives, resident = {*threading.enumerate()}, native_threads(), resident_bytes()
    for _ in range(60):
        use(wrapper, x)
    gc.collect()
    # One output is 224 KiB, so a call that leaves one behind would leave 13 MiB here.
    assert resident_bytes() - resident < 8 * 2**20
    assert {*threading.enumerate()} == threads
    wait_until_gone(natives)


@each_use
def test_calls_leave_no_objects_behind(
    make: Callable[[], nn.Module], use: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    wrapper, x = DataParallel(make(), TWO), torch.randn(64, 64)

    def count() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(3):
        use(wrapper, x)
    before = count()
    for _ in range(50):
        use(wrapper, x)
    assert count() - before < 50


@pytest.mark.usefixtures("no_gc")
@each_use
def test_calls_make_no_reference_cycle(
    make: Callable[[], nn.Module], use: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    wrapper, x = DataParallel(make(), TWO), torch.randn(64, 64)
    use(wrapper, x)
    gc.collect()
    for _ in range(3):
        use(wrapper, x)
    assert gc.collect() == 0


@pytest.mark.usefixtures("no_gc")
@each_use
def test_wrapper_and_module_are_freed_with_their_last_reference(
    make: Callable[[], nn.Module], use: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    wrapper, x = DataParallel(make(), TWO), torch.randn(64, 64)
    use(wrapper, x)
    parts = [wrapper, *wrapper.module.modules(), *wrapper.parameters(), *wrapper.buffers(), x]
    alive = [weakref.ref(part) for part in parts]
    del wrapper, x, parts
    assert [ref() for ref in alive if ref() is not None] == []


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("grad", [True, False])
def test_replicas_and_their_tensors_are_freed_with_the_output(grad: bool) -> None:
    made: list[weakref.ref[Any]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).tanh()
            made.extend(map(weakref.ref, (self, x, y)))
            if grad:
                made.append(weakref.ref(self.linear.weight))
            return y

    wrapper = DataParallel(Watched(), TWO)
    with torch.set_grad_enabled(grad):
        y = wrapper(torch.randn(4, 2))
    if grad:
        y.sum().backward()
    made.append(weakref.ref(y))
    del y
    assert [ref() for ref in made if ref() is not None] == []


@pytest.mark.usefixtures("no_gc")
def test_tensors_that_backward_no_longer_needs_are_freed_while_the_output_lives() -> None:
    kept: list[weakref.ref[Any]] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            held = x * 2
            kept.append(weakref.ref(held))
            ctx.save_for_backward(held)
            return x + 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (held,) = ctx.saved_tensors
            return gradient * held

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Keeps.apply(self.linear(x))

    y = DataParallel(Net(), TWO)(torch.randn(4, 2))
    loss = y.sum()
    loss.backward()
    assert [ref() for ref in kept if ref() is not None] == []
    assert loss.grad_fn is not None


@pytest.mark.usefixtures("no_gc")
def test_an_error_is_freed_with_its_last_reference() -> None:
    class OwnError(Exception):
        pass

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise OwnError(x.shape)

    wrapper = DataParallel(Fails(), TWO)
    try:
        wrapper(torch.randn(4, 64))
    except OwnError as caught:
        error = caught
    parts = [weakref.ref(wrapper.module), weakref.ref(error), weakref.ref(error.__cause__)]
    del wrapper, error
    assert [ref() for ref in parts if ref() is not None] == []
