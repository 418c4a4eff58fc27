"""The c10d backend "paceline": works, their order and their end, and what goes wrong."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from paceline.comm.backend.work import WorkExecutor
from paceline.comm.shm.segment import PAGE, Segment
from paceline.errors import (
    ClosedGroupError,
    CollectiveError,
    LateRankError,
    LostRankError,
    RankDiedError,
    RanksError,
    UnmatchedError,
)
from paceline.testing import RankPool, run_ranks
from paceline.torch_private import all_gather_single, reduce_scatter_single


@pytest.fixture(scope="module")
def sharing() -> Iterator[RankPool]:
    with RankPool(2, timeout=30.0, backend="paceline") as pool:
        yield pool


# Works.


def both_backends() -> list[Any]:
    return [distributed.new_group(backend=name) for name in ("gloo", "paceline")]


def as_gloos(rank: int) -> None:
    for group in both_backends():
        own = torch.full((3,), rank + 1.0)
        # Rank 1 comes only after rank 0's wait has timed out.
        if rank == 1:
            distributed.barrier()
        work = distributed.all_reduce(own, group=group, async_op=True)
        future = work.get_future()
        if rank == 0:
            assert not work.is_completed()
            with pytest.raises(RuntimeError):
                work.wait(timedelta(milliseconds=50))
            assert not work.is_completed()
            assert not future.done()
            distributed.barrier()
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        # torch 2.10 cannot show Python what its own works raised.
        if distributed.get_backend(group) == "paceline":
            assert work.exception() is None
        assert [tensor.tolist() for tensor in work.result()] == [[3.0] * 3]
        assert [tensor.tolist() for tensor in future.wait()] == [[3.0] * 3]
        assert work.get_future().done()
        with pytest.raises(RuntimeError, match="source"):
            work.source_rank()
        distributed.destroy_process_group(group)


def test_works_behave_as_gloos(sharing: RankPool) -> None:
    sharing.run(as_gloos)


def unwaited(rank: int) -> None:
    own = torch.full((3,), rank + 1.0)
    work = distributed.all_reduce(own, async_op=True)
    until = time.monotonic() + 10
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(0.001)
    assert own.tolist() == [3.0] * 3


def test_a_work_that_nobody_waits_for_ends_too(sharing: RankPool) -> None:
    sharing.run(unwaited)


def chained(rank: int) -> None:
    def again(future: Any) -> Tensor:
        work = distributed.all_reduce(future.value()[0], async_op=True)
        return work.get_future().then(lambda future: future.value()[0]).wait()

    futures = [
        distributed.all_reduce(torch.full((2,), rank + start), async_op=True).get_future().then(again)
        for start in (0.0, 1.0, 2.0)
    ]
    # The second rounds may come in any order; so the test is only that they end.
    assert all(isinstance(future.wait(), Tensor) for future in futures)


def test_a_callback_may_wait_for_another_collective(sharing: RankPool) -> None:
    sharing.run(chained)


def crossed(rank: int) -> None:
    groups = [distributed.new_group(backend="paceline") for _ in range(2)]
    for order in itertools.permutations(groups):
        turned = order if rank == 0 else order[::-1]
        works = [
            (
                group,
                distributed.all_reduce(
                    torch.tensor([rank + 1.0 + groups.index(group)]), group=group, async_op=True
                ),
            )
            for group in turned
        ]
        for group, work in works:
            work.wait()
            assert work.result()[0].item() == 3.0 + 2 * groups.index(group)
    for group in groups:
        distributed.destroy_process_group(group)


def test_groups_do_not_wait_for_each_other(sharing: RankPool) -> None:
    sharing.run(crossed)


def many_threads(rank: int) -> None:
    groups = [distributed.new_group(backend="paceline") for _ in range(3)]
    wrong: list[object] = []

    def work(group: Any) -> None:
        for number in range(30):
            own = torch.full((number * 40,), rank + 1.0)
            work = distributed.all_reduce(own, group=group, async_op=number % 3 == 0)
            if work is not None:
                work.wait()
            if not own.eq(3.0).all():
                wrong.append((number, own))

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for group in groups:
        distributed.destroy_process_group(group)


def test_one_thread_per_group(sharing: RankPool) -> None:
    sharing.run(many_threads)


def in_order(_: int) -> None:
    """Later calls see the results of earlier ones, whichever thread finishes them."""
    own = torch.ones(9_000)
    for _ in range(4):
        works = [distributed.all_reduce(own, async_op=True) for _ in range(3)]
        distributed.all_reduce(own)
        assert all(work.wait() for work in works)
        own /= 16
    assert own.eq(1.0).all()


def test_calls_happen_in_the_order_of_their_issue(sharing: RankPool) -> None:
    sharing.run(in_order)


def any_tensor(rank: int) -> None:
    leaf = torch.nn.Parameter(torch.full((3,), rank + 1.0))
    distributed.all_reduce(leaf)
    distributed.all_reduce(leaf, async_op=True).wait()
    with torch.inference_mode():
        sealed = torch.full((3,), rank + 1.0)
    distributed.all_reduce(sealed)
    assert leaf.tolist() == [6.0] * 3
    assert leaf.is_leaf
    assert sealed.tolist() == [3.0] * 3
    # An input that is part of the output, as FSDP's are.
    whole = torch.full((6,), rank + 1.0)
    all_gather_single(whole, whole[3 * rank : 3 * rank + 3])
    assert whole.tolist() == [1.0] * 3 + [2.0] * 3


def test_leaves_and_inference_tensors_and_aliases(sharing: RankPool) -> None:
    sharing.run(any_tensor)


def profiled(_: int) -> list[str]:
    with torch.autograd.profiler.profile() as profile:
        distributed.all_reduce(torch.ones(2))
        distributed.barrier(async_op=True).wait()
    return [event.name for event in profile.function_events if event.name.startswith("paceline:")]


def test_torchs_profiler_shows_calls(sharing: RankPool) -> None:
    assert sharing.run(profiled) == [["paceline:all_reduce", "paceline:barrier"]] * 2


def test_shared_memory_is_mapped_for_every_mode() -> None:
    segment = Segment.nameless()
    segment.reserve(0, PAGE)
    with torch.inference_mode():
        segment.at(0, 4)
    assert segment.at(0, 4).fill_(1).tolist() == [1] * 4


# Groups that end.


def names() -> list[str]:
    """Of the backend's threads; those of the watcher and of notes last as long as the process."""
    others = ("paceline-watcher", "paceline-store", "paceline-notes")
    own = [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")]
    return [name for name in own if name not in others]


def ended(rank: int) -> None:
    before = len(names())
    group = distributed.new_group(backend="paceline")
    own = torch.full((2,), rank + 1.0)
    work = distributed.all_reduce(own, group=group, async_op=True)
    assert len(names()) == before + 1
    distributed.destroy_process_group(group)
    assert len(names()) == before
    assert work.wait()
    assert own.tolist() == [3.0] * 2
    with pytest.raises(ClosedGroupError, match="destroyed"):
        group.allreduce([own])


def test_a_group_that_ends_finishes_its_works_and_ends_its_thread(sharing: RankPool) -> None:
    sharing.run(ended)


def forked(_: int) -> None:
    distributed.all_reduce(torch.ones(2), async_op=True).wait()
    child = os.fork()
    if child == 0:
        try:
            distributed.all_reduce(torch.ones(2))
        except ClosedGroupError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    own = torch.ones(2)
    distributed.all_reduce(own)
    assert own.tolist() == [2.0] * 2


def test_a_forked_child_cannot_use_the_group_or_harm_it(sharing: RankPool) -> None:
    sharing.run(forked)


class StuckChannel:
    """No other rank ever comes."""

    rank, size = 0, 2

    def launch(self, collective: object) -> object:
        return collective

    def wait(self, _: object, on_slow: Any, **__: float) -> None:
        while True:
            on_slow()
            time.sleep(0.001)


def test_the_end_of_the_interpreter_waits_for_nobody() -> None:
    class Call:
        collectives = [None]
        outputs: list[Tensor] = []

    executor = WorkExecutor(StuckChannel())  # type: ignore[arg-type]
    work = executor.launch(lambda _: Call(), (), {}, timeout=60.0, is_async=True)
    assert not work.is_completed()
    executor.exit()
    with pytest.raises(ClosedGroupError):
        work.wait()
    assert names() == []


# What goes wrong.

MISTAKES = [
    (lambda rank, group: distributed.all_reduce(torch.ones(3 + rank), group=group), "sum 3 .*sum 4 "),
    (
        lambda rank, group: distributed.all_reduce(
            torch.ones(3, dtype=(torch.int32, torch.int64)[rank]), group=group
        ),
        "torch.int32.*torch.int64",
    ),
    (
        lambda rank, group: (
            distributed.barrier(group=group) if rank else distributed.broadcast(torch.ones(3), 1, group=group)
        ),
        "broadcast.*barrier",
    ),
]


def mistaken(rank: int, number: int) -> list[str]:
    group = distributed.new_group(backend="paceline")
    call, _ = MISTAKES[number]
    with pytest.raises(UnmatchedError) as first:
        call(rank, group)
    with pytest.raises(UnmatchedError) as second:
        distributed.barrier(group=group)
    assert str(first.value) == str(second.value)
    distributed.barrier()
    distributed.destroy_process_group(group)
    return [str(first.value)]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_different_calls_name_both_ranks(sharing: RankPool, number: int) -> None:
    words = MISTAKES[number][1].split(".*")
    for [text] in sharing.run(mistaken, number):
        assert all(word in text for word in (*words, "rank 0", "rank 1")), text


def mistaken_source(rank: int) -> str:
    """It waits for nobody, and so finds out at its next call."""
    group = distributed.new_group(backend="paceline")
    if rank:
        distributed.barrier()
        with pytest.raises(UnmatchedError) as caught:
            distributed.barrier(group=group)
    else:
        distributed.broadcast(torch.ones(3), 0, group=group)
        distributed.barrier()
        with pytest.raises(UnmatchedError) as caught:
            distributed.barrier(group=group)
    distributed.barrier()
    distributed.destroy_process_group(group)
    return str(caught.value)


def test_the_source_of_a_broadcast_that_nobody_joins_is_told_at_its_next_call(
    sharing: RankPool,
) -> None:
    for text in sharing.run(mistaken_source):
        assert all(word in text for word in ("broadcast", "barrier", "rank 0", "rank 1")), text


def misfits(_: int) -> None:
    with pytest.raises(RuntimeError, match="output"):
        distributed.all_gather([torch.zeros(3)] * 2, torch.zeros(4))
    with pytest.raises(RuntimeError, match="split sizes"):
        distributed.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 3], [1, 1])
    with pytest.raises(RuntimeError, match="rows"):
        distributed.all_to_all_single(torch.zeros(5), torch.zeros(5))
    with pytest.raises(RuntimeError, match="2 times the output"):
        reduce_scatter_single(torch.zeros(4), torch.zeros(9))
    distributed.barrier()


