"""A rank's Python stack: taken by its own watcher, or by another process while C code holds Python's lock.

Note [Asking for a stack]. A rank's watcher writes its stack to the page each second. While C code holds
Python's lock, the watcher cannot run. Then another process sends a real-time signal, and the handler that
``faulthandler`` has installed writes the stacks of all threads to a file, without Python's lock. If Python
code ran meanwhile, the frames would change while they are read, and the process would most likely crash. So
whoever asks makes sure first that the watcher looks for the lock, and does not get it. The signal
goes to the watcher's own thread: so it interrupts none of the user's system calls, and cannot kill a process
that has started another program in its place, because there is no such thread in it.
"""

import ctypes
import faulthandler
import functools
import operator
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from paceline.watch.rank_page import create_stacks_file

_MOST_FRAMES = 60
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
# A stack is written within milliseconds, also on a busy machine.
_ANSWER_SECONDS, _LOOK_SECONDS = 0.5, 0.02
# Files whose lines are not the user's. Those in angle brackets are no files: libraries run made-up code, as
# dataclasses do. What is typed into Python or IPython is the user's.
_LIBRARIES = re.compile(
    r"^<(?!stdin>|python-input-|ipython-input-)|/site-packages/|/dist-packages/|/lib/python\d"
)
_OURS = str(Path(__file__).parents[1]) + "/"
_TORCH = str(Path(getattr(find_spec("torch"), "origin", None) or "/torch/none").parent) + "/"

# What a frame says about what the rank does, from the innermost frame on; the file's path contains the text.
_KINDS = {
    "/torch/_dynamo/convert_frame.py": "compiles",
    "/torch/_dynamo/symbolic_convert.py": "compiles",
    "/torch/_inductor/codecache.py": "compiles",
    "/torch/_inductor/async_compile.py": "compiles",
    "/torch/_inductor/graph.py": "compiles",
    "/triton/compiler/": "compiles",
    "/torch/serialization.py": "reads or writes a checkpoint",
    "/torch/distributed/checkpoint/": "reads or writes a checkpoint",
    "/safetensors/": "reads or writes a checkpoint",
    "/torch/utils/data/dataloader.py": "is in the data loader",
    "/torch/optim/": "is in the optimizer",
    "/torch/distributed/distributed_c10d.py": "is in a collective",
    _OURS + "comm/": "is in a collective",
}


