"""Where launched ranks meet: a store at rank 0's address, in which they agree that they are one world.

Each rank writes a note into the store: its launcher, rank and world. A rank whose note cannot be of the same
world as rank 0's refuses, and its reason reaches all ranks that wait. So nobody waits for ranks that will not
come.

Note [Who is told]. The first verdict on a subject counts, and every rank waits for it: ``complete``, when as
many ranks have come as the world has, or a reason to refuse.

Note [Which meeting]. A store may see several meetings: the group is closed and opened again, or an agent of
torch starts the ranks anew. Rank 0 gives each meeting a random name, and writes the current one into the
store. The others read it. A process joins no meeting twice, so after a refusal it waits for the next one. A
refused meeting's store is closed, unless an earlier meeting used it too; who has not joined its next one
connects again.
"""

import contextlib
import itertools
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from torch import distributed

from paceline.comm.launchers import LaunchedWorld, MeetingPlace
from paceline.comm.meeting_store import (
    STORE_ERRORS,
    LostStoreError,
    MeetingStore,
    NotAStoreError,
    connect,
    is_own_address,
    listen,
    within,
)
from paceline.comm.shm.local_ranks import HOST_VARIABLE
from paceline.errors import MeetingError

_distributed: Any = distributed  # its type hints leave out the stores
_NAME_KEY = "paceline/meeting"  # the name of the current meeting
_COMPLETE = "complete"
_ROLL = "roll"
# How long to look for ranks that may wait, only to tell them something.
_TELL_SECONDS = 4.0
# How long a rank 0 whose store went away may take to open it again, if it was in the same meeting.
_AGAIN_SECONDS = 0.5
# How long rank 0 may take from opening its store to writing the meeting's name.
_NAME_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 0.25
_NAMED_RANKS = 20


@dataclass(frozen=True)
class RankNote:
    """What a rank tells the others about itself."""

    launcher: str
    has_agent: bool
    size: int
    rank: int
    job: str | None
    host: str
    pid: int

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return (
            f"rank {self.rank} of {self.size}, started by {self.launcher} ({self.host}, pid {self.pid}{job})"
        )

    @classmethod
    def of(cls, world: LaunchedWorld) -> "RankNote":
        """This process's note."""
        host = os.environ.get(HOST_VARIABLE) or socket.gethostname()
        has_agent = world.launcher.has_agent
        return cls(world.launcher.value, has_agent, world.size, world.rank, world.job, host, os.getpid())

    def is_of_another_launcher(self, other: "RankNote") -> bool:
        """Whether two ranks cannot be of one world; whoever starts them has mixed launchers or worlds."""
        if self.has_agent and other.has_agent:
            return False  # the agents have agreed on a world, perhaps on a new one after a node was lost
        return (self.launcher, self.size) != (other.launcher, other.size)

    def is_of_another_job(self, other: "RankNote") -> bool:
        """Whether two ranks of the same kind of world belong to different jobs."""
        return self.job != other.job


class _NextMeetingError(LostStoreError):
    """Rank 0 has begun another meeting."""


