"""A stream of collectives: many in flight, several threads, ranks that fail, are late or interrupted."""

import copy
import os
import random
import re
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from threads import in_threads
from torch import Tensor, distributed

from paceline.comm.group import Group
from paceline.comm.shm import libc
from paceline.comm.shm.channel import Channel, _channels, end_threads
from paceline.comm.shm.collective import MAX_IN_FLIGHT, STAGING_BUFFERS, Until
from paceline.comm.shm.collectives import Barrier, BroadcastBytes, OneShotReduce
from paceline.comm.shm.in_place import TwoShotAllReduce
from paceline.comm.shm.local_ranks import find_local_ranks
from paceline.errors import CollectiveError, LateRankError, LostRankError, UnmatchedError
from paceline.testing import RankPool, run_ranks

MIB = 1 << 20


def channels(count: int, timeout: float = 15.0) -> list[Channel]:
    group = Group(distributed.group.WORLD)
    local_ranks = find_local_ranks(group)
    assert local_ranks is not None
    found = [local_ranks.open_channel(group, nbytes=MIB, timeout=timeout) for _ in range(count)]
    return [channel for channel in found if channel is not None]


def total(channel: Channel, tensor: Tensor) -> OneShotReduce:
    return OneShotReduce(channel, tensor, Tensor.add_, "sum")


def total_in_place(channel: Channel, tensor: Tensor) -> TwoShotAllReduce:
    return TwoShotAllReduce(channel, tensor, Tensor.add_, "sum")


def more_than_can_be_in_flight(rank: int) -> None:
    [channel] = channels(1)
    tensors = [torch.full((3,), float(number)) for number in range(2 * MAX_IN_FLIGHT + 50)]
    launched = []
    for number, tensor in enumerate(tensors):
        launched.append(channel.launch(total(channel, tensor)))
        if rank and number == MAX_IN_FLIGHT // 2:
            time.sleep(0.05)  # the other rank must wait until fewer are in flight
    for each in reversed(launched):
        channel.wait(each)
    assert [tensor[0].item() for tensor in tensors] == [
        channel.size * number for number in range(len(tensors))
    ]


def staging_comes_and_goes(rank: int) -> None:
    [channel] = channels(1)
    segment = channel._segment
    channel.release_staging()  # the memory that was asked for begins there
    for number in range(3):
        tensor = torch.full((3 * MIB,), number if rank == 0 else 77, dtype=torch.uint8)
        channel.run(Barrier(channel))
        before = os.fstat(segment.file).st_blocks
        channel.run(Barrier(channel))
        channel.run(BroadcastBytes(channel, tensor, root=0))
        assert (tensor == number).all()
        assert os.fstat(segment.file).st_blocks * 512 >= 3 * MIB
        channel.run(Barrier(channel))
        channel.release_staging()
        channel.run(Barrier(channel))
        assert os.fstat(segment.file).st_blocks == before


def broadcast_ahead(rank: int) -> None:
    [channel] = channels(1)
    numbers = range(STAGING_BUFFERS)
    tensors = [torch.full((5,), number if rank == 0 else 77, dtype=torch.uint8) for number in numbers]
    if rank:
        distributed.barrier()  # the source comes here first
    for tensor in tensors:
        channel.run(BroadcastBytes(channel, tensor, root=0))
        if rank == 0:
            tensor.fill_(88)
    if rank == 0:
        distributed.barrier()
    # From now on the source has to wait until the others have read.
    for number in range(3 * STAGING_BUFFERS):
        tensor = torch.full((5,), number if rank == 0 else 77, dtype=torch.uint8)
        channel.run(BroadcastBytes(channel, tensor, root=0))
        assert (tensor == number).all()
    assert [tensor[0].item() for tensor in tensors] == ([88] * STAGING_BUFFERS if rank == 0 else [*numbers])


def test_the_source_of_a_broadcast_waits_for_nobody(ranks: RankPool) -> None:
    ranks.run(broadcast_ahead)


def test_staging_buffers_are_released_and_reserved_again(ranks: RankPool) -> None:
    ranks.run(staging_comes_and_goes)


def test_more_can_be_launched_than_can_be_in_flight(ranks: RankPool) -> None:
    ranks.run(more_than_can_be_in_flight)


