"""Which ranks of a group share memory, by proof.

Ranks that say they are on the same boot of the same host may still not see the same files: they may be in
containers. So one of them makes a segment and writes a secret into it. The others open it, compare the secret
and write one of their own. Then every rank checks that the secrets of all others are there.
"""

import ctypes
import itertools
import os
import secrets
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.comm.shm import libc
from paceline.comm.shm.arena import Arena, Span
from paceline.comm.shm.channel import Channel, make_channel, map_channel
from paceline.comm.shm.collective import STAGING_BYTES
from paceline.comm.shm.segment import HEAD, HEAD_BYTES, MAX_RANKS, RankLocks, Segment

# Makes ranks of one machine count as ranks of several hosts, as network namespaces that stand for hosts need.
HOST_VARIABLE = "PACELINE_HOST_ID"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SECRET_BYTES = 32
# A wrapper has two bucket plans in most runs. Blocks of another size have other addresses.
_PLANS = 2
# With its number it tells processes apart; forks of one process have it in common.
_PROCESS = secrets.token_hex(_SECRET_BYTES)


class Gatherer(Protocol):
    """A group, as far as it is needed here."""

    rank: int

    def gather_objects(self, own: object) -> list[Any]:
        """Every rank's object."""


class HostMemory:
    """Memory that all ranks of a host read and write, in the first rank's region.

    Args:
        segment: what they share.
        span: where it is.
        on_drop: called when neither this object nor any tensor in the memory is left on this rank.

    Attributes:
        kept: what this rank keeps until all ranks have dropped the memory, because they may read it.
    """

    def __init__(self, segment: Segment, span: Span, on_drop: Callable[[], object]) -> None:
        self.kept: list[torch.Tensor] = []
        self._memory = segment.at(span.offset, span.nbytes)
        weakref.finalize(self, on_drop).atexit = False

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with a storage of its own, from a byte of the memory on."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        memory = (ctypes.c_ubyte * (numel * dtype.itemsize)).from_address(self._memory.data_ptr() + offset)
        weakref.finalize(memory, _hold, self).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=numel)


def _hold(_: object) -> None:
    """Keep an object as long as another one lives."""


