"""Steps that fail: every rank is told, nothing of them stays, and the next step is right."""

import contextlib
import os
import re
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from wrappers import be_impatient, train, two_layers

from paceline import DistributedDataParallel, hooks
from paceline.errors import HookError, PeerError, StalledError, StepError
from paceline.testing import RankPool, run_ranks

WIDE = 32768  # elements from which a gradient is taken at once
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


class Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException | None) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.error is not None:
            raise ctx.error
        return grad, None


class Net(nn.Module):
    """The gradients of first, large and last are x, x and 2 x."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4))
        self.large = nn.Parameter(torch.ones(WIDE))
        self.last = nn.Parameter(torch.ones(4))

    def forward(self, x: float, where: str = "", error: BaseException | None = None) -> Tensor:
        if where == "forward" and error is not None:
            raise error
        under = (x * self.first).sum() + (x * self.large).sum()
        return Trip.apply(under, error if where == "backward" else None) + (2 * x * self.last).sum()


WANT = {"first": 1.5, "large": 1.5, "last": 3.0}


def make(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net().double(), **{"bucket_cap_mb": 1e-5, **options})


def values(ddp: DistributedDataParallel) -> dict[str, list[float] | None]:
    return {
        name: None if p.grad is None else p.grad.unique().tolist()
        for name, p in ddp.module.named_parameters()
    }


def times(factor: float) -> dict[str, list[float]]:
    return {name: [factor * value] for name, value in WANT.items()}


def failing(
    rank: int, where: str, who: str, fails_at: tuple[int, ...], view: bool, weighed: bool, clears: bool
) -> None:
    ddp = make(gradient_as_bucket_view=view)
    for step in range(6):
        if clears:
            ddp.zero_grad()
        lost = step in fails_at
        mine = lost and (who == "all" or rank == 1)
        kind: type[BaseException] = KeyboardInterrupt if who == "interrupted" else KeyError
        error = kind("no such thing") if mine else None
        wanted = pytest.raises(kind if mine else PeerError) if lost else contextlib.nullcontext()
        with wanted as caught, ddp.weigh(1) if weighed else contextlib.nullcontext():
            ddp(rank + 1.0, where, error).backward()
        if lost and not mine:
            assert f"in {where} of step {step}" in str(caught.value)
        if lost:
            assert values(ddp) == dict.fromkeys(WANT), f"step {step}: {values(ddp)} stayed"
        else:
            since = next(back for back in range(step + 1) if step - back - 1 in fails_at or step == back) + 1
            assert values(ddp) == times(1 if clears else since), f"step {step}"


@VIEWS
@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "weighed"])
@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "kept"])
@pytest.mark.parametrize("fails_at", [(0, 1), (2, 3)], ids=["first", "later"])
@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_step_leaves_nothing_behind(
    pair: RankPool, where: str, who: str, fails_at: tuple[int, ...], view: bool, weighed: bool, clears: bool
) -> None:
    pair.run(failing, where, who, fails_at, view, weighed, clears)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_interrupted_step_is_told_too(pair: RankPool, where: str) -> None:
    pair.run(failing, where, "interrupted", (1,), False, False, True)


class SavedAndChanged(nn.Module):
    """torch itself raises in its backward, in C++."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *, fails: bool) -> Tensor:
        squared = self.weight.square()
        result = squared.square().sum()
        if fails:
            squared.detach().mul_(2)
        return result


def raise_at_this_line(_: Tensor) -> None:
    raise KeyError("planted words")


def words_of_backward(rank: int, kind: str, transport: Any) -> str:
    ddp = DistributedDataParallel(SavedAndChanged(), transport=transport)
    ddp(fails=False).backward()
    if rank == 1 and kind == "Python":
        ddp.module.weight.register_hook(raise_at_this_line)
    try:
        ddp(fails=rank == 1 and kind == "C++").backward()
    except (KeyError, RuntimeError) as error:
        assert sys.gettrace() is None
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("transport", ["auto", "c10d"])
@pytest.mark.parametrize(
    ("kind", "words", "function"),
    [
        ("Python", "KeyError('planted words')", "raise_at_this_line"),
        ("C++", "modified by an inplace operation", "words_of_backward"),
    ],
)
def test_what_backward_raised_is_told_with_its_words_and_its_line(
    pair: RankPool, kind: str, words: str, function: str, transport: str
) -> None:
    told, _ = pair.run(words_of_backward, kind, transport)
    assert told.startswith("PeerError: rank 1 raised")
    assert words in told
    assert re.search(rf"test_faults\.py:\d+ in {function}\) in backward of step 1", told), told