def threads_on_one(rank: int) -> None:
    [channel] = channels(1)

    def work(number: int) -> None:
        chance = random.Random(10 * rank + number)
        for _ in range(10):
            tensors = [torch.ones(5) for _ in range(30)]
            launched = [channel.launch(total(channel, tensor)) for tensor in tensors]
            time.sleep(chance.random() / 1000)
            for each in launched:
                channel.wait(each)
            assert all((tensor == channel.size).all() for tensor in tensors)

    # At times more are launched than can be in flight: each thread checks that.
    in_threads(work, 10)


def test_threads_share_a_channel(ranks: RankPool) -> None:
    ranks.run(threads_on_one)


def thread_each(_: int) -> None:
    several = channels(4)

    def work(number: int) -> None:
        channel = several[number]
        block = channel.arena.empty(300_000, torch.float32)
        assert block is not None
        for turn in range(15):
            block.fill_(number + turn)
            small = torch.full((7,), float(number * turn))
            both = [channel.launch(total_in_place(channel, block)), channel.launch(total(channel, small))]
            for each in both:
                channel.wait(each)
            assert (block == channel.size * (number + turn)).all()
            assert (small == channel.size * number * turn).all()

    in_threads(work, 4)


def test_threads_have_a_channel_each(ranks: RankPool) -> None:
    ranks.run(thread_each)


def in_another_order(rank: int) -> None:
    first, second = channels(2)
    tensors = [torch.ones(MIB), torch.ones(MIB)]
    distributed.barrier()
    if rank == 0:  # waits where nobody comes before it has done its part in the first, too
        launched = first.launch(total_in_place(first, tensors[0]))
        second.run(total_in_place(second, tensors[1]))
        first.wait(launched)
    else:
        time.sleep(0.02)
        first.run(total_in_place(first, tensors[0]))
        second.run(total_in_place(second, tensors[1]))
    assert all((tensor == first.size).all() for tensor in tensors)


def test_a_rank_that_waits_in_one_channel_does_its_part_in_another(ranks: RankPool) -> None:
    ranks.run(in_another_order)


def mixed_up(rank: int) -> str:
    [channel] = channels(1)
    tensor = torch.zeros(8)
    channel.run(total(channel, tensor))
    wrong = BroadcastBytes(channel, tensor.view(torch.uint8), root=0) if rank else total(channel, tensor)
    with pytest.raises(UnmatchedError) as caught:
        channel.run(wrong)
    with pytest.raises(UnmatchedError):
        channel.launch(Barrier(channel))
    return str(caught.value)


def test_ranks_that_call_different_collectives_are_told_of_both(pair: RankPool) -> None:
    for text in pair.run(mixed_up):
        assert "all_reduce sum 8 torch.float32 on rank 0" in text
        assert "broadcast from 0 32 bytes on rank 1" in text


class Fails(OneShotReduce):
    def copy_in(self, chunk: int, views: object) -> None:  # noqa: ARG002
        raise OSError(28, "No space left on device")


def fails(rank: int) -> str:
    [channel] = channels(1)
    kind: Any = OneShotReduce if rank else Fails
    start = time.monotonic()
    with pytest.raises(CollectiveError if rank else OSError, match="No space left") as caught:
        channel.run(kind(channel, torch.zeros(8), Tensor.add_, "sum"))
    assert time.monotonic() - start < 10.0
    with pytest.raises(CollectiveError, match="No space left"):
        channel.run(Barrier(channel))
    return str(caught.value)


def test_a_rank_that_fails_tells_the_others_why(ranks: RankPool) -> None:
    for text in ranks.run(fails)[1:]:
        assert "missing ranks: [0]" in text


def late(rank: int) -> str | None:
    [channel] = channels(1, timeout=0.3)
    tensor, text = torch.ones(5), None
    if rank:
        distributed.barrier()
    launched = channel.launch(total(channel, tensor))
    if not rank:
        with pytest.raises(LateRankError) as caught:
            channel.wait(launched)
        text = str(caught.value)
        distributed.barrier()
    time.sleep(0.1)
    channel.wait(launched)
    assert (tensor == channel.size).all()
    return text


