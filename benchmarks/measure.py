"""Timing for the benchmarks: both sides interleaved in one run, medians with quartiles, the machine named."""

import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median and quartiles over rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        unit, scale = ("us", 1e6) if abs(self.median) < 1e-3 else ("ms", 1e3)
        return f"{self.median * scale:.1f} {unit} ({self.low * scale:.1f} to {self.high * scale:.1f})"


@dataclass(frozen=True)
class Size:
    """Bytes: median and quartiles over runs."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median / 1e6:.1f} MB ({self.low / 1e6:.1f} to {self.high / 1e6:.1f})"


@dataclass(frozen=True)
class Row:
    """One comparison: what was measured, and how a figure stands to its target, if it has one.

    A figure that is not a number meets no target. ``spread`` holds the figure's quartiles over rounds, where
    it was taken in each.
    """

    what: str
    timings: Mapping[str, Timing | Size]
    figure: str
    value: float
    target: float | None
    at_most: bool = True
    spread: tuple[float, float] | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is no target."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def shown_figure(self) -> str:
        """The figure as the table shows it."""
        spread = "" if self.spread is None else " ({:.3g} to {:.3g})".format(*self.spread)
        return f"{self.figure}: {self.value:.3g}{spread}"

    @property
    def shown_target(self) -> str:
        """The target as the table shows it, with the verdict."""
        if self.target is None:
            return ""
        return f"{'<=' if self.at_most else '>='} {self.target:.3g} {'met' if self.met else 'MISSED'}"


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


def timing(values: Sequence[float]) -> Timing:
    """The median and the quartiles of the values, of which there must be two or more."""
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median, low, high)


def size(values: Sequence[float]) -> Size:
    """As ``timing``, of bytes."""
    low, median, high = statistics.quantiles(values, n=4)
    return Size(median, low, high)


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """What each rank measured, as one: ranks start a turn together, and it is over when the last is done."""
    return {
        side: [max(turn) for turn in zip(*(rank[side] for rank in ranks), strict=True)] for side in ranks[0]
    }


def ratio(values: Sequence[float], base: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """How the medians stand to each other, and the quartiles of the ratio over the rounds."""
    spread = timing([value / other for value, other in zip(values, base, strict=True)])
    return timing(values).median / timing(base).median, (spread.low, spread.high)


def machine() -> str:
    """What the figures were measured on."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}"


def report(title: str, rows: Sequence[Row], path: Path | None) -> None:
    """Print the rows as a table, and write them as JSON where a path is given.

    Neighbours that say the same ``what`` have the same timings, and are shown as one with several figures.
    """
    table = Table(title=title, caption=machine(), show_lines=True)
    table.add_column("what", overflow="fold", max_width=32)
    for column in ("median (quartiles)", "figure and target"):
        table.add_column(column, overflow="fold")
    for what, alike in itertools.groupby(rows, key=lambda row: row.what):
        first, *others = alike
        sides = "\n".join(f"{name}: {timing}" for name, timing in first.timings.items())
        figures = Table.grid("", "", padding=(0, 2))
        for row in (first, *others):
            figures.add_row(row.shown_figure, row.shown_target)
        table.add_row(what, sides, figures)
    Console(width=140).print(table)
    if path is not None:
        verdicts = [
            {**asdict(row), "value": None if math.isnan(row.value) else row.value, "met": row.met}
            for row in rows
        ]
        path.write_text(json.dumps({"machine": machine(), "rows": verdicts}, indent=2) + "\n")