def test_misfits_on_one_rank_raise_before_anything_is_launched(sharing: RankPool) -> None:
    sharing.run(misfits)


def late(rank: int) -> list[str]:
    group = distributed.new_group(backend="paceline", timeout=timedelta(seconds=0.3))
    texts = []
    if rank == 0:
        work = distributed.all_reduce(torch.ones(3), group=group, async_op=True)
        with pytest.raises(LateRankError) as caught:
            work.wait()
        texts.append(str(caught.value))
        with pytest.raises(Exception, match="did not end") as told:
            work.get_future().wait()
        texts.append(str(told.value))
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), LateRankError)
    distributed.barrier()
    group.abort()
    distributed.destroy_process_group(group)
    return texts


def test_a_late_rank_is_named_by_wait_and_by_the_future(sharing: RankPool) -> None:
    texts, _ = sharing.run(late)
    assert all("missing ranks: [1]" in text for text in texts)


def late_and_told(rank: int) -> None:
    group = distributed.new_group(backend="paceline", timeout=timedelta(seconds=0.3))
    tensor = torch.ones(3)
    if rank:
        distributed.barrier()
        with pytest.raises(CollectiveError, match="given up a collective that others are late for"):
            distributed.all_reduce(tensor, group=group)
    else:
        with pytest.raises(LateRankError):
            distributed.all_reduce(tensor, group=group)
        tensor.fill_(7)
        distributed.barrier()
    distributed.barrier()
    assert (tensor == (1 if rank else 7)).all()
    with pytest.raises(CollectiveError):
        distributed.all_reduce(tensor, group=group)
    group.abort()
    distributed.destroy_process_group(group)


def test_a_collective_that_was_given_up_changes_no_tensor_later(sharing: RankPool) -> None:
    sharing.run(late_and_told)


def killed(rank: int, note: str) -> None:
    distributed.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(LostRankError, match=r"ranks: \[1\]"):
        distributed.all_reduce(torch.ones(3))
    assert time.monotonic() - start < 10.0
    with pytest.raises(LostRankError):
        distributed.barrier(async_op=True).wait()
    Path(note).write_text("raised")


def test_a_dead_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(killed, args=(str(tmp_path / "note"),), backend="paceline")
    assert (tmp_path / "note").read_text() == "raised"
    assert any(isinstance(error, RankDiedError) for error in caught.value.exceptions)
