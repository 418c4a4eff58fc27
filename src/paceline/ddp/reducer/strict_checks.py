"""What strict mode asks of the step; compat/strict.py has the checks."""

from typing import Protocol


class StrictChecks(Protocol):
    """Raises where torch's reducer raises.

    Attributes:
        error: the last refusal in words.
        skip_unused: whether to skip buckets that this rank did not use.
        static: whether the graph was said never to change.
    """

    error: str | None
    skip_unused: bool
    static: bool

    def begin(self) -> None:
        """Check the iteration that has ended, and start the next."""

    def mark(self, slot: int) -> None:
        """Check a gradient that has arrived."""
