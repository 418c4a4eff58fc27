"""What an exception says to other ranks: its type, its words, and the user's line that raised it."""

import re
import traceback
from types import FrameType

from paceline.errors import CollectiveError
from paceline.watch.stacks import CodeLine, stack_of

# An exception's words may be a whole page.
_LONGEST = 1000
# What a rank raises because of another one.
CONSEQUENCES = ("PeerError", "StalledError", "LostRankError", "LateRankError")
# What gloo and torch's store say when the process at the other end is gone.
LOST_CONNECTION = re.compile(
    r"connection (was likely )?(closed|reset|refused)|pair closure|broken pipe|failed to (recv|send)",
    re.IGNORECASE,
)


def describe_error(error: BaseException, caller: FrameType | None = None) -> str:
    """The error with the user's innermost line that raised it.

    Args:
        error: the error.
        caller: the frame in which the error was seen, if callers of it may be the user's.
    """
    inside = [
        CodeLine(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    place = next((line for line in [*reversed(inside), *stack_of(caller)] if line.is_users), None)
    words = words_of(error)
    words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]}…"
    return words if place is None else f"{words} ({place})"


def words_of(error: BaseException) -> str:
    """The error's ``repr``, or its type if that raises."""
    try:
        return repr(error)
    except Exception:  # the user's own code, and the other ranks have to be told all the same
        return type(error).__name__


def is_consequence(words: str) -> bool:
    """Whether the words of an error are of one that a rank raises because of another rank."""
    return words.startswith(tuple(f"{name}(" for name in CONSEQUENCES)) or (
        LOST_CONNECTION.search(words) is not None
    )


def words_of_failure(error: Exception) -> str:
    """Why a collective has failed, without the ranks that it alone knows of."""
    return error.what if isinstance(error, CollectiveError) else str(error)
