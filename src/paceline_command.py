"""Starts the command ``paceline``.

It is outside of the package, because importing that takes seconds, in which Ctrl-C may come.
"""

import os
import signal
from types import FrameType

EXIT_SIGINT = 128 + signal.SIGINT


def main() -> None:
    """Run the command. Until it is imported, Ctrl-C ends this process without a word."""
    before = signal.getsignal(signal.SIGINT)
    # No exception: what torch and numpy run while they are imported may drop it, or raise another one.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
    from paceline.tools.main import main as command

    signal.signal(signal.SIGINT, before)
    command()


def _exit(_signum: int, _frame: FrameType | None) -> None:
    os._exit(EXIT_SIGINT)
