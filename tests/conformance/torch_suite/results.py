"""What became of a test, told from what its ranks left behind. Nothing here starts a process."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.testing import RankDiedError, RanksError

# Colours, and where in its sources torch raised the error.
_NOISE = re.compile(r"\x1b\[[0-9;]*m|\[/\S+:\d+\] ")


class Outcome(StrEnum):
    """What became of a test."""

    PASSED = "passed"
    NOT_UNDER_TEST = "not under test"
    SKIPPED = "skipped"
    FAILED = "failed"
    DIED = "died"
    HUNG = "hung"


@dataclass(frozen=True)
class Result:
    """A test's outcome, and how often each rank built each wrapper, by the wrapper's name."""

    test: str
    wrapper: str
    outcome: Outcome
    built: dict[str, list[int]]
    seconds: float
    message: str = ""
    detail: str = ""

    @property
    def has_built_any(self) -> bool:
        """Whether any rank got as far as building a wrapper, whichever it was."""
        return any(map(sum, self.built.values()))


def outcome_of_end(reasons: Sequence[str | None], wrapper: str, built: dict[str, list[int]]) -> Outcome:
    """The outcome when every rank came to its end: ``reasons`` are the ranks' reasons to skip."""
    if any(reason is not None for reason in reasons):
        return Outcome.SKIPPED
    is_built = all(times > 0 for times in built[wrapper])
    is_only_one = not any(sum(times) for name, times in built.items() if name != wrapper)
    return Outcome.PASSED if is_built and is_only_one else Outcome.NOT_UNDER_TEST


def outcome_of_error(error: RanksError) -> Outcome:
    """The outcome when a rank did not come to its end."""
    if any(isinstance(each, RankDiedError) for each in error.exceptions):
        return Outcome.DIED
    is_late = any(type(each) is TimeoutError for each in error.exceptions)
    return Outcome.HUNG if is_late and "did not finish" in str(error) else Outcome.FAILED


def first_line(error: RanksError) -> str:
    """The error in one line."""
    first = error.exceptions[0]
    lines = [line for line in str(first).splitlines() if line.strip()]
    return f"{type(first).__name__}: {_NOISE.sub('', lines[0] if lines else '').strip()}"[:160]