def test_a_late_rank_is_named_and_may_still_come(pair: RankPool) -> None:
    [text, _] = pair.run(late)
    assert re.search(
        r"did not end within the timeout of 0.3 s \(missing ranks: \[1\], here: rank 0, all_reduce sum 5",
        str(text),
    )


KINDS = {"one shot": total, "in place": total_in_place}


def change_when_late(rank: int, kind: str) -> None:
    """The last rank is late; the others say so in their last element."""
    [channel] = channels(1)
    numel = 5 if kind == "one shot" else 2 * MIB  # two chunks
    tensor = torch.ones(numel)
    tensor[-1] = 0
    is_late = rank == channel.size - 1
    if is_late:
        distributed.barrier()
    launched = channel.launch(KINDS[kind](channel, tensor))
    if not is_late:
        with pytest.raises(LateRankError):
            channel.wait(launched, timeout=0.2)
        assert channel.change(launched, lambda: tensor[-1].fill_(1))
        distributed.barrier()
    channel.wait(launched)
    assert (tensor[:-1] == channel.size).all()
    assert tensor[-1] == channel.size - 1  # one of the late rank has nothing to say
    assert not channel.change(launched, lambda: tensor.fill_(77))
    channel.run(Barrier(channel))
    assert (tensor[:-1] == channel.size).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rank_gave_can_be_changed_until_all_ranks_have_come(ranks: RankPool, kind: str) -> None:
    ranks.run(change_when_late, kind)


def give_up_when_late(rank: int, kind: str) -> None:
    [channel] = channels(1)
    tensor = torch.ones(5 if kind == "one shot" else 2 * MIB)
    is_late = rank == channel.size - 1
    if is_late:
        distributed.barrier()
    launched = channel.launch(KINDS[kind](channel, tensor))
    if not is_late:
        with pytest.raises(LateRankError):
            channel.wait(launched, timeout=0.2)
        assert channel.give_up(launched)
        tensor.fill_(7)
        distributed.barrier()
    with pytest.raises(CollectiveError, match="given up a collective that others are late for"):
        channel.wait(launched)
    distributed.barrier()
    assert (tensor == (1 if is_late else 7)).all()
    with pytest.raises(CollectiveError):
        channel.run(Barrier(channel))


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_that_was_given_up_ends_on_no_rank(ranks: RankPool, kind: str) -> None:
    ranks.run(give_up_when_late, kind)


def change_beside_a_failed_rank(rank: int) -> int | None:
    """Rank 0 is late, rank 2 fails: what rank 1 changes still counts for rank 0."""
    [channel] = channels(1)
    tensor = torch.zeros(5)
    if rank == 0:
        distributed.barrier()
    launched = channel.launch(total(channel, tensor))
    if rank == 2:
        channel._failures.fail(KeyboardInterrupt())
        distributed.barrier()
        return None
    if rank == 1:
        with pytest.raises(LateRankError):
            channel.wait(launched, timeout=0.2)
        assert channel.change(launched, partial(tensor[-1].fill_, 1))
        distributed.barrier()
        return None
    channel.wait(launched)
    return int(tensor[-1])


def test_a_rank_that_is_late_learns_of_a_change_though_another_rank_has_failed() -> None:
    assert run_ranks(change_beside_a_failed_rank, 3, timeout=20.0)[0] == 1


def close_calls(rank: int, kind: str, rounds: int) -> list[tuple[bool, int]]:
    """Ranks change their parts about when the last one comes: whether each could, and what the sum says."""
    [channel] = channels(1)
    chance, found = random.Random(rank), []
    for number in range(rounds):
        tensor = torch.zeros(5 if kind == "one shot" else MIB)
        distributed.barrier()
        time.sleep(chance.uniform(0, 0.002))
        launched = channel.launch(KINDS[kind](channel, tensor))
        is_changed = False
        if number % channel.size != rank:
            time.sleep(chance.uniform(0, 0.001))
            is_changed = channel.change(launched, partial(tensor[-1].fill_, 1))
        channel.wait(launched)
        found.append((is_changed, int(tensor[-1])))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_reaches_all_ranks_or_is_refused(ranks: RankPool, kind: str) -> None:
    told = list(zip(*ranks.run(close_calls, kind, 200), strict=True))
    for of_ranks in told:
        changes = sum(is_changed for is_changed, _ in of_ranks)
        assert [total for _, total in of_ranks] == [changes] * len(of_ranks)
    assert len({of_ranks[0][1] for of_ranks in told}) > 1  # some were changed, and some were not


