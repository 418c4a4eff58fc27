"""What was measured, in a terminal or a file: tables of at most 80 columns."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.tools.bench.measure import Timing
from paceline.tools.bench.results import Block, Line

UNITS = (("us", 1e6), ("ms", 1e3), ("s", 1.0))
LEGEND = (
    "gloo: torch.distributed on gloo; backend: torch.distributed on the backend paceline; shared: paceline's "
    "own, of the memory in which DistributedDataParallel keeps gradients; floor: copying as many bytes"
)


def show_steps(block: Block, console: Console) -> None:
    """A model's steps: a line a side, and what is to be said of them."""
    unit, scale = _unit([line.seconds.median for line in block.lines])
    table = _table(
        f"step of {block.what}: {block.about}", ("side", f"step, {unit}", f"adds, {unit}", "times as fast")
    )
    for line in block.lines:
        adds = "" if line.adds is None else _figures(line.adds, scale)
        table.add_row(escape(line.side), _figures(line.seconds, scale), adds, _times(line))
    console.print(table)
    for note in block.notes:
        console.print(escape(note))
    for doubt in block.doubts:
        console.print(escape(doubt), style="bold yellow")
    console.print()


def show_collectives(blocks: Sequence[Block], console: Console) -> None:
    """A collective by size: a line a side."""
    table = _table("all-reduce of float32", ("size", "through", "time of a call", "times as fast"))
    for block in blocks:
        for number, line in enumerate(block.lines):
            unit, scale = _unit([line.seconds.median])
            time = f"{_figures(line.seconds, scale)} {unit}"
            table.add_row("" if number else block.what, escape(line.side), time, _times(line))
        table.add_section()
    console.print(table)
    console.print(f"{LEGEND}\n", style="dim")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=escape(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table


def _unit(seconds: Sequence[float]) -> tuple[str, float]:
    """In which the longest has at most three digits before the point."""
    return next(((unit, scale) for unit, scale in UNITS if max(seconds) * scale < 1000), UNITS[-1])


def _figures(timing: Timing, scale: float) -> str:
    """The median and the quartiles, in as many digits as the larger of them needs."""
    values = [each * scale for each in (timing.median, timing.low, timing.high)]
    largest = max(map(abs, values))
    digits = 0 if largest >= 100 else 1 if largest >= 10 else 2
    median, low, high = (f"{value:z.{digits}f}" for value in values)
    return f"{median} ({low}..{high})"


def _times(line: Line) -> str:
    if line.times_as_fast is None:
        return ""
    if line.spread is None:
        return f"{line.times_as_fast:.0f}"
    return _figures(Timing(line.times_as_fast, *line.spread), 1.0)