class LocalRanks:
    """The ranks that share memory with this one, and which ranks are on the other hosts.

    Args:
        segment: what they share.
        hosts: the group's ranks, host by host.
        rank: this rank in the group.

    Attributes:
        ranks: this host's ranks.
        rank: which of them this one is.
        leaders: the number of host leaders per host: the ranks of the host that has the fewest.
        leader_ranks: the leaders of this rank's number, one per host; None if it is no leader, or if there is
            one host.
        arena: this rank's region of the segment.
    """

    def __init__(self, segment: Segment, hosts: Sequence[Sequence[int]], rank: int) -> None:
        self.hosts = hosts
        [self.ranks] = [ranks for ranks in hosts if rank in ranks]
        self.rank = self.ranks.index(rank)
        self.leaders = min(map(len, hosts))
        self.leader_ranks: list[int] | None = None
        if len(hosts) > 1 and self.rank < self.leaders:
            self.leader_ranks = [ranks[self.rank] for ranks in hosts]
        self.arena = Arena(segment, self.rank)
        self._segment = segment
        self._locks = RankLocks(segment, self.rank)
        self._numbers = itertools.count()
        self._unused: list[int] = []
        self._dropped: dict[int, tuple[Span, object]] = {}
        # Memory of the whole host, by number; its spans are the first rank's.
        self._memories: dict[int, tuple[Span, object]] = {}
        self._dropped_memories: set[int] = set()
        self._memories_opened = itertools.count()

    def open_channel(
        self, group: Gatherer, *, nbytes: int, timeout: float, names: Sequence[int] | None = None
    ) -> Channel | None:
        """Make a channel; every rank of the group calls this at once.

        Args:
            group: all its ranks.
            nbytes: how much shared memory the channel's user will need per rank.
            timeout: how many seconds to wait for others.
            names: the group's ranks as users know them; by default, their ranks in the group.

        Returns:
            None, on every rank, if some rank does not have that much memory, or cannot map what the others
            have.
        """
        number, reserved, problem = None, None, None
        dropped = self._dropped.copy()  # another channel may be garbage collected at any time
        try:
            reserved = self.arena.reserve(nbytes + (STAGING_BYTES if self._segment.is_limited else 0))
            if self.rank == 0:
                number = self._unused.pop() if self._unused else next(self._numbers)
                make_channel(self._segment, number, len(self.ranks))
        except OSError as error:
            problem = f"rank {group.rank}: {error}"
        everyone = group.gather_objects((number, reserved, problem, list(dropped)))
        self._reclaim([everyone[rank][3] for rank in self.ranks])
        problems = [theirs for _, _, theirs, _ in everyone if theirs is not None]
        if not problems:
            agreed = everyone[self.ranks[0]][0]
            problems = self._map_ahead(group, agreed, [everyone[rank][1] for rank in self.ranks])
        if not problems:
            return self._channel(agreed, timeout, names)
        if number is not None:
            self._unused.append(number)
        if reserved is not None:
            self.arena.release_unused(reserved)
        if group.rank == 0:
            _warn(f"not enough shared memory, so gradients go over the process group ({'; '.join(problems)})")
        return None

    def _map_ahead(self, group: Gatherer, number: int, reserved: Sequence[Span]) -> list[str]:
        """Map a channel, and what it will use of every rank's region; returns what went wrong, on any rank.

        A limit on address space may let a rank reserve memory that it cannot map, or not that of the others.
        Later, in the middle of a step, ranks could not change to another way together.
        """
        problem, windows = None, []
        try:
            map_channel(self._segment, number, len(self.ranks))
            for span in reserved:
                # Staging buffers, the blocks of the first bucket plan, and those of the plan that follows it.
                windows += self._segment.map_ahead(span.offset, STAGING_BYTES + _PLANS * span.nbytes)
        except OSError as error:
            problem = f"rank {group.rank}: {error}"
        problems = [theirs for theirs in group.gather_objects(problem) if theirs is not None]
        if problems:
            self._segment.unmap(windows)  # a rank whose address space is limited needs it for other things
        return problems

    def open_memory(self, group: Gatherer, nbytes: int) -> HostMemory:
        """Memory that the ranks of each host have once; every rank of the group calls this at once.

        It is released when every rank of the host has dropped it and calls this again.

        Raises:
            OSError: there is not enough, on some rank.
        """
        span, problem = None, None
        if self.rank == 0:
            try:
                span = self.arena.take_addresses(nbytes)
                self._segment.reserve(span.offset, span.nbytes)
            except OSError as error:
                problem = f"rank {group.rank}: {error}"
        everyone = group.gather_objects((span, problem, sorted(self._dropped_memories)))
        self._release_memories([everyone[rank][2] for rank in self.ranks])
        problems = [theirs for _, theirs, _ in everyone if theirs is not None]
        memory, span = None, everyone[self.ranks[0]][0]
        if not problems:
            number = next(self._memories_opened)
            problem = None
            try:
                memory = HostMemory(self._segment, span, partial(self._dropped_memories.add, number))
                self._memories[number] = span, memory.kept
            except OSError as error:
                problem = f"rank {group.rank}: {error}"
            problems = [theirs for theirs in group.gather_objects(problem) if theirs is not None]
        if memory is None or problems:
            raise OSError("; ".join(problems))
        return memory

    def _release_memories(self, dropped: Sequence[Sequence[int]]) -> None:
        for number in set(dropped[0]).intersection(*dropped):
            self._dropped_memories.discard(number)
            span, _ = self._memories.pop(number)
            if self.rank == 0:
                self.arena.free(span)

    def read(self, address: int, nbytes: int) -> torch.Tensor:
        """A copy of bytes that a rank of this host has at an address."""
        return self._segment.at(address, nbytes).clone()

    def _channel(self, number: int, timeout: float, names: Sequence[int] | None) -> Channel:
        staging = self.arena.take_addresses(STAGING_BYTES)
        channel = Channel(
            self._segment,
            self.arena,
            number,
            self.ranks if names is None else [names[rank] for rank in self.ranks],
            self.rank,
            self._locks,
            timeout=timeout,
            staging=staging,
        )
        # Kept with its collectives until it is gone on every rank: others may still read what is in flight.
        kept = (staging, channel.in_flight)
        weakref.finalize(channel, self._dropped.__setitem__, number, kept).atexit = False
        return channel

    def _reclaim(self, dropped: Sequence[Sequence[int]]) -> None:
        """Use the memory and the numbers of channels again that every local rank has dropped."""
        for number in set(dropped[0]).intersection(*dropped):
            staging, _ = self._dropped.pop(number)
            self.arena.free(staging)
            if self.rank == 0:
                self._unused.append(number)


