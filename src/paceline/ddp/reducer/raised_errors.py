"""What the running backward is about to raise, for other ranks.

Note [Errors of backward]. When backward raises, the engine drops our callback before anybody can look at the
exception. It becomes visible in the frame that called the engine. There a trace function sees it first: it is
set for this one frame, and removes itself at the first event.
"""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.watch.error_words import describe_error

_OURS = str(Path(__file__).parents[2])


def tell_error_of_backward(tell: Callable[[str], object]) -> None:
    """Call ``tell`` with what the running backward is about to raise: see Note [Errors of backward].

    It is called at once, without words, where the exception cannot be seen.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None or sys.gettrace() is not None:  # in another thread, or under a debugger
        tell("an exception")
        return

    def look(raising: FrameType, event: str, argument: Any) -> None:
        sys.settrace(None)
        raising.f_trace = None
        if event == "exception":
            _, error, trace = argument
            tell(describe_error(error.with_traceback(trace), raising.f_back))
        else:
            tell("an exception")

    frame.f_trace = look
    sys.settrace(lambda *_: None)
