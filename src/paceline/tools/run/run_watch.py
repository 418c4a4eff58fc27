"""Looks for ranks that live but do not go on: stopped by a signal, or stalled."""

import re
import time
from collections.abc import Callable, Iterable, Mapping

from paceline.tools.run.processes import STOPPED, ProcessEntry
from paceline.tools.run.stalls import FindStall, Stall

WATCH_SECONDS = 1.0


class StalledRunError(Exception):
    """The run was ended because a rank was stalled."""

    def __init__(self, stall: Stall) -> None:
        super().__init__(
            f"rank {stall.rank} was stalled for {stall.seconds:.0f} s, so all ranks were stopped"
            + (f"\n{stall.text}" if stall.text else "")
        )


def parse_stall(text: str) -> float:
    """After how many seconds a stalled run is ended, from the value of ``--stall``."""
    found = re.fullmatch(r"kill:(\d+(?:\.\d+)?)", text)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"--stall must be kill:SECONDS, for example kill:30 (--stall: {text})")
    return float(found[1])


class Watch:
    """Says which ranks are stopped, and ends a run in which one is stalled for too long.

    Args:
        processes: tells the processes of the ranks that have not ended.
        say: shows a message.
        find_stall: tells which rank is stalled.
        stall_seconds: how long one may be stalled; None if it is not limited.
    """

    def __init__(
        self,
        processes: Callable[[], Mapping[int, ProcessEntry]],
        say: Callable[[str], None],
        find_stall: FindStall,
        *,
        stall_seconds: float | None,
    ) -> None:
        self.stall: Stall | None = None
        self._processes = processes
        self._say = say
        self._find_stall = find_stall
        self._stall_seconds = stall_seconds
        self._due_at = 0.0
        self._stopped: dict[int, int] = {}
        self._said: dict[int, int] = {}

    def look(self) -> None:
        """Look at the ranks if a second has passed.

        Raises:
            StalledRunError: a rank is stalled for too long.
        """
        if time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + WATCH_SECONDS
        self._look_for_stopped()
        self._look_for_stalled()

    def _look_for_stopped(self) -> None:
        """Tell it once, when they were stopped at two looks: a debugger stops a process for a moment."""
        before, self._stopped = self._stopped, only_stopped(self._processes())
        if self._stopped and self._stopped == before and self._stopped != self._said:
            self._said = self._stopped
            self._say(describe_stopped(self._stopped))

    def _look_for_stalled(self) -> None:
        if self._stall_seconds is None:
            return
        stall = self._find_stall()
        if stall is not None and stall.seconds >= self._stall_seconds:
            self.stall = stall
            raise StalledRunError(stall)


def only_stopped(states: Mapping[int, ProcessEntry]) -> dict[int, int]:
    """The pids of ranks that are stopped, if no other rank is running."""
    if any(each.state != STOPPED for each in states.values()):
        return {}
    return {rank: each.id.pid for rank, each in sorted(states.items())}


def describe_stopped(pids: Mapping[int, int]) -> str:
    """Which ranks are stopped, and what the user can do."""
    who, them = (f"rank {_listed(pids)} is", "it")
    if len(pids) > 1:
        who, them = (f"ranks {_listed(pids)} are", "them")
    return (
        f"{who} stopped by a signal, and no other rank of this host is running. "
        f"To continue {them}: kill -CONT {_listed(pids.values(), ' ')}; to end the run: Ctrl-C"
    )


def _listed(numbers: Iterable[int], separator: str = ", ") -> str:
    return separator.join(map(str, numbers))
