"""Calls that may hang, or break the process: made in a fork, under a deadline."""

import json
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """What a call gave, or why it gave nothing."""

    value: Any = None
    problem: str | None = None


def attempt(call: Callable[[], Any], *, seconds: float) -> Outcome:
    """Make a call in a fork of this process. What it returns must be what JSON can hold."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(call, writer)
    os.close(writer)
    try:
        return _outcome(reader, seconds)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _answer(call: Callable[[], Any], writer: int) -> None:
    """Never returns: what runs in the fork must not go on as this process."""
    try:
        try:
            answer = {"value": call()}
        except Exception as error:
            answer = {"problem": str(error) or type(error).__name__}
        os.write(writer, json.dumps(answer).encode())
    finally:
        os._exit(0)


def _outcome(reader: int, seconds: float) -> Outcome:
    # An answer is shorter than what a pipe takes at once.
    if not select.select([reader], [], [], seconds)[0]:
        return Outcome(problem=f"no answer within {seconds:g} s")
    answer = os.read(reader, 2**16)
    return (
        Outcome(**json.loads(answer)) if answer else Outcome(problem="the process that tried it was killed")
    )
