"""Which ranks of a group share memory, by proof.

Ranks that say they are on the same boot of the same host may still not see the same files: they may be in
containers. So one of them makes a segment with a secret in it, the others open it, compare the secret and
leave one of their own, and everybody looks whether those of all others are there.
"""

import itertools
import os
import secrets
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.comm.shm import libc
from paceline.comm.shm.arena import Arena, Place
from paceline.comm.shm.channel import Channel, open_channel
from paceline.comm.shm.collective import STAGING_BYTES
from paceline.comm.shm.life import Life
from paceline.comm.shm.segment import HEAD, HEAD_BYTES, MOST_RANKS, Segment

# Makes ranks of one machine count as ranks of several hosts, such as network namespaces stand for.
HOST_VARIABLE = "PACELINE_HOST_ID"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SECRET_BYTES = 32


class Gatherer(Protocol):
    """A group, as far as it is needed here."""

    rank: int

    def gather_objects(self, own: object) -> list[Any]:
        """Every rank's object."""


class Neighbours:
    """The ranks that share memory with this one, and how the others are spread over hosts.

    Args:
        segment: what they share.
        hosts: the group's ranks, host by host.
        rank: this rank in the group.

    Attributes:
        ranks: this host's ranks.
        rank: which of them this one is.
        couriers: so many ranks of each host have counterparts, of the same number, on all others.
        arena: this rank's part of the memory.
    """

    def __init__(self, segment: Segment, hosts: Sequence[Sequence[int]], rank: int) -> None:
        self.hosts = hosts
        [self.ranks] = [ranks for ranks in hosts if rank in ranks]
        self.rank = self.ranks.index(rank)
        self.couriers = min(map(len, hosts))
        self.arena = Arena(segment, self.rank)
        self._segment = segment
        self._life = Life(segment, self.rank)
        self._numbers = itertools.count()
        self._unused: list[int] = []
        self._dropped: dict[int, tuple[Place, object]] = {}

    def open(self, group: Gatherer, *, nbytes: int, timeout: float) -> Channel | None:
        """Make a channel, on every rank of the group at once.

        Args:
            group: all of them.
            nbytes: how much shared memory the channel's user will need per rank.
            timeout: so many seconds others are waited for.

        Returns:
            None, on every rank, if some rank has not got that much.
        """
        number, problem = None, None
        dropped = self._dropped.copy()  # one more may be found to be gone at any time
        try:
            reserved = self.arena.ensure(nbytes + (STAGING_BYTES if self._segment.is_limited else 0))
            if self.rank == 0:
                number = self._unused.pop() if self._unused else next(self._numbers)
                open_channel(self._segment, number, len(self.ranks))
        except OSError as error:
            problem = f"rank {group.rank}: {error}"
        everyone = group.gather_objects((number, problem, list(dropped)))
        self._reclaim([everyone[rank][2] for rank in self.ranks])
        problems = [theirs for _, theirs, _ in everyone if theirs is not None]
        if not problems:
            return self._channel(everyone[self.ranks[0]][0], timeout)
        if number is not None:
            self._unused.append(number)
        if problem is None:
            self.arena.give_back(reserved)
        if group.rank == 0:
            warnings.warn(
                f"not enough shared memory, so gradients go over the process group ({'; '.join(problems)})",
                RuntimeWarning,
                stacklevel=2,
            )
        return None

    def _channel(self, number: int, timeout: float) -> Channel:
        staging = self.arena.space(STAGING_BYTES)
        channel = Channel(
            self._segment,
            self.arena,
            number,
            self.ranks,
            self.rank,
            self._life,
            timeout=timeout,
            staging=staging,
        )
        # Others may still read what it has in flight.
        left = (staging, channel.in_flight)
        weakref.finalize(channel, self._dropped.__setitem__, number, left).atexit = False
        return channel

    def _reclaim(self, dropped: Sequence[Sequence[int]]) -> None:
        """Use again what belonged to channels that are gone on every rank, of which each says which are."""
        for number in set(dropped[0]).intersection(*dropped):
            staging, _ = self._dropped.pop(number)
            self.arena.free(staging)
            if self.rank == 0:
                self._unused.append(number)


