"""Communication hooks that are wrong: torch's error types, clear words, and training that goes on."""

import builtins
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from wrappers import WRAPPERS, Net, grads, of_whole_batch, refusal, train

from paceline import DistributedDataParallel, HookArgumentsError, hooks
from paceline.testing import RankPool, run_ranks

Hook = Any
Reduced = torch.futures.Future[torch.Tensor]


def kinds(error: BaseException) -> set[str]:
    """The built-in types that an error is of."""
    return {kind.__name__ for kind in type(error).__mro__ if kind.__module__ == builtins.__name__}


def assert_trains(ddp: Any, rank: int, step: int) -> None:
    train(ddp, rank, step)
    want = of_whole_batch(Net().double(), step)
    for mine, whole in zip(grads(ddp), want, strict=True):
        torch.testing.assert_close(mine, whole)


# Refused where they are registered.


def a_number_for_bucket(state: object, bucket: int) -> Reduced: ...


def returns_a_tensor(state: object, bucket: GradBucket) -> torch.Tensor: ...


def returns_any_future(state: object, bucket: GradBucket) -> torch.futures.Future: ...


REFUSED: dict[str, tuple[Hook, str]] = {
    "None": (None, "must be callable"),
    "a future": (torch.futures.Future(), "must be callable"),
    "a number for bucket": (a_number_for_bucket, "bucket annotation should be dist.GradBucket"),
    "returns a tensor": (returns_a_tensor, "return annotation should be torch.futures.Future"),
    "returns any future": (returns_any_future, "return annotation should be torch.futures.Future"),
}


def refused(rank: int, wrapper: str, name: str) -> tuple[set[str], str]:
    ddp = WRAPPERS[wrapper](Net().double())
    hook, _ = REFUSED[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of which type is for the test to say
        ddp.register_comm_hook(None, hook)
    assert_trains(ddp, rank, 0)
    ddp.register_comm_hook(None, allreduce_hook)
    assert_trains(ddp, rank, 1)
    return kinds(caught.value), str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_hook_is_refused_as_by_torch(pair: RankPool, name: str) -> None:
    (theirs, _), (ours, said) = (pair.run(refused, wrapper, name)[0] for wrapper in WRAPPERS)
    assert ours >= theirs
    assert REFUSED[name][1] in said


# The number of arguments: torch looks for one that is called bucket, and otherwise leaves it to backward.


def takes_none() -> Reduced: ...


def takes_a_state(state: object) -> Reduced: ...


def takes_three(state: object, bucket: GradBucket, extra: object) -> Reduced: ...


def takes_bucket_by_name(state: object, *, bucket: GradBucket) -> Reduced: ...


def miscounted(rank: int, wrapper: str, hook: Hook) -> tuple[str, set[str], str]:
    ddp = WRAPPERS[wrapper](Net().double())
    moment = "register"
    with pytest.raises(Exception) as caught:  # noqa: PT011, PT012  # the test says of which type, and when
        ddp.register_comm_hook(None, hook)
        moment = "backward"
        train(ddp, rank)
    if wrapper == "paceline":
        ddp.register_comm_hook(None, allreduce_hook)
        assert_trains(ddp, rank, 0)
    return moment, kinds(caught.value), str(caught.value)


@pytest.mark.parametrize("hook", [takes_none, takes_a_state, takes_three, takes_bucket_by_name])
def test_hooks_of_other_arguments_are_refused_at_once(pair: RankPool, hook: Callable[..., Any]) -> None:
    (_, theirs, _), (moment, ours, said) = (pair.run(miscounted, wrapper, hook)[0] for wrapper in WRAPPERS)
    assert moment == "register"
    assert ours >= theirs
    assert "two positional arguments, a state and a bucket" in said
    assert hook.__name__ in said


def test_the_error_shows_its_message_as_it_is() -> None:
    assert str(HookArgumentsError("plain words")) == "plain words"


class Averages:
    def __call__(self, state: object, bucket: GradBucket) -> Reduced:
        return allreduce_hook(state, bucket)


def in_other_words(_: object, full: GradBucket) -> Reduced:
    return allreduce_hook(None, full)


def takes_all(*args: Any, **_: Any) -> Reduced:
    return allreduce_hook(*args)


def with_an_option(state: object, bucket: GradBucket, scale: float = 1.0) -> Reduced:
    return allreduce_hook(state, bucket).then(lambda future: future.value() * scale)


ACCEPTED: dict[str, Hook] = {
    "an object": Averages(),
    "other names": in_other_words,
    "any arguments": takes_all,
    "partial": functools.partial(with_an_option, scale=1.0),
    "a method": Averages().__call__,
}


def accepted(rank: int, name: str) -> None:
    ddp = DistributedDataParallel(Net().double())
    ddp.register_comm_hook(None, ACCEPTED[name])
    for step in range(3):
        assert_trains(ddp, rank, step)


@pytest.mark.parametrize("name", ACCEPTED)
def test_whatever_can_be_called_with_a_state_and_a_bucket_is_a_hook(pair: RankPool, name: str) -> None:
    pair.run(accepted, name)


# Wrong in backward, on every rank.


def then(make: Callable[[torch.Tensor], object]) -> Hook:
    return lambda bucket: allreduce_hook(None, bucket).then(lambda future: make(future.value()))


def fail(_: object) -> Any:
    raise KeyError("the hook's own")


MISTAKES: dict[str, tuple[Hook, str]] = {
    "a tensor": (lambda bucket: bucket.buffer(), "must return a torch.futures.Future object, but got Tensor"),
    "None": (lambda _: None, "must return a torch.futures.Future object, but got NoneType"),
    "a future of text": (then(lambda _: "text"), "wanted: 40 elements of torch.float64, got: str"),
    "a future of None": (then(lambda _: None), "wanted: 40 elements of torch.float64, got: NoneType"),
    "a future of two": (then(lambda full: [full, full]), "wanted: 40 elements of torch.float64, got: list"),
    "integers": (then(lambda full: full.long()), "got: torch.int64"),
    "complex": (then(lambda full: full.to(torch.complex128)), "got: torch.complex128"),
    "fewer elements": (then(lambda full: full[:-1]), "got: 39 elements"),
    "raises": (fail, "the hook's own"),
    "its callback raises": (then(fail), "the hook's own"),
}
# Here torch raises nothing: it converts, reads past the end of what it was given, and is killed by SIGSEGV.
NOT_RAISED_BY_TORCH = {"integers", "complex", "fewer elements", "None"}


def mistaken(rank: int, wrapper: str, name: str) -> tuple[set[str], str]:
    ddp = WRAPPERS[wrapper](Net().double())
    wrong = False

    def hook(state: object, bucket: GradBucket) -> Reduced:
        return MISTAKES[name][0](bucket) if wrong else allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    assert_trains(ddp, rank, 0)
    wrong = True
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of which type is for the test to say
        train(ddp, rank, 1)
    wrong = False
    if wrapper == "paceline":
        assert grads(ddp) == []
        assert_trains(ddp, rank, 2)
    return kinds(caught.value), str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_hooks_mistake_is_of_torchs_type_and_said_in_words(pair: RankPool, name: str) -> None:
    ours, said = pair.run(mistaken, "paceline", name)[0]
    theirs = {"RuntimeError"} if name in NOT_RAISED_BY_TORCH else pair.run(mistaken, "torch", name)[0][0]
    assert ours >= theirs
    assert MISTAKES[name][1] in said


# Registered twice.


def twice(rank: int, wrapper: str, first: str, second: str) -> tuple[set[str], str]:
    ddp = WRAPPERS[wrapper](Net().double())
    register = {
        "hook": lambda: ddp.register_comm_hook(None, allreduce_hook),
        "built-in": lambda: ddp._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE),
    }
    register[first]()
    with pytest.raises(Exception, match="only be called once") as caught:
        register[second]()
    assert_trains(ddp, rank, 0)
    return kinds(caught.value), str(caught.value)


