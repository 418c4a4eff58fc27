"""The shared file, the blocks in it, semaphores, and locks of live ranks: in one process and its children."""

import ctypes
import gc
import mmap
import os
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.comm.shm import libc, segment
from paceline.comm.shm.arena import Arena
from paceline.comm.shm.claims import MAX_CHUNKS_AHEAD, SliceClaims, claims_bytes, make_claims
from paceline.comm.shm.polling import Poller
from paceline.comm.shm.segment import HEAD, HEAD_BYTES, REGIONS, RankLocks, Segment
from paceline.comm.shm.semaphores import Signal, make_signal, signal_bytes

MIB = 1 << 20


@pytest.fixture
def nameless() -> Segment:
    return Segment.nameless()


@pytest.fixture
def arena(nameless: Segment) -> Arena:
    return Arena(nameless, rank=1)


def in_child(act: Callable[[], None]) -> int:
    """What a forked child that does something ends with: 0 if it did not raise."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            torch.set_num_threads(1)  # the parent's threads are not there
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def memory_of(file: Segment) -> int:
    return os.fstat(file.file).st_blocks * 512


def test_a_nameless_segment_is_private_and_has_no_file(nameless: Segment) -> None:
    assert str(Path(nameless.path).readlink()).startswith("/memfd:paceline")
    assert not nameless.is_limited
    assert not os.get_inheritable(nameless.file)
    assert not list(Path("/dev/shm").glob(f"*{os.fstat(nameless.file).st_ino}*"))


def test_a_named_segment_is_its_owners_alone_and_unlinked_once_opened() -> None:
    first, second = Segment.named(), Segment.named()
    assert stat.S_IMODE(os.fstat(first.file).st_mode) == 0o600
    assert len(Path(first.path).name) == len("paceline-") + 32  # 128 bits
    assert first.path != second.path
    opened = Segment.at_path(first.path, first.inode)
    for each in (first, second):
        each.unlink()
        assert not Path(each.path).exists()
    first.reserve(HEAD, HEAD_BYTES)
    first.at(HEAD, 1).fill_(7)
    assert opened.at(HEAD, 1).item() == 7


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_another_file_of_the_same_path_is_neither_opened_nor_read(tmp_path: Path, content: bytes) -> None:
    # To map and read a short file would kill the process.
    other = tmp_path / "other"
    other.write_bytes(content)
    with pytest.raises(OSError, match="is another file here"):
        Segment.at_path(str(other), other.stat().st_ino)


def test_looking_at_another_segment_of_ours_keeps_its_locks(nameless: Segment) -> None:
    RankLocks(nameless, 0)
    with pytest.raises(OSError, match="is another file here"):
        Segment.at_path(nameless.path, nameless.inode + 1)
    assert in_child(lambda: not_ended(nameless)) == 0


def not_ended(file: Segment) -> None:
    assert not RankLocks(file, 1).has_ended(0)


def test_a_segment_that_is_too_long_for_the_system_leaves_no_descriptor() -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        before = len(list(Path("/proc/self/fd").iterdir()))
        for make in (Segment.nameless, Segment.named):
            with pytest.raises(OSError, match="too large"):
                make()
        gc.collect()
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    before = set(Path("/dev/shm").glob("paceline-*"))
    assert in_child(limited) == 0
    assert set(Path("/dev/shm").glob("paceline-*")) <= before


def test_a_full_file_system_is_noticed_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "_SHM", tmp_path)

    def small() -> None:
        assert mount_small(tmp_path)
        file = Segment.named()
        arena = Arena(file, rank=0)
        with pytest.raises(OSError, match="No space left"):
            arena.reserve(9 * MIB)
        assert memory_of(file) == 0
        assert arena.empty(9 * MIB, torch.uint8) is None
        kept = arena.empty(6 * MIB, torch.uint8)
        assert kept is not None
        assert kept.fill_(1).all()
        assert arena.empty(6 * MIB, torch.uint8) is None

    if in_child(lambda: None if mount_small(tmp_path) else sys.exit(1)):
        pytest.skip("a small file system needs root and mount namespaces")
    assert in_child(small) == 0


def mount_small(directory: Path) -> bool:
    """Mount a file system of 8 MiB, for this process alone; whether that was possible."""
    system = ctypes.CDLL(None)
    new_namespace, private = 0x20000, 0x4000 | 0x40000  # CLONE_NEWNS; MS_REC, MS_PRIVATE
    return not (
        system.unshare(new_namespace)
        or system.mount(b"none", b"/", None, ctypes.c_ulong(private), None)
        or system.mount(b"none", bytes(directory), b"tmpfs", ctypes.c_ulong(0), b"size=8m")
    )


def test_reserving_ends_though_a_timer_interrupts_it(nameless: Segment) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        nameless.reserve(REGIONS, 256 * MIB)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert memory_of(nameless) == 256 * MIB


def test_nothing_is_reserved_where_nothing_is_asked_for(nameless: Segment) -> None:
    nameless.reserve(REGIONS, 0)
    assert memory_of(nameless) == 0


def test_a_block_is_freed_with_its_last_view_and_its_addresses_are_used_again(
    nameless: Segment, arena: Arena
) -> None:
    block = arena.empty(MIB, torch.float32)
    assert block is not None
    view, span = block[5:10], arena.span_of(block)
    assert span is not None
    assert (span.nbytes, memory_of(nameless)) == (4 * MIB, 4 * MIB)
    inner = arena.span_of(view)
    assert inner is not None
    assert (inner.offset, inner.nbytes) == (span.offset + 20, 20)
    del block
    assert memory_of(nameless) == 4 * MIB
    del view
    assert memory_of(nameless) == 0
    again = arena.empty(MIB, torch.float32)
    assert again is not None
    assert arena.span_of(again) == span


def test_only_contiguous_tensors_of_the_arena_have_a_span_in_it(arena: Arena) -> None:
    block = arena.empty(6, torch.int64)
    assert block is not None
    assert arena.span_of(block.view(2, 3).t()) is None
    assert arena.span_of(torch.zeros(6)) is None
    assert arena.empty(0, torch.int64) is None


def test_releasing_what_is_unused_keeps_what_was_allocated_since(nameless: Segment, arena: Arena) -> None:
    reserved = arena.reserve(2 * MIB)
    block = arena.empty(MIB, torch.uint8)
    assert block is not None
    block.fill_(1)
    arena.release_unused(reserved)
    assert block.all()
    assert memory_of(nameless) == MIB


def test_a_forked_child_frees_nothing_of_its_parents(arena: Arena) -> None:
    blocks = [arena.empty(MIB, torch.uint8)]
    assert blocks[0] is not None
    blocks[0].fill_(1)
    assert in_child(blocks.clear) == 0
    assert blocks[0].all()


def test_blocks_come_and_go_in_several_threads_and_in_the_garbage_collector(
    nameless: Segment, arena: Arena
) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(150):
            block = arena.empty(1000 + turn % 7, torch.uint8)
            assert block is not None
            block.fill_(number)
            cycle: list[object] = [block]
            cycle.append(cycle)
            if not bool((block == number).all()):
                wrong.append(block)

    before = gc.get_threshold()
    gc.set_threshold(7, 2, 2)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert not wrong
    assert memory_of(nameless) == 0


@pytest.fixture
def signals() -> Iterator[tuple[Signal, Signal]]:
    """Both ends of one signal, of two ranks."""
    with mmap.mmap(-1, signal_bytes(2)) as memory:
        start = ctypes.c_ubyte.from_buffer(memory)
        address = ctypes.addressof(start)
        make_signal(address, 2)
        yield Signal(address, 0, 2), Signal(address, 1, 2)
        del start


def test_signals_are_counted(signals: tuple[Signal, Signal]) -> None:
    ours, theirs = signals
    assert ours.first_missing(1) == 1
    for _ in range(3):
        theirs.post()
    assert [ours.has_come(1, count) for count in (1, 3, 4)] == [True, True, False]
    assert theirs.all_missing(1) == [0]
    theirs.post()
    assert ours.sleep(1, 4, 5.0)
    assert not ours.sleep(1, 5, 0.01)


def test_no_signal_is_lost_to_an_interrupt(signals: tuple[Signal, Signal]) -> None:
    # The counts that were seen are thrown away, as when KeyboardInterrupt comes before they are kept.
    ours, theirs = signals
    for _ in range(3):
        theirs.post()
    next(ours._polls[1])
    ours._sleepers[1].sleep(1.0)
    assert ours.has_come(1, 2) or ours.sleep(1, 2, 0.01)
    assert ours.sleep(1, 3, 0.01) or ours.has_come(1, 3)
    assert not ours.has_come(1, 4)


def test_a_hint_says_whether_there_is_a_signal(signals: tuple[Signal, Signal]) -> None:
    ours, theirs = signals
    hint = ours.hints[1]
    assert not Poller().poll(hint)
    theirs.post()
    assert Poller().poll(hint)
    assert ours.first_missing(1) is None
    assert not hint[0]


def test_a_rank_polls_less_if_waits_are_long_or_others_keep_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    poller, never, yields = Poller(), memoryview(bytes(4)).cast("I"), []
    monkeypatch.setattr(libc, "yield_core", lambda: yields.append(1))

    def count() -> int:
        yields.clear()
        assert not poller.poll(never)
        return len(yields)

    most = count()
    poller.learn(1.0)
    assert 0 < count() < most
    for _ in range(10):
        poller.learn(1.0)
    assert count() == 0
    for _ in range(10):
        poller.learn(0.00001)
    assert count() == most
    monkeypatch.setattr(libc, "yield_core", lambda: yields.append(time.sleep(0.002)))
    assert count() == most
    assert count() == 0


@pytest.fixture
def claims() -> Iterator[tuple[SliceClaims, SliceClaims]]:
    """The claims of a channel, as two ranks see them."""
    with mmap.mmap(-1, claims_bytes(2)) as memory:
        start = ctypes.c_ubyte.from_buffer(memory)
        address = ctypes.addressof(start)
        make_claims(address, 2)
        yield SliceClaims(address, 0, 2), SliceClaims(address, 1, 2)
        del start


def test_a_slice_is_claimed_once_however_often_its_memory_is_used(
    claims: tuple[SliceClaims, SliceClaims],
) -> None:
    first, second = claims
    for chunk in range(5 * MAX_CHUNKS_AHEAD):
        helps = chunk % 3 == 0
        assert not helps or first.claim_to_help(chunk, 1)
        assert first.claim_own(chunk)
        assert second.claim_own(chunk) == (not helps)
        assert not first.claim_to_help(chunk, 1)
        assert not second.claim_to_help(chunk, 0)
        assert second.helper_of(chunk) == (0 if helps else None)
        assert not second.receive_finished(chunk)
        if helps:
            first.post_finished(chunk, 1)
            assert second.finished_hint(chunk)[0]
            assert second.receive_finished(chunk)
        assert not second.receive_finished(chunk)


def test_a_slice_that_is_asked_for_again_is_claimed_once_too(
    claims: tuple[SliceClaims, SliceClaims],
) -> None:
    first, second = claims
    for chunk in range(5 * MAX_CHUNKS_AHEAD):
        helps = chunk % 3 == 0
        assert not helps or second.claim_to_help(chunk, 0)
        assert first.claim_own(chunk) == (not helps)
        assert second.claim_own(chunk)
        for earlier in range(max(0, chunk - 4), chunk + 1):
            assert not first.claim_own_again(earlier)
            assert not second.claim_to_help(earlier, 0)


def test_a_rank_that_holds_all_claims_keeps_others_from_reading(
    claims: tuple[SliceClaims, SliceClaims],
) -> None:
    first, second = claims
    for chunk in range(0, 5 * MAX_CHUNKS_AHEAD, 2):
        chunks = [chunk, chunk + 1]
        assert first.claim_all(chunks)
        assert not second.claim_all(chunks)
        assert not second.claim_own(chunk)
        assert not second.claim_to_help(chunk + 1, 0)
        assert not second.own_hint(chunk)[0]
        first.free_all(chunks)
        assert second.own_hint(chunk)[0]
        for number in chunks:
            assert second.claim_own(number)
            assert not first.claim_all(chunks)
            assert first.claim_own(number)


def test_a_killed_process_has_ended_and_its_forked_child_does_not_keep_it_alive(nameless: Segment) -> None:
    asked, told = os.pipe()
    pid = os.fork()
    if not pid:
        RankLocks(nameless, 0)
        child = os.fork() or os.getpid()
        os.write(told, b"%d " % child)
        signal.pause()
    said = b""
    while said.count(b" ") < 2:
        said += os.read(asked, 100)
    [orphan] = {int(word) for word in said.split()} - {pid}
    locks = RankLocks(nameless, 1)
    try:
        assert not locks.has_ended(0)
        os.kill(pid, signal.SIGSTOP)
        assert not locks.has_ended(0)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert locks.has_ended(0)
        assert locks.has_ended(0), "the check must leave no lock behind"
    finally:
        os.kill(orphan, signal.SIGKILL)
        os.close(asked)
        os.close(told)


def test_mapping_and_unmapping_windows_keeps_the_locks(
    nameless: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "_MAX_WINDOWS", 1)
    RankLocks(nameless, 0)
    for window in range(4):
        nameless.at(REGIONS + (window << 30), 8)
    gc.collect()
    assert in_child(lambda: not_ended(nameless)) == 0


def test_a_c_library_that_lacks_a_function_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert libc.unsupported_reason() is None
    monkeypatch.setattr(libc, "_clock_wait", None)
    assert "sem_clockwait" in str(libc.unsupported_reason())
