"""Timing for the benchmarks: both sides interleaved in one run, medians with quartiles, the machine named."""

import json
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
        unit, scale = ("us", 1e6) if self.median < 1e-3 else ("ms", 1e3)
        return f"{self.median * scale:.1f} {unit} ({self.low * scale:.1f} to {self.high * scale:.1f})"


@dataclass(frozen=True)
class Row:
    """One comparison: what was measured, and how a figure stands to its target."""

    what: str
    timings: Mapping[str, Timing]
    figure: str
    value: float
    target: float
    at_most: bool = True

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.value <= self.target if self.at_most else self.value >= self.target


def interleave(
    sides: Mapping[str, Callable[[], object]], *, rounds: int, calls: int = 1
) -> dict[str, Timing]:
    """Time each side in turn, round after round, so that a slow moment of the machine meets all of them.

    The order turns with each round, and the first round only warms up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for number in range(rounds + 1):
        for name in order:
            elapsed = _time(sides[name], calls)
            if number:
                seconds[name].append(elapsed)
        order = order[1:] + order[:1]
    return {name: _timing(values) for name, values in seconds.items()}


def _time(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _timing(values: Sequence[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median, low, high)


def machine() -> str:
    """What the figures were measured on."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}"


def report(title: str, rows: Sequence[Row], path: Path | None) -> None:
    """Print the rows as a table, and write them as JSON where a path is given."""
    table = Table(title=title, caption=machine(), show_lines=True)
    for column in ("what", "median (quartiles)", "figure", "target"):
        table.add_column(column, overflow="fold")
    for row in rows:
        sides = "\n".join(f"{name}: {timing}" for name, timing in row.timings.items())
        sign = "<=" if row.at_most else ">="
        verdict = "met" if row.met else "MISSED"
        table.add_row(row.what, sides, f"{row.figure}: {row.value:.3g}", f"{sign} {row.target:.3g} {verdict}")
    Console(width=120).print(table)
    if path is not None:
        figures = [{**asdict(row), "met": row.met} for row in rows]
        path.write_text(json.dumps({"machine": machine(), "rows": figures}, indent=2) + "\n")