@pytest.mark.parametrize("second", ["hook", "built-in"])
@pytest.mark.parametrize("first", ["hook", "built-in"])
def test_a_second_hook_is_refused_and_the_first_stays(pair: RankPool, first: str, second: str) -> None:
    (theirs, _), (ours, _) = (pair.run(twice, wrapper, first, second)[0] for wrapper in WRAPPERS)
    assert ours >= theirs


# Wrong on one rank only.


def broken_on_the_last(rank: int) -> tuple[str, float]:
    ddp = DistributedDataParallel(Net().double())  # the group waits for half an hour

    def hook(state: object, bucket: GradBucket) -> Reduced:
        if broken:
            raise LookupError("only here")
        return allreduce_hook(state, bucket)

    broken = False
    ddp.register_comm_hook(None, hook)
    train(ddp, rank)
    broken = rank == 2
    start = time.monotonic()
    with pytest.raises((LookupError, RuntimeError)) as caught:
        train(ddp, rank)
    return f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - start


def test_a_hook_that_raises_on_one_rank_of_three() -> None:
    *waiting, (raised, _) = run_ranks(broken_on_the_last, 3, timeout=30.0)
    assert raised == "LookupError: only here"
    for said, seconds in waiting:
        assert said.startswith("PeerError: rank 2 raised LookupError('only here')")
        assert seconds < 10, "as long as that, and ranks wait for a timeout"


def sparse_after_a_lost_step(rank: int, hook: Any) -> list[bool]:
    ddp = DistributedDataParallel(nn.Embedding(6, 3, sparse=True))
    ddp.register_comm_hook(None, hook)
    lost = []
    for step in range(3):
        ddp.zero_grad()
        loss = ddp(torch.tensor([rank, 4])).sum()
        if rank and not step:
            fault = ddp.module.weight.register_hook(lambda _: 1 // 0)
        lost.append(refusal(loss.backward) is not None)
        if rank and not step:
            fault.remove()
    want = torch.zeros(6, 3)
    want[0] = want[1] = 0.5
    want[4] = 1.0
    assert torch.equal(ddp.module.weight.grad.to_dense(), want)
    return lost


@pytest.mark.parametrize("hook", [allreduce_hook, hooks.average()], ids=["torch's", "ours"])
def test_a_sparse_parameter_goes_on_after_a_lost_step(pair: RankPool, hook: Any) -> None:
    assert pair.run(sparse_after_a_lost_step, hook) == [[True, False, False]] * 2
