"""Timing: all sides interleaved in one run, medians with quartiles, the machine named."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of several values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Those of the values, of which there must be two or more."""
        low, median, high = statistics.quantiles(values, n=4)
        return cls(median, low, high)


class Timing(Spread):
    """Seconds a call, over rounds."""

    def __str__(self) -> str:
        unit, scale = ("us", 1e6) if abs(self.median) < 1e-3 else ("ms", 1e3)
        return f"{self.median * scale:.1f} {unit} ({self.low * scale:.1f} to {self.high * scale:.1f})"


class Size(Spread):
    """Bytes, over runs."""

    def __str__(self) -> str:
        return f"{self.median / 1e6:.1f} MB ({self.low / 1e6:.1f} to {self.high / 1e6:.1f})"


def interleave(
    sides: Mapping[str, Callable[[], object]], *, rounds: int, calls: int = 1
) -> dict[str, Timing]:
    """Time each side in turn, round after round, so that a slow moment of the machine meets all of them.

    The first round only warms up.
    """
    return {name: timing(values) for name, values in samples(sides, rounds=rounds, calls=calls).items()}


def samples(
    sides: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    warmups: int = 1,
    before: Callable[[], object] = lambda: None,
    untimed: int = 0,
) -> dict[str, list[float]]:
    """Seconds a call of each side, a value a round; ``before`` runs ahead of each turn and is not timed.

    Nor are a turn's first calls, as many as are ``untimed``: where calls are short, ranks that have left
    ``before`` one after the other are together only after the first. The order of the turns depends on
    nothing but the number of sides, so that ranks stay in step.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warmups, rounds):
        for name in _order(list(sides), number):
            before()
            _time(sides[name], untimed)
            elapsed = _time(sides[name], calls) / calls
            if number >= 0:
                seconds[name].append(elapsed)
    return seconds


def _order(names: list[str], number: int) -> list[str]:
    """The order in one round: each side comes to each place, and after either of its neighbours."""
    first = number // 2 % len(names)
    turned = names[first:] + names[:first]
    return turned[::-1] if number % 2 else turned


def _time(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


timing, size = Timing.of, Size.of


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """What each rank measured, as one: ranks start a turn together, and it is over when the last is done."""
    return {
        side: [max(turn) for turn in zip(*(rank[side] for rank in ranks), strict=True)] for side in ranks[0]
    }


def ratio(values: Sequence[float], base: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """How the medians stand to each other, and the quartiles of the ratio over the rounds."""
    spread = timing([value / other for value, other in zip(values, base, strict=True)])
    return timing(values).median / timing(base).median, (spread.low, spread.high)


def processor() -> str:
    """The machine's kind of processor, and how many cores of it may be used."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def machine() -> str:
    """What the figures were measured on."""
    return f"{processor()}, Python {platform.python_version()}, torch {torch.__version__}"
