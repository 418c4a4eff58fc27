"""Which ranks have answered, how long the others are waited for, and the error that comes of it.

Nothing here touches a process or looks at a clock.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import RankDiedError, RanksError
from paceline.testing.remote import Died, Outcome, Raised, Returned

# When a rank has failed, the others may be waiting for it in a collective; but they may also be about
# to fail in a way that is worth knowing.
GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Deadline:
    """A moment on the monotonic clock, and the timeout it came from."""

    at: float
    timeout: float


class Tally:
    """The outcomes of one exchange with ``world`` ranks."""

    def __init__(self, world: int, deadline: Deadline) -> None:
        self.deadline = deadline
        self.outcomes: dict[int, Outcome] = {}
        self.first_to_fail: int | None = None
        self.wait_until = deadline.at
        self._world = world

    @property
    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in range(self._world) if rank not in self.outcomes]

    @property
    def is_good(self) -> bool:
        """Whether every rank has answered and none failed."""
        return not self.missing and self.first_to_fail is None

    def add(self, rank: int, outcome: Outcome, *, now: float) -> None:
        """Enter a rank's outcome. The first failure shortens the wait for the others."""
        self.outcomes[rank] = outcome
        if self.first_to_fail is None and not isinstance(outcome, Returned):
            self.first_to_fail = rank
            self.wait_until = min(self.wait_until, now + GRACE_SECONDS)

    def values(self) -> list[object]:
        """What the ranks returned, in rank order."""
        outcomes = (self.outcomes[rank] for rank in sorted(self.outcomes))
        return [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]

    def error(self, what: str, stacks: Mapping[int, str]) -> RanksError:
        """What went wrong with ``what``; ``stacks`` is where each rank was when it was ended."""
        if self.first_to_fail is None:
            return RanksError(f"{what} did not finish", [self._overrun(stacks)])
        errors = {
            rank: _error(rank, outcome, stacks[rank])
            for rank, outcome in sorted(self.outcomes.items())
            if not isinstance(outcome, Returned)
        }
        group = RanksError(f"{what} failed on {_named(list(errors))}{self._ended()}", list(errors.values()))
        for rank in self.missing:
            group.add_note(f"rank {rank} was here when it was ended:\n{_shown(stacks[rank])}")
        return group

    def _ended(self) -> str:
        if not self.missing:
            return ""
        verb = "were" if len(self.missing) > 1 else "was"
        return f"; {_named(self.missing)} {verb} still busy, and ended because of rank {self.first_to_fail}"

    def _overrun(self, stacks: Mapping[int, str]) -> TimeoutError:
        lines = [f"{_named(self.missing)} did not finish in time (timeout: {self.deadline.timeout} s)"]
        for rank, stack in sorted(stacks.items()):
            at = "was here" if rank in self.missing else "had finished, and was here"
            lines.append(f"rank {rank} {at}:\n{_shown(stack)}")
        return TimeoutError("\n".join(lines))


def _error(rank: int, outcome: Raised | Died, stack: str) -> Exception:
    if isinstance(outcome, Raised):
        return outcome.rebuild(rank)
    error = RankDiedError(f"rank {rank} died ({_cause_of_death(outcome.exit_code)})")
    if stack:
        error.add_note(f"rank {rank} was here:\n{_shown(stack)}")
    return error


def _cause_of_death(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code: {exit_code}"
    try:
        return f"signal: {signal.Signals(-exit_code).name}"
    except ValueError:  # A real-time signal has a number only.
        return f"signal: {-exit_code}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _shown(stack: str) -> str:
    return stack.rstrip() or "(it left no stacks)"
