"""Timing: all sides take turns in one run, results are medians with quartiles, the machine is named."""

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch

from paceline.tools.formatting import plural

# What a busy process runs: it ends when the process that started it, which is named, is no longer its parent.
_BURN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(10_000))"


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of several values."""

    unit: ClassVar[str] = ""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of two or more values."""
        low, median, high = statistics.quantiles(values, n=4)
        return cls(median, low, high)


class Timing(Spread):
    """Seconds per call, over rounds."""

    unit = "s"

    def __str__(self) -> str:
        return with_quartiles(self, *time_unit(self.median))


class Size(Spread):
    """Bytes, over runs."""

    unit = "bytes"

    def __str__(self) -> str:
        return with_quartiles(self, "MB", 1e-6)


timing, size = Timing.of, Size.of


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a time has at most three digits before the point, and its factor."""
    units = (("us", 1e6), ("ms", 1e3))
    return next(((unit, factor) for unit, factor in units if abs(seconds) * factor < 999.5), ("s", 1.0))


def with_quartiles(spread: Spread, unit: str = "", factor: float = 1.0, *, to: str = " to ") -> str:
    """A median with its quartiles in brackets, in three digits or so."""
    digits = decimals([spread.median * factor, spread.low * factor, spread.high * factor])
    median, low, high = (f"{each * factor:z.{digits}f}" for each in (spread.median, spread.low, spread.high))
    return f"{median}{unit and ' '}{unit} ({low}{to}{high})"


def decimals(values: Sequence[float]) -> int:
    """How many decimals the largest of the values needs to be shown in three digits."""
    largest = max(map(abs, values))
    return 0 if largest >= 100 else 1 if largest >= 10 else 2


def format_seconds(seconds: float) -> str:
    """A time with its unit, in three digits or so."""
    unit, factor = time_unit(seconds)
    return f"{seconds * factor:.{decimals([seconds * factor])}f} {unit}"


def interleave(
    sides: Mapping[str, Callable[[], object]], *, rounds: int, calls: int = 1
) -> dict[str, Timing]:
    """Time each side in turn, round after round, so that a slow moment of the machine affects all of them.

    A first round, which is not counted, warms up.
    """
    return {name: timing(values) for name, values in samples(sides, rounds=rounds, calls=calls).items()}


@dataclass(frozen=True)
class Turn:
    """One turn of a side: the seconds of each call, and the CPU seconds of the process in all of them."""

    seconds: Sequence[float]
    cpu: float

    @property
    def mean_seconds(self) -> float:
        """Seconds per call."""
        return sum(self.seconds) / len(self.seconds)

    @property
    def mean_cpu(self) -> float:
        """CPU seconds per call, of all threads."""
        return self.cpu / len(self.seconds)


def samples(
    sides: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    warmups: int = 1,
    before: Callable[[], object] = lambda: None,
    untimed: int = 0,
) -> dict[str, list[float]]:
    """Seconds per call of each side, one value per round; the arguments are those of ``take_turns``."""
    turns = take_turns(sides, rounds=rounds, calls=calls, warmups=warmups, before=before, untimed=untimed)
    return {name: [turn.mean_seconds for turn in of_side] for name, of_side in turns.items()}


def take_turns(
    sides: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    warmups: int = 1,
    before: Callable[[], object] = lambda: None,
    untimed: int = 0,
) -> dict[str, list[Turn]]:
    """The turns of each side, one per round.

    A round is one turn of each side, a turn is ``calls`` calls in a row. The order of the turns depends only
    on the number of sides, so that ranks stay in step.

    Args:
        sides: a call of each side.
        rounds: how many rounds are timed.
        calls: how many calls a turn has.
        warmups: rounds before those, which are not counted.
        before: called before each turn, not timed.
        untimed: calls at the start of each turn that are not timed: ranks leave ``before`` one after another,
            and short calls bring them together.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for number in range(-warmups, rounds):
        for name in _order(list(sides), number):
            before()
            _take_turn(sides[name], untimed)
            turn = _take_turn(sides[name], calls)
            if number >= 0:
                turns[name].append(turn)
    return turns


def _order(names: list[str], number: int) -> list[str]:
    """The order in one round. Over the rounds, each side has each place and follows either neighbour."""
    first = number // 2 % len(names)
    turned = names[first:] + names[:first]
    return turned[::-1] if number % 2 else turned


def _take_turn(call: Callable[[], object], calls: int) -> Turn:
    seconds = []
    cpu, start = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
        end = time.perf_counter()
        seconds.append(end - start)
        start = end
    return Turn(seconds, time.process_time() - cpu)


@contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """Keep cores busy with this many processes; gives their ids.

    They end with the block, however it is left, and by themselves if this process is killed.
    """
    command = [sys.executable, "-I", "-S", "-c", _BURN, str(os.getpid())]
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            # A process group each: an interrupt from the terminal is for this process, which ends them. Not a
            # session each: Linux (autogroup) would share the cores among sessions, and ranks are in one.
            process = stack.enter_context(subprocess.Popen(command, process_group=0))  # noqa: S603
            stack.callback(process.kill)  # called before the process is waited for
            started.append(process.pid)
        yield started


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Merge what ranks measured: they start a turn together, and it is over when the slowest rank is done."""
    return {
        side: [max(turn) for turn in zip(*(rank[side] for rank in ranks), strict=True)] for side in ranks[0]
    }


def ratio(values: Sequence[float], base: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The ratio of the medians, and the quartiles of the ratios of each round."""
    spread = timing([value / other for value, other in zip(values, base, strict=True)])
    return timing(values).median / timing(base).median, (spread.low, spread.high)


def processor() -> str:
    """The processor's model, and how many of its cores this process may use."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return f"{model}, {plural(len(os.sched_getaffinity(0)), 'core')}"


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    return {"python": platform.python_version(), "torch": torch.__version__}


def machine() -> str:
    """The processor and the versions, in one line."""
    return f"{processor()}, Python {versions()['python']}, torch {versions()['torch']}"
