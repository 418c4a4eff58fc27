"""Keeps a run going when ranks of this host are lost: it replaces them, and ends those that do not go on.

See Note [Generations] in comm/roster.py.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from paceline.comm.meeting_store import connect
from paceline.comm.roster import MEMBER_VARIABLE, here_key, stalled_key, stepped_key
from paceline.tools.formatting import plural
from paceline.tools.run.processes import STOPPED, read_process
from paceline.tools.run.rank_processes import RankProcesses
from paceline.tools.run.rosters import HostError, Rosters
from paceline.tools.run.spares import Spares
from paceline.tools.run.stalls import FindStall

# How many processes in a row may die in a rank's place before they have done a step.
_MOST_TRIES = 3
# How long a new process may take to come to the others: as long as torch waits for ranks by default.
_COME_SECONDS = 1800.0
_CONNECT_SECONDS = 20.0
_WATCH_SECONDS = 1.0
# How long the other ranks may take to say that the training is over, after one has ended.
_END_SECONDS = 2.0


@dataclass
class _Place:
    """A rank's place on this host, and the process that has it.

    Attributes:
        local_rank: its number on this host.
        member: the name of the process that has it.
        number: how many processes had it before.
        tries: how many of them died one after the other before they had done a step.
        is_empty: whether the process has ended, and no other has its place yet.
        killed_because: why the launcher has killed the process, if it has.
        stopped_since: since when the process is stopped by a signal.
    """

    local_rank: int
    member: str
    number: int = 0
    tries: int = 0
    is_empty: bool = False
    killed_because: str = ""
    stopped_since: float | None = None


class Healer:
    """Looks after the ranks of this host.

    Args:
        command: the command line of a rank.
        environment: tells the variables that all ranks have in common.
        processes: the ranks' processes.
        say: shows a message.
        find_stall: tells for whom ranks wait long.
        spares: how many processes are kept ready to take a lost rank's place.
        lost_after: for how many seconds others may wait for a rank.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Callable[[], Mapping[str, str]],
        processes: RankProcesses,
        say: Callable[[str], None],
        find_stall: FindStall,
        *,
        spares: int,
        lost_after: float,
    ) -> None:
        self._spares = Spares(command, environment, spares)
        self._processes = processes
        self._say = say
        self._find_stall = find_stall
        self._lost_after = lost_after
        self._places: dict[int, _Place] = {}
        self._why: dict[str, str] = {}
        self._watched_at = 0.0
        self._ended_since: float | None = None
        self._lost = 0

    def start(self, context: SubprocessContext, group: WorkerGroup) -> None:
        """Look after ranks that were just started."""
        self._context = context
        self._group = group
        self._places = {
            local_rank: _Place(local_rank, environment[MEMBER_VARIABLE])
            for local_rank, environment in context.envs.items()
        }
        self._store = connect(
            context.envs[0]["MASTER_ADDR"],
            int(context.envs[0]["MASTER_PORT"]),
            until=time.monotonic() + _CONNECT_SECONDS,
            answer_seconds=_CONNECT_SECONDS,
        )
        host, hosts = (int(context.envs[0][name]) for name in ("GROUP_RANK", "GROUP_WORLD_SIZE"))
        self._rosters = Rosters(self._store, host, hosts, silent_after=self._lost_after)
        self._spares.fill()

    def look(self) -> bool:
        """Replace ranks that are lost; whether the agent is to look at the ranks itself.

        It is, if all ranks have ended, or if one has ended by an exception: that would be raised again.
        """
        codes = {local: self._code(local) for local in self._places}
        failed = {local: code for local, code in codes.items() if code}
        if any(code is not None for code in codes.values()):
            self._say_members()  # whether the training is over
        if raised := [*filter(self._has_raised, failed)]:
            self._rosters.fail(f"rank {self._rank(raised[0])} has failed, on another host")
        if raised or self._rosters.is_over:
            return any(code is not None for code in codes.values())
        self._check_ended([local for local, code in codes.items() if code == 0])
        for local, code in failed.items():
            self._replace_or_drop(self._places[local], code)
        for place in self._places.values():
            if place.is_empty:
                self._fill(place)
        if not self._places or not any(code is None for code in map(self._code, self._places)):
            return True
        self._say_members()
        self._watch()
        return False

    def _check_ended(self, ended: Sequence[int]) -> None:
        """Raise if a rank has ended well while others train: they would wait for it."""
        if not ended or not self._rosters.is_training:
            self._ended_since = None
        elif self._ended_since is None:
            self._ended_since = time.monotonic()
        elif time.monotonic() > self._ended_since + _END_SECONDS:
            raise HostError(
                f"rank {self._rank(ended[0])} has ended before the training was over: all ranks have to go "
                "through the loop over paceline.Run to its end, or leave it in the same step"
            )

    def wait_for_hosts(self) -> None:
        """The ranks of this host have ended: wait for those of other hosts, which need the store."""
        self._rosters.leave()

    def stop(self) -> None:
        """End the spares."""
        self._spares.stop()
        if self._lost:
            self._say(f"{plural(self._lost, 'lost rank')} in all")

    def _code(self, local: int) -> int | None:
        """The exit code of a place's process; None if it lives, or another will come."""
        return None if self._places[local].is_empty else self._context.subprocess_handlers[local].proc.poll()

    def _has_raised(self, local: int) -> bool:
        return self._processes.has_report(self._rank(local))

    def _rank(self, local: int) -> int:
        return self._group.workers[local].global_rank

    def _say_members(self) -> None:
        self._rosters.say([place.member for place in self._places.values()], self._why)

    def _replace_or_drop(self, place: _Place, code: int) -> None:
        rank, handler = self._rank(place.local_rank), self._context.subprocess_handlers[place.local_rank]
        why = place.killed_because or _describe(code)
        self._why[place.member] = why
        with suppress(ProcessLookupError):  # what it has started, such as workers of data loaders
            os.killpg(handler.proc.pid, signal.SIGKILL)
        place.tries = 0 if self._has_stepped(place.member) else place.tries + 1
        self._lost += 1
        if self._spares.can_replace and place.tries < _MOST_TRIES:
            self._say(f"rank {rank} was lost ({why}); a spare process takes its place")
            self._replace(place)
        elif any(member not in self._why for member in self._rosters.members):
            self._say(f"rank {rank} was lost ({why}); the others go on without it")
            self._drop(place)

    def _replace(self, place: _Place) -> None:
        """Have a new member in a lost one's place; its process may take a while to come."""
        place.number += 1
        place.member = f"{place.member.rpartition('.')[0]}.{place.number}"
        place.killed_because, place.stopped_since, place.is_empty = "", None, True

    def _fill(self, place: _Place) -> None:
        local = place.local_rank
        environment = {**self._context.envs[local], MEMBER_VARIABLE: place.member}
        process = self._spares.take(environment, self._context.stdouts[local], self._context.stderrs[local])
        if process is not None:
            place.is_empty = False
            self._context.subprocess_handlers[local].proc = process  # type: ignore[assignment]  # in its place
            self._group.workers[local].id = process.pid
            self._processes.replaced(self._rank(local), process)

    def _drop(self, place: _Place) -> None:
        del self._places[place.local_rank]
        self._context._running_local_ranks.discard(place.local_rank)
        self._processes.dropped(self._rank(place.local_rank))

    def _has_stepped(self, member: str) -> bool:
        return bool(self._store.check([stepped_key(member)]))

    # Ranks that live, and do not go on.

    def _watch(self) -> None:
        if time.monotonic() < self._watched_at + _WATCH_SECONDS:
            return
        self._watched_at = time.monotonic()
        self._look_for_stall()
        for place in self._places.values():
            if not place.is_empty and not place.killed_because and (why := self._why_gone(place)):
                place.killed_because = why
                pid = self._context.subprocess_handlers[place.local_rank].proc.pid
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _look_for_stall(self) -> None:
        stall, roster = self._find_stall(), self._rosters.roster
        if stall is None or stall.seconds < self._lost_after or roster is None:
            return
        if 0 <= stall.rank < len(roster.members):
            self._store.set(stalled_key(roster.members[stall.rank]), "1")

    def _why_gone(self, place: _Place) -> str:
        """Why a member counts as lost though its process lives; empty if it does not."""
        now, seconds = time.monotonic(), f"{self._lost_after:g} s"
        if self._store.check([stalled_key(place.member)]):
            return f"others waited for it for {seconds}"
        if not self._is_stopped(place):
            place.stopped_since = None
        elif place.stopped_since is None:
            place.stopped_since = now
        elif now > place.stopped_since + self._lost_after:
            return f"stopped by a signal for {seconds}"
        return f"did not come to the others for {seconds}" if self._is_missing(place, now) else ""

    def _is_stopped(self, place: _Place) -> bool:
        process = read_process(self._context.subprocess_handlers[place.local_rank].proc.pid)
        return process is not None and process.state == STOPPED

    def _is_missing(self, place: _Place, now: float) -> bool:
        """Whether others have waited too long for a member to meet them."""
        roster = self._rosters.roster
        if roster is None or place.member not in roster.members:
            return False
        seconds = self._lost_after if self._has_stepped(place.member) else _COME_SECONDS
        if now < self._rosters.since + seconds:
            return False
        has_come = {m: bool(self._store.check([here_key(roster.generation, m)])) for m in roster.members}
        return any(has_come.values()) and not has_come[place.member]


def _describe(code: int) -> str:
    """Why a process ended, by its exit code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