class Meeting:
    """The store where the ranks of one world meet.

    Args:
        world: what the launcher said.
        seconds: how long to wait for the others.
        joined: the meetings that this process has joined; see Note [Which meeting].
        store: the store of the last meeting, if there was one.
    """

    def __init__(self, world: LaunchedWorld, *, seconds: float, joined: set[str], store: Any = None) -> None:
        assert world.address is not None
        assert world.port is not None
        self._world = world
        self._store = MeetingStore(
            MeetingPlace(world.address, world.port),
            rank=world.rank,
            is_listener=world.rank == 0 and not world.is_agent_listening,
            seconds=seconds,
            store=store,
        )
        self._call = self._store.call
        self._joined = joined
        self._name = ""
        self._arrived: set[str] = set()

    def call_the_roll(self) -> None:
        """Wait until all ranks are here.

        Raises:
            MeetingError: on every rank, if a rank is missing, is there twice, or is of another world.
        """
        own, is_here = RankNote.of(self._world), False
        while not is_here:
            try:
                is_here = self._try_roll(own)
            except _NextMeetingError:
                continue
            except LostStoreError as error:
                self._find_store_again(error)

    def agree(self, subject: str, problem: str | None) -> None:
        """Wait until every rank has called this without a problem; raise the first problem on every rank."""
        try:
            self._agree(subject, problem)
        except LostStoreError as error:
            raise self._rank_0_ended(error) from error

    def local_place(self) -> tuple[int, int]:
        """This rank's number among the ranks of its host, and how many those are, from the ranks' notes."""
        keys = [self._note_key(rank) for rank in range(self._world.size)]
        try:
            hosts = [json.loads(note)["host"] for note in self._call("multi_get", keys)]
        except LostStoreError as error:
            raise self._rank_0_ended(error) from error
        own = hosts[self._world.rank]
        return hosts[: self._world.rank].count(own), hosts.count(own)

    @property
    def store(self) -> Any:
        """The store of torch, for the next meeting."""
        return self._store.store

    def group_store(self) -> Any:
        """A store for the process group."""
        return _distributed.PrefixStore(f"{self._prefix}/group", self.store)

    def close(self) -> None:
        """Give up the store, and with it rank 0's port."""
        self._store.close()

    def _find_store_again(self, error: LostStoreError) -> None:
        """Rank 0 may have refused an earlier meeting, and come again; or it has ended during this one."""
        self._store.close()
        if time.monotonic() > self._store.until:
            raise self._rank_0_ended(error) from error
        if not self._name or self._store.is_listener:
            return  # it was the store of an earlier meeting
        try:
            self._store.connect(time.monotonic() + _AGAIN_SECONDS)
        except OSError:
            raise self._rank_0_ended(error) from error

    # Finding the meeting.

    def _try_roll(self, own: RankNote) -> bool:
        """Whether all ranks are in the meeting that rank 0 has named; False if it was an earlier one."""
        self._store.find()
        self._name = self._find_name(own)
        self._joined.add(self._name)
        if self._is_earlier(own):
            self._name = ""
            return False
        self._agree(_ROLL, self._problem(own))
        return True

    def _find_name(self, own: RankNote) -> str:
        if self._world.rank > 0 or self._store.is_port_in_use:
            return self._await_name(own)
        name = self._new_name(own)
        self._call("set", _NAME_KEY, name)
        return name

    def _new_name(self, own: RankNote) -> str:
        """A name for a meeting. Rank 0's note is there before the name is known."""
        name = uuid.uuid4().hex
        self._call("set", _note_key(name, own.rank), json.dumps(asdict(own)))
        return name

    def _await_name(self, own: RankNote) -> str:
        """Wait until rank 0 has named a meeting that this process has not left."""
        began, pause = time.monotonic(), 0.01
        while True:
            name = _read(self._call, _NAME_KEY)
            if name and (name == self._name or name not in self._joined):
                return name
            now = time.monotonic()
            # A refused meeting's store goes away soon.
            if self._store.is_port_in_use and now > began + (_TELL_SECONDS if name else 0.0) + _NAME_SECONDS:
                return name or self._claim(own)
            if now > self._store.until:
                raise MeetingError(self._not_all_came("missing: rank 0"))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _claim(self, own: RankNote) -> str:
        """Name a meeting in a store that is not rank 0's, only to tell the others so."""
        key, name = _NAME_KEY, self._new_name(own)
        return bytes(self._call("compare_set", key, "", name)).decode()

    def _is_earlier(self, own: RankNote) -> bool:
        """Whether this is a meeting from before an agent of torch gave out ranks anew, in its own store."""
        if own.rank == 0 or not own.has_agent:
            return False
        first = self._note(0)
        if first is None or not first.has_agent:
            return False
        return first.size != own.size or self._write_once(own) != own or self._is_followed()

    def _is_followed(self) -> bool:
        """Whether this meeting was over before this rank came, and rank 0 begins another one soon."""
        until = time.monotonic() + _TELL_SECONDS
        while _read(self._call, f"{self._prefix}/{_ROLL}/verdict") and time.monotonic() < until:
            if _read(self._call, _NAME_KEY) != self._name:
                return True
            time.sleep(0.05)
        return False

    # Comparing ranks.

    def _problem(self, own: RankNote) -> str | None:
        """Why this rank cannot be one of the ranks that meet here."""
        first = self._note(0)
        if first is not None and own.is_of_another_launcher(first):
            return (
                f"a mixed world meets at one address ({self._store.where}): {first}, and {own}. Start all "
                "ranks with one launcher, or give each world a MASTER_PORT of its own"
            )
        if first is not None and own.is_of_another_job(first):
            raise MeetingError(self._store.port_in_use(f"by another job: {first}, and this one is {own}"))
        same = self._write_once(own)
        if same != own:
            return f"two processes have the same rank ({self._store.where}): {same}, and {own}"
        if self._store.is_port_in_use:
            return self._store.port_in_use("by another program that uses torch")
        return None

    def _write_once(self, note: RankNote) -> RankNote:
        """Write this rank's note, unless there is one; returns the one that is there now."""
        there = self._call("compare_set", self._note_key(note.rank), "", json.dumps(asdict(note)))
        return RankNote(**json.loads(there))

    def _note(self, rank: int) -> RankNote | None:
        note = _read(self._call, self._note_key(rank))
        return RankNote(**json.loads(note)) if note else None

    def _note_key(self, rank: int) -> str:
        return _note_key(self._name, rank)

    @property
    def _prefix(self) -> str:
        return _prefix(self._name)

    # Waiting.

    def _agree(self, subject: str, problem: str | None) -> None:
        prefix = f"{self._prefix}/{subject}"
        try:
            if problem is not None:  # before this rank counts, or the last one to come finds all well
                self._call("compare_set", f"{prefix}/verdict", "", problem)
            self._arrive(prefix)
            verdict = self._verdict(subject)
        except LostStoreError as error:
            if problem is None:
                raise
            raise MeetingError(problem) from error
        if verdict == _COMPLETE and problem is None:
            return
        self._wait_until_told(prefix)
        # A world that was complete before this rank came does not need to know.
        raise MeetingError(problem if problem is not None and verdict == _COMPLETE else verdict)

    def _arrive(self, prefix: str) -> None:
        if prefix in self._arrived:
            return  # before the connection was lost
        self._arrived.add(prefix)
        self._call("set", f"{prefix}/came/{self._world.rank}", "1")
        if self._call("add", f"{prefix}/arrived", 1) >= self._world.size:
            self._call("compare_set", f"{prefix}/verdict", "", _COMPLETE)

    def _verdict(self, subject: str) -> str:
        """Look for the verdict again and again: if the store waited for it, nobody would see rank 0 end."""
        key, pause = f"{self._prefix}/{subject}/verdict", 0.01
        while not (verdict := _read(self._call, key)):
            if _read(self._call, _NAME_KEY) != self._name:
                raise _NextMeetingError("it has begun another meeting")
            if time.monotonic() > self._store.until:
                self._call("compare_set", key, "", self._not_all_came(self._missing(subject)))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return verdict

    def _not_all_came(self, who: str) -> str:
        return f"not all ranks came within {self._store.seconds:.0f} s ({self._store.where}; {who})"

    def _missing(self, subject: str) -> str:
        came = f"{self._prefix}/{subject}/came"
        ranks = (rank for rank in range(self._world.size) if not self._call("check", [f"{came}/{rank}"]))
        named = [f"rank {rank}" for rank in itertools.islice(ranks, _NAMED_RANKS)]
        more = " and perhaps more" if len(named) == _NAMED_RANKS else ""
        what = "missing" if subject == _ROLL else "came, and then stopped"
        return f"{what}: {', '.join(named) or 'none'}{more}"

    def _wait_until_told(self, prefix: str) -> None:
        """Rank 0 is the store, and stays until the others have read the verdict, also late ones."""
        until = time.monotonic() + _TELL_SECONDS
        is_store = self._store.is_listener and not self._store.is_port_in_use
        with contextlib.suppress(LostStoreError, MeetingError):
            self._raise_largest(f"{prefix}/largest")
            self._call("add", f"{prefix}/told", 1)
            while is_store and not self._are_all_told(prefix) and time.monotonic() < until:
                time.sleep(0.05)

    def _raise_largest(self, key: str) -> None:
        """Ranks of a larger world may have come to the wrong place, and more of them may follow."""
        largest = ""
        while int(largest or 0) < self._world.size:  # others may raise it meanwhile
            largest = bytes(self._call("compare_set", key, largest, str(self._world.size))).decode()

    def _are_all_told(self, prefix: str) -> bool:
        told = self._call("add", f"{prefix}/told", 0)
        return bool(told >= int(_read(self._call, f"{prefix}/largest")))

    def _rank_0_ended(self, error: Exception) -> MeetingError:
        return MeetingError(f"rank 0 or its agent ended while ranks met ({self._store.where}): {error}")