def find_local_ranks(group: Gatherer) -> LocalRanks | None:
    """Find out which ranks share memory; every rank of the group calls this at once.

    Returns:
        None, on every rank, if no two ranks share memory.
    """
    own = (host_id(), libc.unsupported_reason(), f"{os.getpid()} {_PROCESS}")
    candidates = _candidates(group.gather_objects(own))
    if all(len(ranks) == 1 for ranks in candidates):
        return None
    for make_segment in (Segment.nameless, Segment.named):
        proof = _Proof(group, candidates, make_segment)
        if not any(proof.problems.values()):
            return LocalRanks(proof.segment, candidates, group.rank)
    if group.rank == 0:
        problems = [f"rank {rank}: {problem}" for rank, problem in proof.problems.items() if problem]
        _warn(
            "ranks of one host cannot share memory, so gradients go over the process group "
            f"({'; '.join(problems)})"
        )
    return None


def host_id() -> str:
    """A text that is the same for all ranks of one host, and different on every host."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else secrets.token_hex(_SECRET_BYTES)
    return f"{boot} {os.environ.get(HOST_VARIABLE, '')}"


def _candidates(answers: Sequence[tuple[str, str | None, str]]) -> list[list[int]]:
    """Ranks by host; a rank that cannot share memory, or is a thread beside another rank, is by itself."""
    hosts: dict[str, list[int]] = {}
    processes = Counter(process for _, _, process in answers)
    for rank, (host, unsupported_reason, process) in enumerate(answers):
        shares = unsupported_reason is None and processes[process] == 1
        hosts.setdefault(host if shares else f"rank {rank}", []).append(rank)
    return list(hosts.values())


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


class _Proof:
    """Shows that candidates share a segment.

    Args:
        group: all ranks, which do this at once.
        hosts: the candidates.
        make_segment: makes a segment.

    Attributes:
        segment: what they share.
        problems: what went wrong on each rank, or None.
    """

    segment: Segment

    def __init__(
        self, group: Gatherer, hosts: Sequence[Sequence[int]], make_segment: Callable[[], Segment]
    ) -> None:
        [self._ranks] = [ranks for ranks in hosts if group.rank in ranks]
        self._index = self._ranks.index(group.rank)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._problem: str | None = None
        try:
            file = self._make(make_segment) if self._index == 0 else None
            everyone = group.gather_objects((file, self._secret))
            if self._index:
                self._open(*everyone[self._ranks[0]])
            group.gather_objects(None)  # now every rank has written its secret
            self._compare([everyone[rank][1] for rank in self._ranks])
            self.problems = dict(enumerate(group.gather_objects(self._problem)))
        finally:
            if self._index == 0 and hasattr(self, "segment"):
                self.segment.unlink()

    def _make(self, make_segment: Callable[[], Segment]) -> tuple[str, int] | None:
        try:
            if len(self._ranks) > MAX_RANKS:
                raise OSError(f"there are more than {MAX_RANKS} ranks")
            self.segment = make_segment()
            self.segment.reserve(HEAD, HEAD_BYTES)
            self._write_secret()
        except OSError as error:
            self._problem = str(error)
            return None
        return self.segment.path, self.segment.inode

    def _open(self, file: tuple[str, int] | None, secret: bytes) -> None:
        try:
            if file is None:
                raise OSError("the host's first rank has no segment")
            self.segment = Segment.at_path(*file)
            if self._secret_of(0) != secret:
                raise OSError(f"{file[0]} is another file here")
            self._write_secret()
        except OSError as error:
            self._problem = str(error)

    def _compare(self, everyone: Sequence[bytes]) -> None:
        if self._problem is None and [self._secret_of(rank) for rank in range(len(everyone))] != everyone:
            self._problem = "the ranks' secrets are not all there"

    def _write_secret(self) -> None:
        self._secret_view(self._index).copy_(torch.frombuffer(bytearray(self._secret), dtype=torch.uint8))

    def _secret_of(self, rank: int) -> bytes:
        return bytes(self._secret_view(rank).tolist())

    def _secret_view(self, rank: int) -> torch.Tensor:
        return self.segment.at(HEAD + rank * _SECRET_BYTES, _SECRET_BYTES)
