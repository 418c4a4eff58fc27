"""Which rank's failure is the root cause, which ones only followed from it, and how they are shown."""

import re
import signal
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from paceline.tools.run.worker import EXIT_SIGINT, EXIT_SIGTERM
from paceline.watch.error_words import CONSEQUENCES, LOST_CONNECTION
from paceline.watch.stacks import CodeLine, users_line

# Errors that mean that another rank is missing. By name, because they were raised in another process.
PEER_ERRORS = frozenset(f"paceline.errors.{name}" for name in CONSEQUENCES)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
LONGEST_LINE = 200
ROOT_CAUSE_ELSEWHERE = "a rank that is not listed here caused these failures: it may be on another host"
STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class RankFailure:
    """A rank whose exit code was not 0. A negative exit code is a signal's number.

    ``origins`` are the first errors of the chain of causes. ``was_stopped`` says that the rank ended because
    it was asked to.
    """

    rank: int
    host: str
    pid: int
    time: float
    exit_code: int
    kind: str = ""
    message: str = ""
    trace: str = ""
    origins: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    was_stopped: bool = False

    @property
    def is_secondary(self) -> bool:
        """Whether it followed from the loss of another rank, or the rank was stopped."""
        return self.was_stopped or (
            bool(self.origins) and all(means_lost_rank(**origin) for origin in self.origins)
        )

    @property
    def shell_code(self) -> int:
        """The exit code as a shell shows it."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code

    @property
    def has_error(self) -> bool:
        """Whether an exception ended the rank, whose traceback says more than the exit code."""
        return self.kind not in ("", "SystemExit", "KeyboardInterrupt")

    @property
    def has_trace(self) -> bool:
        """Whether there is a traceback to show, of an exception or of a crashed interpreter."""
        return self.has_error or (self.exit_code < 0 and bool(self.trace))

    def in_a_line(self) -> str:
        """What happened, in one line."""
        if self.kind == "KeyboardInterrupt":
            return f"interrupted at {_place(self.trace)}"
        if self.was_stopped:
            return "stopped"
        if self.has_error:
            first_line = self.message.strip().partition("\n")[0]
            error = textwrap.shorten(f"{self.kind}: {first_line}" if first_line else self.kind, LONGEST_LINE)
            return f"{error} (because another rank failed)" if self.is_secondary else error
        return describe_exit(self.exit_code)


def means_lost_rank(types: Sequence[str], message: str) -> bool:
    """Whether an error, given by the names of its types and its message, says that another rank is gone."""
    if not PEER_ERRORS.isdisjoint(types):
        return True
    return "builtins.RuntimeError" in types and LOST_CONNECTION.search(message) is not None


def _place(trace: str) -> str:
    """The user's innermost line of a traceback; a library's if there is no other."""
    stack = [CodeLine(file, int(line), function) for file, line, function in _FRAME.findall(trace)]
    line = users_line(stack[::-1])
    return "an unknown place" if line is None else str(line)


def describe_exit(exit_code: int) -> str:
    """An exit code or a signal, for people."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has a number only
        name = f"signal {-exit_code}"
    if -exit_code == signal.SIGKILL:
        return f"killed by {name}: by a user, or by the kernel because memory ran out (see dmesg)"
    return f"killed by {name}"


@dataclass(frozen=True)
class FailureSummary:
    """The root cause, other ranks with the same failure, and all other failures.

    ``ended_before`` are ranks of this host that had ended with exit code 0 before the others were stopped.
    """

    root_cause: RankFailure
    same: tuple[RankFailure, ...]
    others: tuple[RankFailure, ...]
    ended_before: tuple[int, ...] = ()
    is_one_host: bool = False

    def __str__(self) -> str:
        lines = [self._describe_root_cause(), *in_lines(self.others)]
        return "\n".join([*lines, *self._missing_cause()] if self.root_cause.is_secondary else lines)

    def _missing_cause(self) -> list[str]:
        """What has caused failures that all follow from the loss of a rank that has not failed here."""
        if self.ended_before:
            return [f"{_name_ranks(self.ended_before)} had ended before, with exit code 0"]
        return [] if self.is_one_host else [ROOT_CAUSE_ELSEWHERE]

    def _describe_root_cause(self) -> str:
        first, ranks = self.root_cause, [self.root_cause.rank, *map(_rank, self.same)]
        at = datetime.fromtimestamp(first.time).strftime("%H:%M:%S.%f")[:-3]
        what = "failed" if first.has_error else first.in_a_line()
        heading = f"{_name_ranks(ranks)} {what} (host {first.host}, pid {first.pid}, {at})"
        return f"{heading}:\n{textwrap.indent(first.trace.rstrip(), '  ')}" if first.has_trace else heading


def summarise(
    failures: Iterable[RankFailure], *, ended_before: Iterable[int] = (), is_one_host: bool = False
) -> FailureSummary | None:
    """Find the root cause: the earliest failure, but a secondary one only if there is no other kind."""
    ordered = sorted(failures, key=lambda failure: (failure.was_stopped, failure.is_secondary, failure.time))
    if not ordered:
        return None
    root_cause, *rest = ordered
    same = [each for each in rest if _identity(each) == _identity(root_cause) and not each.is_secondary]
    others = [each for each in rest if each not in same]
    return FailureSummary(
        root_cause,
        tuple(sorted(same, key=_rank)),
        tuple(sorted(others, key=_rank)),
        tuple(ended_before),
        is_one_host,
    )


def in_lines(failures: Iterable[RankFailure]) -> list[str]:
    """One line per failure, with all ranks that had it. Secondary errors of one type share a line."""
    by_line: dict[str, list[RankFailure]] = {}
    for failure in failures:
        by_type = failure.is_secondary and failure.has_error and not failure.was_stopped
        by_line.setdefault(failure.kind if by_type else failure.in_a_line(), []).append(failure)
    return [f"{_name_ranks(map(_rank, alike))}: {alike[0].in_a_line()}" for alike in by_line.values()]


def was_stopped(exit_code: int, *, at: float, asked_at: float | None) -> bool:
    """Whether a rank ended by a stopping signal after it was asked to end."""
    if asked_at is None or at <= asked_at:
        return False
    return exit_code in (EXIT_SIGTERM, EXIT_SIGINT) or -exit_code in STOPPING_SIGNALS


def _name_ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def _identity(failure: RankFailure) -> tuple[str, str, str, int]:
    return failure.kind, failure.message, failure.trace, failure.exit_code


def _rank(failure: RankFailure) -> int:
    return failure.rank
