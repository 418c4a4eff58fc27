"""Which rank failed first, which only because of it, and how it is told. Nothing here touches a process."""

import re
import signal
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from paceline.tools.run.worker import ENDED, INTERRUPTED

# Errors that say that another rank is missing. Named, because they were raised in another process.
OF_OTHERS = frozenset(
    f"paceline.errors.{name}" for name in ("PeerError", "StalledError", "LostRankError", "LateRankError")
)
# What gloo and torch's store say when the process at the other end has gone.
GONE = re.compile(
    r"connection (was likely )?(closed|reset|refused)|pair closure|broken pipe|failed to (recv|send)",
    re.IGNORECASE,
)
LIBRARY = re.compile(r"^<frozen |/site-packages/|/lib/python\d")
LONGEST_LINE = 200
ELSEWHERE = "all of this is because of a rank that is not told of here: it may be another host's"
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Failure:
    """A rank that did not end well. A negative exit code is a signal's number."""

    rank: int
    host: str
    pid: int
    time: float
    exit_code: int
    kind: str = ""
    message: str = ""
    trace: str = ""
    roots: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    was_ended: bool = False

    @property
    def is_consequence(self) -> bool:
        """Whether it began with the loss of another rank, or by being ended."""
        return self.was_ended or (bool(self.roots) and all(map(_is_of_others, self.roots)))

    @property
    def shell_code(self) -> int:
        """The exit code as a shell has it."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code

    @property
    def is_traceback_wanted(self) -> bool:
        """Whether its traceback says more than how the process ended."""
        return self.kind not in ("", "SystemExit", "KeyboardInterrupt")

    @property
    def is_shown_whole(self) -> bool:
        """Whether there is a traceback, or a crashed interpreter's last words, to be shown."""
        return self.is_traceback_wanted or (self.exit_code < 0 and bool(self.trace))

    def in_a_line(self) -> str:
        """What happened, in few words."""
        if self.kind == "KeyboardInterrupt":
            return f"interrupted at {_place(self.trace)}"
        if self.was_ended:
            return "ended"
        if self.is_traceback_wanted:
            said = self.message.strip().partition("\n")[0]
            words = textwrap.shorten(f"{self.kind}: {said}" if said else self.kind, LONGEST_LINE)
            return f"{words} (a consequence)" if self.is_consequence else words
        return how_it_ended(self.exit_code)


def _is_of_others(root: Mapping[str, Any]) -> bool:
    types = root["types"]
    if not OF_OTHERS.isdisjoint(types):
        return True
    return "builtins.RuntimeError" in types and GONE.search(root["message"]) is not None


def _place(trace: str) -> str:
    """The innermost place that a traceback names, in the program itself if it names one."""
    places = re.findall(r'File "([^"]+)", line (\d+)(?:, in (\S+))?', trace)
    if not places:
        return "an unknown place"
    of_program = [place for place in places if not LIBRARY.search(place[0])]
    file, line, function = (of_program or places)[-1]
    return f"{file}:{line}" + (f" in {function}" if function else "")


def how_it_ended(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # A real-time signal has a number only.
        name = f"signal {-exit_code}"
    if -exit_code == signal.SIGKILL:
        return f"killed by {name}: by somebody, or by the kernel because memory ran out (see dmesg)"
    return f"killed by {name}"


@dataclass(frozen=True)
class Verdict:
    """The first failure, the ranks on which the same happened, and the others."""

    first: Failure
    same: tuple[Failure, ...]
    others: tuple[Failure, ...]

    def __str__(self) -> str:
        return "\n".join(
            [self._first(), *folded(self.others), *([ELSEWHERE] if self.first.is_consequence else [])]
        )

    def _first(self) -> str:
        first, ranks = self.first, [self.first.rank, *map(_rank, self.same)]
        at = datetime.fromtimestamp(first.time).strftime("%H:%M:%S.%f")[:-3]
        where = f"host {first.host}, pid {first.pid}, {at}"
        what = "failed" if first.is_traceback_wanted else first.in_a_line()
        heading = f"{named(ranks)} {what} ({where})"
        return (
            f"{heading}:\n{textwrap.indent(first.trace.rstrip(), '  ')}" if first.is_shown_whole else heading
        )


def verdict(failures: Iterable[Failure]) -> Verdict | None:
    """Sort failures out: the earliest is first, but never a consequence while there is anything else."""
    ordered = sorted(failures, key=lambda failure: (failure.was_ended, failure.is_consequence, failure.time))
    if not ordered:
        return None
    first, *rest = ordered
    same = [failure for failure in rest if _what(failure) == _what(first) and not failure.is_consequence]
    others = [failure for failure in rest if failure not in same]
    return Verdict(first, tuple(sorted(same, key=_rank)), tuple(sorted(others, key=_rank)))


def folded(failures: Iterable[Failure]) -> list[str]:
    """A line for each thing that happened, with all ranks on which it did; consequences by their kind."""
    told: dict[str, list[Failure]] = {}
    for failure in failures:
        is_folded = failure.is_consequence and failure.is_traceback_wanted and not failure.was_ended
        told.setdefault(failure.kind if is_folded else failure.in_a_line(), []).append(failure)
    return [f"{named(map(_rank, those))}: {those[0].in_a_line()}" for those in told.values()]


def was_ended(exit_code: int, *, at: float, asked_at: float | None) -> bool:
    """Whether a rank ended as ranks do that are asked to, after it was asked to."""
    if asked_at is None or at < asked_at:
        return False
    return exit_code in (ENDED, INTERRUPTED) or -exit_code in ENDING_SIGNALS


def named(ranks: Iterable[int]) -> str:
    """Ranks in words."""
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def _what(failure: Failure) -> tuple[str, str, str, int]:
    return failure.kind, failure.message, failure.trace, failure.exit_code


def _rank(failure: Failure) -> int:
    return failure.rank