def one_dead_one_slow(rank: int) -> str | None:
    [channel] = channels(1)
    text = None
    if rank == 1:
        channel._failures._locks.has_ended = lambda other: other == 2  # type: ignore[method-assign]
        with pytest.raises(LostRankError) as caught:
            channel.run(Barrier(channel))
        text = str(caught.value)
    distributed.barrier()
    return text


def test_a_dead_rank_is_seen_though_another_is_slow() -> None:
    with RankPool(3, timeout=20.0) as pool:
        assert "missing ranks: [2]" in str(pool.run(one_dead_one_slow)[1])


def launched_by_all(rank: int) -> None:
    """The other rank has sent all its signals before it ended."""
    [channel] = channels(1)
    data = torch.full((10,), rank, dtype=torch.uint8)
    if rank:
        channel.run(BroadcastBytes(channel, data, root=0))
    else:
        launched = channel.launch(BroadcastBytes(channel, data, root=0))
    distributed.barrier()
    if not rank:
        channel._failures._locks.has_ended = lambda _: True  # type: ignore[method-assign]
        channel._poller.poll = lambda _: False  # type: ignore[method-assign]
        channel.wait(launched)
        channel._wait_for(launched.end, Until.ALL_DONE)
    assert not data.any()


def test_a_rank_that_ended_after_its_last_signal_is_not_missed(pair: RankPool) -> None:
    pair.run(launched_by_all)


def one_is_busy(rank: int) -> None:
    [channel] = channels(1)
    store = distributed.group.WORLD.get_group_store()
    block = channel.arena.empty(3 * MIB, torch.float32)
    assert block is not None
    for turn in range(5):
        block.fill_(turn + rank)
        if rank == turn % 2:
            launched = channel.launch(total_in_place(channel, block))
            store.set(f"launched in turn {turn}", "")
            store.wait([f"over in turn {turn}"])  # is in backward, say
            channel.wait(launched)
            assert (block == 2 * turn + 1).all()
        else:
            store.wait([f"launched in turn {turn}"])
            channel.run(total_in_place(channel, block))
            assert (block == 2 * turn + 1).all()
            block.fill_(-1.0)  # its own memory again: the other rank must not read it any more
            store.set(f"over in turn {turn}", "")
        distributed.barrier()


def test_a_rank_that_waits_reduces_the_slices_of_one_that_is_busy(pair: RankPool) -> None:
    pair.run(one_is_busy)


class StopsWhenItHelps(TwoShotAllReduce):
    def reduce_slice(self, chunk: int, views: Any, rank: int) -> None:
        if rank != self._rank:
            store = distributed.group.WORLD.get_group_store()
            store.set("helps", "")
            store.wait(["go on"])
        super().reduce_slice(chunk, views, rank)