class NoReprError(Exception):
    def __repr__(self) -> str:
        raise ValueError(self.args)


class OddReprError(Exception):
    def __repr__(self) -> str:
        return "\udc80"


def raises_without_words(rank: int, kind: type[Exception], where: str) -> str:
    ddp = DistributedDataParallel(two_layers())

    def fail(*_: object) -> None:
        raise kind

    if rank == 1 and where == "forward":
        ddp.module.register_forward_pre_hook(fail)
    elif rank == 1:
        next(ddp.parameters()).register_hook(fail)
    try:
        train(ddp, rank)
    except (PeerError, kind) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("kind", "words"), [(NoReprError, "NoReprError"), (OddReprError, "\\udc80")])
def test_an_exception_that_has_no_words_is_told_too(
    pair: RankPool, kind: type[Exception], words: str, where: str
) -> None:
    told, own = pair.run(raises_without_words, kind, where)
    assert told.startswith(f"PeerError: rank 1 raised {words} (")
    assert own.startswith(kind.__name__)


def small_ones(rank: int) -> None:
    """Gradients that had arrived, but had not been looked at, when backward raised."""
    layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(8))).double()
    ddp = DistributedDataParallel(layers)
    for step in range(4):
        handle = None
        if rank == 0 and step in (0, 2):
            handle = layers[0].weight.register_hook(lambda _: 1 / 0)
        lost = pytest.raises(PeerError if rank else ZeroDivisionError)
        with lost if step in (0, 2) else contextlib.nullcontext():
            ddp(torch.ones(1, 1, dtype=torch.float64)).backward()
        if handle is not None:
            handle.remove()
            left = [name for name, p in layers.named_parameters() if p.grad is not None]
            assert not left, f"step {step}: {left}"
        elif step in (1, 3):
            ddp.zero_grad()


def test_a_lost_backward_leaves_no_small_gradients(pair: RankPool) -> None:
    pair.run(small_ones)


def after_accumulation(rank: int, where: str) -> None:
    ddp = make()
    for step in range(4):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(rank + 1.0).backward()
        error = KeyError() if step in (0, 2) and rank == 0 else None
        wanted = (
            contextlib.nullcontext() if step in (1, 3) else pytest.raises(KeyError if error else PeerError)
        )
        with wanted:
            ddp(rank + 1.0, where, error).backward()
        assert values(ddp) == (times(2) if step in (1, 3) else dict.fromkeys(WANT))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_was_accumulated_is_dropped_with_the_step(pair: RankPool, where: str) -> None:
    pair.run(after_accumulation, where)


def users_hook_fails(rank: int, kind: str) -> None:
    ddp = make()

    def fail(_: object) -> None:
        raise KeyError("hook")

    for step in range(4):
        lost = step in (0, 2)
        handles = []
        if lost and rank == 0:
            for parameter in ddp.parameters():
                register = (
                    parameter.register_hook
                    if kind == "tensor"
                    else parameter.register_post_accumulate_grad_hook
                )
                handles.append(register(fail))
        wanted = pytest.raises(PeerError if rank else KeyError) if lost else contextlib.nullcontext()
        with wanted:
            ddp(rank + 1.0).backward()
        for handle in handles:
            handle.remove()
        assert values(ddp) == (dict.fromkeys(WANT) if lost else times(1))
        ddp.zero_grad()


@pytest.mark.parametrize("kind", ["tensor", "post-accumulate"])
def test_an_error_in_a_users_hook(pair: RankPool, kind: str) -> None:
    pair.run(users_hook_fails, kind)


