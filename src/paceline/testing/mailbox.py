"""The directory through which a caller and its ranks exchange calls and answers.

Calls and answers are files, and the sockets beside them carry single bytes that say "look". So neither
side can block on the other while it hands over something large, and every wait has a deadline.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mailbox:
    """Names the files in one set of ranks' directory."""

    directory: Path

    @property
    def setup(self) -> Path:
        """What a rank takes over from its caller before it joins the group."""
        return self.directory / "setup"

    @property
    def store(self) -> Path:
        """Where the ranks of the process group meet."""
        return self.directory / "store"

    @property
    def call(self) -> Path:
        """The call that the ranks are to answer."""
        return self.directory / "call"

    def answer(self, rank: int) -> Path:
        """The last outcome that the rank reported."""
        return self.directory / f"answer-{rank}"

    def stacks(self, rank: int) -> Path:
        """What the rank's threads were doing when it crashed or was told to end."""
        return self.directory / f"stacks-{rank}"