def help_at_random(rank: int) -> None:
    """More chunks than there are claims for, several collectives at a time, and ranks that come late."""
    [channel] = channels(1)
    found = [channel.arena.empty(9 * MIB // 4, torch.float32) for _ in range(3)]
    tensors = [tensor for tensor in found if tensor is not None]
    chance = random.Random(rank)
    for _ in range(60):
        launched = []
        for tensor in tensors:
            tensor.fill_(rank + 1)
            if chance.random() < 0.5:
                time.sleep(chance.uniform(0, 0.004))
            launched.append(channel.launch(total_in_place(channel, tensor)))
        for tensor, each in zip(tensors, launched, strict=True):
            channel.wait(each)
            assert (tensor == channel.size * (channel.size + 1) / 2).all()


def test_sums_are_right_whoever_helps(ranks: RankPool) -> None:
    ranks.run(help_at_random)


def helper_stops(rank: int) -> list[str]:
    [channel] = channels(1, timeout=0.3)
    store = distributed.group.WORLD.get_group_store()
    tensor, texts = torch.ones(MIB), []
    if rank:
        store.wait(["launched by the helped one"])
    launched = channel.launch(StopsWhenItHelps(channel, tensor, Tensor.add_, "sum"))
    if rank == 0:
        store.set("launched by the helped one", "")
        store.wait(["helps"])
        with pytest.raises(LateRankError) as late:
            channel.wait(launched)
        before = channel._failures._locks.has_ended
        channel._failures._locks.has_ended = lambda _: True  # type: ignore[method-assign]
        with pytest.raises(LostRankError) as lost:
            channel.wait(launched)
        channel._failures._locks.has_ended = before  # type: ignore[method-assign]
        channel._failures.error = None
        texts = [str(late.value), str(lost.value)]
        store.set("go on", "")
    channel.wait(launched)
    assert (tensor == channel.size).all()
    distributed.barrier()
    return texts


def test_a_helper_that_stops_is_named(pair: RankPool) -> None:
    texts, _ = pair.run(helper_stops)
    assert all("missing ranks: [1]" in text for text in texts)


def without_hints(rank: int) -> None:
    before = libc.value_hint
    libc.value_hint = lambda _: memoryview(bytes(4)).cast("I")
    try:
        [channel] = channels(1)
    finally:
        libc.value_hint = before
    for turn in range(20):
        tensors = [torch.full((5,), float(turn + rank)), torch.full((MIB,), float(turn + rank))]
        launched = [
            channel.launch(total(channel, tensors[0])),
            channel.launch(total_in_place(channel, tensors[1])),
        ]
        for each, tensor in zip(launched, tensors, strict=True):
            channel.wait(each)
            assert (tensor == sum(turn + other for other in range(channel.size))).all()


def test_a_c_library_that_gives_no_hints_is_slower_and_not_wrong(ranks: RankPool) -> None:
    ranks.run(without_hints)


def wait_with_alarm(channel: Channel, launched: Any, seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    channel.wait(launched)


def interrupted(rank: int) -> None:
    [channel] = channels(1)
    chance = random.Random(rank)
    store = distributed.group.WORLD.get_group_store()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for turn in range(40):
            tensor = torch.full((10,), float(turn))
            if rank:
                store.wait([f"interrupted in turn {turn}"])
            launched = channel.launch(total(channel, tensor))
            if not rank:
                # When this rank has done its part: an interrupt in there is the end of the collective.
                with pytest.raises(KeyboardInterrupt):
                    wait_with_alarm(channel, launched, 0.02 + chance.random() * 0.002)
                store.set(f"interrupted in turn {turn}", "")
            channel.wait(launched)
            assert (tensor == channel.size * turn).all()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_wait_can_be_taken_up_again(pair: RankPool) -> None:
    pair.run(interrupted)


def given_up_several_times(rank: int) -> None:
    [channel] = channels(1)
    tensors = [torch.ones(2 * MIB) for _ in range(3)]
    if not rank:
        for tensor in tensors:  # the thread of the first is still at work when the next is given up
            channel.launch(total_in_place(channel, tensor))
            channel.finish_in_background()
            time.sleep(0.01)
        distributed.barrier()
        return
    for tensor in tensors:
        time.sleep(0.02)
        channel.run(total_in_place(channel, tensor))
        assert (tensor == channel.size).all()
    distributed.barrier()


def test_what_is_given_up_is_finished_in_the_background_however_often(pair: RankPool) -> None:
    pair.run(given_up_several_times)


def exits_with_something_in_flight(rank: int) -> None:
    [channel] = channels(1)
    if not rank:
        channel.launch(total_in_place(channel, torch.ones(2 * MIB)))
        channel.finish_in_background()
        end_threads(5.0)
        assert "paceline-channel" not in [thread.name for thread in threading.enumerate()]
    distributed.barrier()


def test_the_thread_that_works_in_the_background_ends_when_the_interpreter_exits() -> None:
    run_ranks(exits_with_something_in_flight)


def made_meanwhile(_: int) -> None:
    [channel] = channels(1)
    ended = threading.Event()

    def make() -> None:
        while not ended.is_set():
            made = copy.copy(channel)
            _channels[id(made)] = made

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _turn in range(300):
            channel._others_in_flight()  # raised when it iterated over a set
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)


def test_channels_are_made_while_a_thread_looks_for_others(pair: RankPool) -> None:
    pair.run(made_meanwhile)