def averaging(bucket: Any) -> Any:
    work = distributed.all_reduce(bucket.buffer().div_(distributed.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class BadHook:
    """Does it right, except that in the steps given it makes the mistake given."""

    __qualname__ = "BadHook"

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake
        self.on = False

    def __call__(self, _: object, bucket):  # type: ignore[no-untyped-def]
        if self.on and self.mistake.startswith("raises"):
            raise ValueError("hook") if self.mistake == "raises" else RuntimeError("hook")
        if self.on and self.mistake == "future":
            return None
        future = averaging(bucket)
        if not self.on:
            return future
        return {
            "size": future.then(lambda f: f.value()[:-1]),
            "dtype": future.then(lambda f: f.value().long()),
            "none": future.then(lambda _: None),
            "fails": future.then(lambda _: 1 / 0),
        }[self.mistake]


def bad_hook(rank: int, mistake: str, fails_at: tuple[int, ...], cap: float) -> None:
    ddp = make(bucket_cap_mb=cap)
    hook = BadHook(mistake)
    ddp.register_comm_hook(None, hook)
    for step in range(5):
        ddp.zero_grad()
        hook.on = step in fails_at
        with pytest.raises((HookError, ValueError, RuntimeError)) if hook.on else contextlib.nullcontext():
            ddp(rank + 1.0).backward()
        assert values(ddp) == (dict.fromkeys(WANT) if hook.on else times(1)), f"step {step}: {values(ddp)}"


@pytest.mark.parametrize("cap", [1e-5, 25.0], ids=["many", "one"])
@pytest.mark.parametrize("fails_at", [(0,), (2, 3)], ids=["first", "later"])
@pytest.mark.parametrize(
    "mistake", ["size", "dtype", "none", "fails", "future", "raises", "raises RuntimeError"]
)
def test_a_hooks_mistake_on_all_ranks(
    pair: RankPool, mistake: str, fails_at: tuple[int, ...], cap: float
) -> None:
    pair.run(bad_hook, mistake, fails_at, cap)


def bad_hook_on_one(rank: int, mistake: str) -> None:
    ddp = make(process_group=distributed.new_group(timeout=timedelta(seconds=4)), bucket_cap_mb=25)
    hook = BadHook(mistake)
    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        ddp.zero_grad()
        ddp(rank + 1.0).backward()
    hook.on = rank == 1
    with pytest.raises(StepError):
        ddp(rank + 1.0).backward()
    hook.on = False
    ddp.zero_grad()
    ddp(rank + 1.0).backward()
    assert values(ddp) == times(1)


@pytest.mark.parametrize("mistake", ["size", "dtype", "none", "fails"])
def test_a_hooks_mistake_on_one_rank(mistake: str) -> None:
    run_ranks(bad_hook_on_one, args=(mistake,), timeout=15.0)


HOOKS: dict[str, Any] = {
    "torch": lambda: (powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    "ours": lambda: (None, hooks.int8()),
    "several rounds": lambda: (None, hooks.power_sgd(start_step=0)),
}


def raises_with_a_hook(rank: int, kind: str, where: str, alone: bool) -> str:
    others = distributed.new_group()
    # In shared memory our hooks would have nothing to do.
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=1e-5, transport="c10d")
    ddp.register_comm_hook(*HOOKS[kind]())
    for _ in range(4):
        ddp(rank + 1.0).backward()
    error = KeyError("the reason") if rank == 1 else None
    said = ""
    try:
        if rank == 1 or not alone:
            ddp(rank + 1.0, where, error).backward()
    except (KeyError, PeerError) as raised:
        said = f"{type(raised).__name__}: {raised}"
    # Only when everyone is here does rank 1 call forward again.
    distributed.barrier(others)
    if alone and rank != 1:
        with pytest.raises(PeerError):
            ddp(rank + 1.0).backward()
    for _ in range(2):
        ddp.zero_grad()
        ddp(rank + 1.0).backward()
    assert ddp.module.first.grad is not None
    return said


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", HOOKS)
def test_with_a_hook_the_others_hear_of_an_exception_at_once(ranks: RankPool, kind: str, where: str) -> None:
    said = ranks.run(raises_with_a_hook, kind, where, False)
    assert said.pop(1).startswith("KeyError")
    assert all(each.startswith("PeerError: rank 1 raised") for each in said)


def test_with_a_hook_an_exception_does_not_wait_for_others_who_never_come(pair: RankPool) -> None:
    assert pair.run(raises_with_a_hook, "several rounds", "forward", True)[1].startswith("KeyError")


class HookOnAGroup(BadHook):
    """Averages in the group that it was last given."""

    def __init__(self, mistake: str, group: Any) -> None:
        super().__init__(mistake)
        self.group = group

    def __call__(self, _: object, bucket):  # type: ignore[no-untyped-def]
        if self.on and bucket.index() == 0:
            return super().__call__(None, bucket)
        work = distributed.all_reduce(bucket.buffer().div_(2), group=self.group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def hook_breaks_on_one(rank: int, mistake: str, cap: float) -> tuple[str, str]:
    be_impatient()
    first, second = distributed.new_group(), distributed.new_group()  # both with torch's long timeout
    ddp = make(process_group=first, bucket_cap_mb=cap)
    hook = HookOnAGroup(mistake, first)
    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        ddp.zero_grad()
        ddp(rank + 1.0).backward()
    hook.on = rank == 1
    with pytest.raises((StepError, ValueError)) as caught:
        ddp(rank + 1.0).backward()
    assert values(ddp) == dict.fromkeys(WANT)
    hook.on = False
    with pytest.raises(StepError) as refused:
        ddp(rank + 1.0)
    hook.group = second
    ddp._update_process_group(second)
    for _ in range(3):
        ddp.zero_grad()
        ddp(rank + 1.0).backward()
        assert values(ddp) == times(1)
    return f"{type(caught.value).__name__}: {caught.value}", str(refused.value)


@pytest.mark.parametrize("cap", [1e-5, 25.0], ids=["many", "one"])
@pytest.mark.parametrize("mistake", ["raises", "future"])
def test_a_hook_that_breaks_on_one_rank_leaves_no_rank_waiting(mistake: str, cap: float) -> None:
    (waiting, why), (breaking, _) = run_ranks(hook_breaks_on_one, args=(mistake, cap), timeout=20.0)
    said = "ValueError" if mistake == "raises" else "HookError"
    assert breaking.startswith(said)
    assert waiting.startswith("PeerError: rank 1 raised " + said)
    assert "in the hook for bucket 0 of step 2" in waiting
    assert "no longer match" in why
    assert "_update_process_group" in why


def absent(rank: int, world: int, hooked: bool) -> str:
    group = distributed.new_group(timeout=timedelta(seconds=3))
    ddp = make(process_group=group, bucket_cap_mb=25)
    if hooked:
        ddp.register_comm_hook(None, lambda _, bucket: _summing(bucket, group))
    for _ in range(2):
        ddp.zero_grad()
        ddp(rank + 1.0).backward()
    if rank == world - 1:
        time.sleep(4)
        return ""
    with pytest.raises(StalledError) as caught:
        ddp(rank + 1.0).backward()
    return str(caught.value)


def late_in_one_step(rank: int, world: int, options: dict[str, Any], hooked: bool) -> tuple[Any, ...]:
    group = distributed.new_group(timeout=timedelta(seconds=3))
    ddp = make(process_group=group, **options)
    if hooked:
        ddp.register_comm_hook(None, hooks.average())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    taken, said = [], ""
    for step in range(6):
        optimizer.zero_grad()
        loss = ddp(rank + step + 1.0)
        if step == 2 and rank == world - 1:
            time.sleep(4.5)
        try:
            loss.backward()
        except StepError as error:
            said += f"{step} {type(error).__name__}: {error}"
        else:
            optimizer.step()
            taken.append(step)
    return taken, said, [parameter.detach()[:3].tolist() for parameter in ddp.parameters()]


@pytest.mark.parametrize(
    ("world", "options", "hooked"),
    [
        (2, {"bucket_cap_mb": 25}, False),
        (2, {}, False),
        (2, {"gradient_as_bucket_view": True}, False),
        (2, {}, True),
        (3, {}, False),
    ],
    ids=["one bucket", "many buckets", "views", "hook", "three ranks"],
)
def test_a_step_that_some_ranks_gave_up_is_lost_on_the_late_rank_too(
    world: int, options: dict[str, Any], hooked: bool
) -> None:
    *others, late = run_ranks(late_in_one_step, world, args=(world, options, hooked), timeout=30.0)
    assert late[1].startswith("2 PeerError: rank ")
    assert "raised StalledError(" in late[1]
    assert all(said.startswith("2 StalledError: ") for _, said, _ in others)
    for taken, _, parameters in (*others, late):
        assert taken == [0, 1, 3, 4, 5]
        assert parameters == late[2]


def _summing(bucket: Any, group: Any) -> Any:
    work = distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hook"])
def test_a_rank_that_runs_no_backward_is_named(hooked: bool) -> None:
    *told, _ = run_ranks(absent, 3, args=(3, hooked), timeout=20.0)
    for rank, text in enumerate(told):
        assert "bucket 0 (" in text
        assert "first" in text
        assert f"of step 2 was not reduced on rank {rank}" in text
        assert "rank 2 is missing: it sleeps or waits at" in text


def killed(rank: int, after_error: bool) -> None:
    ddp = make()
    ddp(rank + 1.0).backward()
    if rank == 1:
        if after_error:
            with pytest.raises(KeyError):
                ddp(1.0, "forward", KeyError("the reason"))
        os._exit(3)
    start = time.monotonic()
    with pytest.raises(StepError) as caught:
        ddp(rank + 1.0).backward()
    took = time.monotonic() - start
    raise StepError(f"{'soon' if took < 3 else 'late'}: {took:.1f} s, {caught.value}")


@pytest.mark.parametrize("after_error", [False, True])
def test_a_rank_that_dies_is_noticed_soon(after_error: bool) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(killed, args=(after_error,), timeout=15.0)
    assert "soon: " in repr(caught.value.exceptions)
