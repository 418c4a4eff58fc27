"""RankPool: ranks are kept from call to call, and replaced after a failure."""

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from paceline.testing import RankPool, RanksError

pytestmark = pytest.mark.usefixtures("nothing_left")

calls = 0


def pid(_: int) -> int:
    return os.getpid()


def count_calls(_: int) -> int:
    global calls
    calls += 1
    return calls


def total(rank: int, value: float) -> float:
    tensor = torch.tensor(value + rank)
    dist.all_reduce(tensor)
    return tensor.item()


def fail_while_others_wait(rank: int) -> None:
    if rank == 0:
        raise ValueError("left the others waiting")
    dist.all_reduce(torch.ones(1))


def fail_alike(_: int) -> None:
    raise ValueError("everywhere")


def hang(_: int) -> None:
    time.sleep(300)


def kill_itself(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_same_ranks_answer_every_call() -> None:
    with RankPool(2) as pool:
        pids = pool.run(pid)
        assert len({os.getpid(), *pids}) == 3
        assert pool.run(pid) == pids


def test_the_group_and_the_module_are_kept() -> None:
    with RankPool(3) as pool:
        assert pool.run(total, 1.0) == [6.0] * 3
        assert pool.run(count_calls) == [1] * 3
        assert pool.run(total, 2.0) == [9.0] * 3
        assert pool.run(count_calls) == [2] * 3


def test_two_pools_are_independent() -> None:
    with RankPool(1) as one, RankPool(2) as two:
        assert one.run(total, 1.0) == [1.0]
        assert two.run(total, 1.0) == [3.0] * 2
        assert one.run(total, 2.0) == [2.0]


@pytest.mark.parametrize("fn", [fail_alike, fail_while_others_wait, kill_itself])
def test_after_a_failed_call_the_pool_starts_new_ranks(
    monkeypatch: pytest.MonkeyPatch, fn: Callable[[int], None]
) -> None:
    monkeypatch.setattr("paceline.testing.rank_answers.GRACE_SECONDS", 0.2)
    with RankPool(2) as pool:
        before = pool.run(pid)
        with pytest.raises(RanksError, match=fn.__name__):
            pool.run(fn)
        assert not set(pool.run(pid)) & set(before)
        assert pool.run(total, 1.0) == [3.0] * 2


def test_a_call_after_a_timeout_works() -> None:
    with RankPool(2, timeout=1.0) as pool:
        with pytest.raises(RanksError) as caught:
            pool.run(hang)
        assert str(caught.value.exceptions[0]).count("in hang") == 2
        assert pool.run(total, 1.0) == [3.0] * 2


def test_wrong_arguments_keep_the_ranks() -> None:
    with RankPool(2) as pool:
        before = pool.run(pid)
        with pytest.raises(TypeError, match="fn must be a function at the top level"):
            pool.run(lambda rank: rank)
        assert pool.run(pid) == before


def test_a_closed_pool_takes_no_calls() -> None:
    with RankPool(2) as pool:
        pool.run(pid)
    with pytest.raises(RuntimeError, match="the pool is closed"):
        pool.run(pid)
    pool.close()


def test_an_error_in_the_callers_block_ends_the_ranks() -> None:
    def fail() -> None:
        with RankPool(2) as pool:
            pool.run(pid)
            raise LookupError

    with pytest.raises(LookupError):
        fail()


def test_an_unused_pool_starts_nothing() -> None:
    RankPool(2).close()


def test_world_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"world must be positive \(world: 0\)"):
        RankPool(0)


def test_the_shared_pool_runs_calls(pool: RankPool) -> None:
    assert pool.run(total, 1.0) == [3.0] * 2
