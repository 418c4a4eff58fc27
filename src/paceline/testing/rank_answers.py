"""Which ranks have answered, how long to wait for the others, and the error to raise. Pure: no processes."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import RankDiedError, RanksError
from paceline.testing.messages import Died, Raised, RankAnswer, Returned

# When a rank has failed, the others may be waiting for it in a collective; but they may also be about
# to fail in a way that is worth knowing.
GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class Deadline:
    """A moment on the monotonic clock, and the timeout it came from."""

    at: float
    timeout: float


class RankAnswers:
    """The answers of ``world`` ranks to one call."""

    def __init__(self, world: int, deadline: Deadline) -> None:
        self.deadline = deadline
        self.answers: dict[int, RankAnswer] = {}
        self.first_to_fail: int | None = None
        self.wait_until = deadline.at
        self._world = world

    @property
    def missing(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in range(self._world) if rank not in self.answers]

    @property
    def all_returned(self) -> bool:
        """Whether every rank has answered and none failed."""
        return not self.missing and self.first_to_fail is None

    def add(self, rank: int, answer: RankAnswer, *, now: float) -> None:
        """Add a rank's answer. The first failure shortens the wait for the others."""
        self.answers[rank] = answer
        if self.first_to_fail is None and not isinstance(answer, Returned):
            self.first_to_fail = rank
            self.wait_until = min(self.wait_until, now + GRACE_SECONDS)

    def values(self) -> list[object]:
        """What the ranks returned, in rank order."""
        answers = (self.answers[rank] for rank in sorted(self.answers))
        return [answer.value for answer in answers if isinstance(answer, Returned)]

    def error(self, what: str, stacks: Mapping[int, str]) -> RanksError:
        """The error of the call ``what``; ``stacks`` is where each rank was when it was ended."""
        if self.first_to_fail is None:
            return RanksError(f"{what} did not finish", [self._timeout_error(stacks)])
        errors = {
            rank: _error(rank, answer, stacks[rank])
            for rank, answer in sorted(self.answers.items())
            if not isinstance(answer, Returned)
        }
        group = RanksError(
            f"{what} failed on {_list_ranks(list(errors))}{self._still_busy()}", list(errors.values())
        )
        for rank in self.missing:
            group.add_note(f"rank {rank} was here when it was ended:\n{_format_stack(stacks[rank])}")
        return group

    def _still_busy(self) -> str:
        if not self.missing:
            return ""
        verb = "were" if len(self.missing) > 1 else "was"
        return (
            f"; {_list_ranks(self.missing)} {verb} still busy, and ended because of rank {self.first_to_fail}"
        )

    def _timeout_error(self, stacks: Mapping[int, str]) -> TimeoutError:
        lines = [f"{_list_ranks(self.missing)} did not finish in time (timeout: {self.deadline.timeout} s)"]
        for rank, stack in sorted(stacks.items()):
            at = "was here" if rank in self.missing else "had finished, and was here"
            lines.append(f"rank {rank} {at}:\n{_format_stack(stack)}")
        return TimeoutError("\n".join(lines))


def _error(rank: int, answer: Raised | Died, stack: str) -> Exception:
    if isinstance(answer, Raised):
        return answer.rebuild(rank)
    error = RankDiedError(f"rank {rank} died ({_exit_reason(answer.exit_code)})")
    if stack:
        error.add_note(f"rank {rank} was here:\n{_format_stack(stack)}")
    return error


def _exit_reason(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code: {exit_code}"
    try:
        return f"signal: {signal.Signals(-exit_code).name}"
    except ValueError:  # A real-time signal has a number only.
        return f"signal: {-exit_code}"


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _format_stack(stack: str) -> str:
    return stack.rstrip() or "(it left no stacks)"