def find(group: Gatherer) -> Neighbours | None:
    """See which ranks share memory, on every rank of a group at once; None, on every rank, if none do."""
    own = (host_id(), libc.why_not())
    candidates = _candidates(group.gather_objects(own))
    if all(len(ranks) == 1 for ranks in candidates):
        return None
    for way in (Segment.nameless, Segment.named):
        proof = _Proof(group, candidates, way)
        if not any(proof.problems.values()):
            return Neighbours(proof.segment, candidates, group.rank)
    if group.rank == 0:
        problems = [f"rank {rank}: {problem}" for rank, problem in proof.problems.items() if problem]
        warnings.warn(
            "ranks of one host cannot share memory, so gradients go over the process group "
            f"({'; '.join(problems)})",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def host_id() -> str:
    """What the ranks of one host have in common, and no rank of another."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else secrets.token_hex(_SECRET_BYTES)
    return f"{boot} {os.environ.get(HOST_VARIABLE, '')}"


def _candidates(said: Sequence[tuple[str, str | None]]) -> list[list[int]]:
    """Ranks by host; one that cannot share memory by itself."""
    hosts: dict[str, list[int]] = {}
    for rank, (host, why_not) in enumerate(said):
        hosts.setdefault(host if why_not is None else f"rank {rank}", []).append(rank)
    return list(hosts.values())


class _Proof:
    """Shows that candidates share a segment.

    Args:
        group: all ranks, which do this at once.
        hosts: the candidates.
        way: makes a segment.

    Attributes:
        segment: what is shared.
        problems: what went wrong on each rank, if anything did.
    """

    segment: Segment

    def __init__(self, group: Gatherer, hosts: Sequence[Sequence[int]], way: Any) -> None:
        [self._ranks] = [ranks for ranks in hosts if group.rank in ranks]
        self._index = self._ranks.index(group.rank)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._problem: str | None = None
        try:
            place = self._make(way) if self._index == 0 else None
            notes = group.gather_objects((place, self._secret))
            if self._index:
                self._open(*notes[self._ranks[0]])
            group.gather_objects(None)  # now everyone has left a secret
            self._compare([notes[rank][1] for rank in self._ranks])
            self.problems = dict(enumerate(group.gather_objects(self._problem)))
        finally:
            if self._index == 0 and hasattr(self, "segment"):
                self.segment.unlink()

    def _make(self, way: Any) -> tuple[str, int] | None:
        try:
            if len(self._ranks) > MOST_RANKS:
                raise OSError(f"there are more than {MOST_RANKS} ranks")
            self.segment = way()
            self.segment.reserve(HEAD, HEAD_BYTES)
            self._leave_secret()
        except OSError as error:
            self._problem = str(error)
            return None
        return self.segment.path, self.segment.inode

    def _open(self, place: tuple[str, int] | None, secret: bytes) -> None:
        try:
            if place is None:
                raise OSError("the host's first rank has no segment")
            self.segment = Segment.at_path(*place)
            if self._secret_of(0) != secret:
                raise OSError(f"{place[0]} is another file here")
            self._leave_secret()
        except OSError as error:
            self._problem = str(error)

    def _compare(self, everyone: Sequence[bytes]) -> None:
        if self._problem is None and [self._secret_of(rank) for rank in range(len(everyone))] != everyone:
            self._problem = "the ranks' secrets are not all there"

    def _leave_secret(self) -> None:
        self._slot(self._index).copy_(torch.frombuffer(bytearray(self._secret), dtype=torch.uint8))

    def _secret_of(self, rank: int) -> bytes:
        return bytes(self._slot(rank).tolist())

    def _slot(self, rank: int) -> torch.Tensor:
        return self.segment.at(HEAD + rank * _SECRET_BYTES, _SECRET_BYTES)
