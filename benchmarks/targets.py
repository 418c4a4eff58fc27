"""Results of a benchmark held against targets: shown as a table, written as JSON, and kept for the docs."""

import argparse
import itertools
import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from figures import merge
from rich.console import Console
from rich.table import Table

from paceline.tools.bench.measure import Spread, machine, processor, versions

OUTPUT_OPTIONS = ("--json", "--figures", "--plot")


@dataclass(frozen=True)
class Row:
    """One comparison: what was measured, and a figure with its target, if it has one.

    Attributes:
        what: what was measured; rows in a row with the same ``what`` have the same ``timings``.
        timings: the time or the size of each side.
        figure: the figure's name.
        value: the figure. NaN meets no target.
        target: what the figure should be at most, or at least.
        at_most: which of the two.
        spread: the figure's quartiles over rounds.
        case: what was measured, for programs: the model, the size and so on.
    """

    what: str
    timings: Mapping[str, Spread]
    figure: str
    value: float
    target: float | None
    at_most: bool = True
    spread: tuple[float, float] | None = None
    case: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is no target."""
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
        """The target as the table shows it, and whether it is met."""
        if self.target is None:
            return ""
        return f"{'<=' if self.at_most else '>='} {self.target:.3g} {'met' if self.met else 'MISSED'}"


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark with figures in the docs has."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as JSON")
    parser.add_argument(
        "--figures", type=Path, metavar="FILE", help="put the results into FILE, from which docs take them"
    )


def report(title: str, rows: Sequence[Row], path: Path | None) -> None:
    """Print the rows as a table, and write them as JSON if a path is given."""
    table = Table(title=title, caption=machine(), show_lines=True)
    table.add_column("what", overflow="fold", max_width=32)
    for column in ("median (quartiles)", "figure and target"):
        table.add_column(column, overflow="fold")
    for what, (first, *others) in _by_what(rows):
        sides = "\n".join(f"{name}: {timing}" for name, timing in first.timings.items())
        figures = Table.grid("", "", padding=(0, 2))
        for row in (first, *others):
            figures.add_row(row.shown_figure, row.shown_target)
        table.add_row(what, sides, figures)
    Console(width=140).print(table)
    if path is not None:
        written = [
            {**asdict(row), "value": None if math.isnan(row.value) else row.value, "met": row.met}
            for row in rows
        ]
        path.write_text(json.dumps({"machine": machine(), "rows": written}, indent=2) + "\n")


def save_figures(path: Path | None, name: str, rows: Sequence[Row], **more: Any) -> None:
    """Put the rows under the benchmark's name into a file of figures, if a path is given."""
    if path is None:
        return
    results = [
        {
            "what": what,
            "case": dict(alike[0].case),
            "spreads": {side: _spread_json(spread) for side, spread in alike[0].timings.items()},
            "figures": {row.figure: _figure_json(row) for row in alike},
        }
        for what, alike in _by_what(rows)
    ]
    entry = {"command": _command(), "machine": processor(), **versions(), "results": results, **more}
    merge(path, name, entry)


def _by_what(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for what, alike in itertools.groupby(rows, key=lambda row: row.what):
        yield what, list(alike)


def _spread_json(spread: Spread) -> dict[str, float | str]:
    return {**{name: _rounded(value) for name, value in asdict(spread).items()}, "unit": spread.unit}


def _figure_json(row: Row) -> dict[str, Any]:
    return {
        "value": None if math.isnan(row.value) else _rounded(row.value),
        "quartiles": None if row.spread is None else [_rounded(each) for each in row.spread],
        "target": row.target,
        "at_most": row.at_most,
        "met": row.met,
    }


def _rounded(value: float) -> float:
    """Four digits: more would only make the file longer."""
    return float(f"{value:.4g}")


def _command() -> str:
    """The command line, without the options that only say where results are written."""
    kept, skip = [], False
    for argument in sys.argv[1:]:
        is_output = argument.partition("=")[0] in OUTPUT_OPTIONS
        if not is_output and not skip:
            kept.append(argument)
        skip = is_output and "=" not in argument
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *kept])
