"""Figures that are held against targets: a table, and JSON."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.tools.bench.measure import Size, Timing, machine


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