# --- telling ranks that wait ---


def tell_waiting_ranks(place: MeetingPlace, problem: str, *, joined: set[str]) -> None:
    """Make ranks that wait at this place give up, because this process cannot join them.

    Args:
        place: where they wait.
        problem: why it cannot.
        joined: the meetings that this process has joined, to which the one that is told is added.
    """
    with contextlib.suppress(NotAStoreError, *STORE_ERRORS):  # nobody waits there
        within(2 * _TELL_SECONDS, _tell, place, problem, joined)


def _tell(place: MeetingPlace, problem: str, joined: set[str]) -> None:
    if is_own_address(place.address):
        with contextlib.suppress(OSError):
            return _tell_who_comes(place, problem, joined)
    until = time.monotonic() + _TELL_SECONDS
    store = connect(place.address, place.port, until=until, answer_seconds=_TELL_SECONDS)
    until = time.monotonic() + _NAME_SECONDS
    while True:
        name = _read(lambda call, *args: getattr(store, call)(*args), _NAME_KEY)
        prefix = f"{_prefix(name)}/{_ROLL}"
        is_open = name and not store.check([f"{prefix}/verdict"])
        if is_open or time.monotonic() > until:
            break
        time.sleep(0.05)
    if not name:
        return None  # rank 0 has not come
    joined.add(name)
    store.compare_set(f"{prefix}/verdict", "", problem)
    store.add(f"{prefix}/told", 1)
    return None


def _tell_who_comes(place: MeetingPlace, problem: str, joined: set[str]) -> None:
    """Where nobody listens yet, be a store that has nothing but the problem."""
    store = listen(place.address, place.port, _TELL_SECONDS)
    name = uuid.uuid4().hex
    joined.add(name)
    store.set(f"{_prefix(name)}/{_ROLL}/verdict", problem)
    store.set(_NAME_KEY, name)
    # Not a daemon: the process shows the problem at once, but does not end before the others know it.
    threading.Thread(target=_keep, args=(store,), name="paceline-tell").start()


def _keep(_: Any) -> None:
    time.sleep(_TELL_SECONDS)


# --- keys in the store ---


def _prefix(name: str) -> str:
    return f"paceline/meeting/{name}"


def _note_key(name: str, rank: int) -> str:
    return f"{_prefix(name)}/rank/{rank}"


def _read(call: Any, key: str) -> str:
    """A value of the store; empty if there is none, for which the store would wait."""
    return bytes(call("get", key)).decode() if call("check", [key]) else ""