class CodeLine(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_users(self) -> bool:
        """Whether it is neither a library's nor ours."""
        return not self.file.startswith((_OURS, _TORCH)) and _LIBRARIES.search(self.file) is None


# Innermost line first.
Stack = Sequence[CodeLine]


def stack_of(frame: FrameType | None) -> list[CodeLine]:
    """The lines of a frame and its callers."""
    lines = []
    while frame is not None:
        lines.append(CodeLine(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return shorten(lines)


def shorten(stack: Stack) -> list[CodeLine]:
    """A stack without its middle, if it is deep: both ends say where the program is."""
    half = _MOST_FRAMES // 2
    return [*stack] if len(stack) <= _MOST_FRAMES else [*stack[:half], *stack[-half:]]


def encode(stack: Stack) -> str:
    """A stack as text."""
    return "\n".join(f"{file}\t{line}\t{function}" for file, line, function in stack)


def decode(text: str) -> list[CodeLine]:
    """The stack of a text; lines that were cut off are left out."""
    parts = (line.split("\t") for line in text.split("\n"))
    return [
        CodeLine(part[0], int(part[1]), part[2]) for part in parts if len(part) == 3 and part[1].isdecimal()
    ]


def users_line(stack: Stack) -> CodeLine | None:
    """The innermost line of the user's, or of anybody's if there is none."""
    return next((line for line in stack if line.is_users), stack[0] if stack else None)


def kind_of(stack: Stack) -> str | None:
    """What a rank with this stack does in a library; None for nothing that is known."""
    for line in stack:
        for part, kind in _KINDS.items():
            if part in line.file:
                return kind
    return None


def place_of(stack: Stack, other: Stack) -> CodeLine | None:
    """Where a stack has left another one: its line in the innermost function that both are in.

    Two ranks in one training loop have the loop's function in common. So this is the line of the loop in
    which a rank stays, whatever it calls there.
    """
    common = None
    for line, others in zip(reversed(stack), reversed(other), strict=False):
        if (line.file, line.function) != (others.file, others.function):
            break
        common = line
        if line.line != others.line:
            break
    return common or (stack[-1] if stack else None)


def parse_dump(text: str, thread: int) -> list[CodeLine]:
    """The stack of a thread, by Python's number, in what ``faulthandler`` wrote; if unknown, the last one."""
    stacks: dict[int, list[CodeLine]] = {}
    current: list[CodeLine] = []
    for line in text.split("\n"):
        if match := _THREAD.match(line):
            current = stacks[int(match[1], 16)] = []
        elif match := _FRAME.match(line):
            number = int(match[2]) if match[2].isdecimal() else 0
            current.append(CodeLine(match[1], number, match[3]))
    found = stacks.get(thread)
    return shorten(found if found is not None else current)


class StackAnswers:
    """Has this process answer to a signal with its stacks.

    Args:
        rank: the global rank.
        folder: where the file is, if there is one.

    Attributes:
        path: the file's path.
        signal: the signal; None if none is free.
    """

    def __init__(self, rank: int, folder: Path | None) -> None:
        self._file, self.path = create_stacks_file(rank, folder)
        self.signal = _free_signal()
        if self.signal is not None:
            faulthandler.register(self.signal, self._file, all_threads=True, chain=False)

    def stop(self) -> None:
        """Do not answer any more, as in a forked child."""
        if self.signal is not None:
            faulthandler.unregister(self.signal)
            self.signal = None


def _free_signal() -> int | None:
    """The last real-time signal that nobody handles."""
    # By what the kernel says, because Python does not know the handlers that C code has installed.
    status = Path("/proc/self/status").read_text()
    masks = re.findall(r"^Sig(?:Cgt|Ign|Blk):\s*([0-9a-f]+)$", status, re.MULTILINE)
    taken = functools.reduce(operator.or_, (int(mask, 16) for mask in masks), 0)
    numbers = range(signal.SIGRTMAX, signal.SIGRTMIN, -1)
    return next((number for number in numbers if not taken >> (number - 1) & 1), None)


def ask_for_stack(pid: int, watcher: int, signum: int, path: str, thread: int) -> list[CodeLine]:
    """The stack of another process's thread, see Note [Asking for a stack]; empty if there is no answer.

    Args:
        pid: the process.
        watcher: the system's number of the thread that answers.
        signum: the signal.
        path: the file that it answers in.
        thread: Python's number of the thread that is asked for.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        before = os.fstat(file).st_size
        if not signal_thread(pid, watcher, signum):
            return []
        return parse_dump(_read_answer(file, before), thread)
    except OSError:
        return []
    finally:
        os.close(file)


def signal_thread(pid: int, thread: int, signum: int) -> bool:
    """Send a signal to one thread of a process; returns whether it was sent."""
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    return tgkill is not None and tgkill(pid, thread, signum) == 0


def _read_answer(file: int, before: int) -> str:
    """What is written after an offset, once it has stopped growing."""
    until = time.monotonic() + _ANSWER_SECONDS
    last = before
    while time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        size = os.fstat(file).st_size
        if size > before and size == last:
            break
        last = size
    return os.pread(file, last - before, before).decode(errors="replace")


def own_stack(threads: Iterable[int]) -> list[CodeLine]:
    """The stack of the first of some threads of this process that runs Python code."""
    frames = sys._current_frames()
    try:
        return next((stack_of(frames[thread]) for thread in threads if thread in frames), [])
    finally:
        frames.clear()  # it holds this function's own frame too, and would keep every thread's locals alive
