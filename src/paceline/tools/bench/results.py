"""What was measured, as rows; shown as tables of at most 80 columns, or written as JSON."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import paceline
from paceline.tools.bench.collective_times import CollectiveCase, SecondsBySide, format_size
from paceline.tools.bench.measure import (
    Size,
    Timing,
    format_seconds,
    processor,
    ratio,
    time_unit,
    timing,
    versions,
    with_quartiles,
)
from paceline.tools.bench.models import ADAMW
from paceline.tools.bench.optimizer_choice import OptimizerChoice, choose_optimizer
from paceline.tools.bench.sides import ALONE, PLAIN, STEP_SIDES, TORCH, Side
from paceline.tools.bench.step_times import StepResult
from paceline.tools.formatting import plural

OPTIMIZER_KIND = "adamw_step"
LEGEND = (
    "gloo: torch.distributed on gloo; backend: torch.distributed on the backend paceline; shared: paceline's "
    "own, in the memory in which DistributedDataParallel keeps gradients; memcpy: copying as many bytes"
)


@dataclass(frozen=True)
class ResultRow:
    """One side: its seconds, what it adds to the module's own, how many times as fast as torch it is.

    ``memory`` is that of all ranks together.
    """

    side: str
    seconds: Timing
    adds: Timing | None = None
    times_as_fast: float | None = None
    spread: tuple[float, float] | None = None
    memory: Size | None = None


@dataclass(frozen=True)
class ResultGroup:
    """The sides of one comparison: a model's step, with SGD or with AdamW, or a collective of one size."""

    kind: str
    what: str
    rows: Sequence[ResultRow]
    rounds: int
    calls: int
    about: str = ""
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    choice: OptimizerChoice | None = None


def step_results(result: StepResult) -> ResultGroup:
    """Training steps of a model."""
    of = result.times.of
    rows = [ResultRow(str(ALONE), timing(of[str(ALONE)]))]
    for side in (name for name in of if name != str(ALONE)):
        value, spread = ratio(of[str(TORCH)], of[side])
        adds = timing(result.times.added(STEP_SIDES[side]))
        rows.append(ResultRow(side, timing(of[side]), adds, value, None if side == str(TORCH) else spread))
    return ResultGroup(
        kind="step",
        what=result.what,
        rows=rows,
        rounds=result.repeats.rounds,
        calls=result.repeats.calls,
        about=f"{plural(result.elements, 'parameter')} in {plural(result.tensors, 'tensor')}",
        notes=_notes(result),
        warnings=[] if result.warning is None else [result.warning],
    )


def optimizer_results(result: StepResult, memory: Mapping[Side, Size]) -> ResultGroup:
    """Training steps of a model with AdamW, and the memory of the sides that did not refuse it."""
    seconds = {side: timing(result.times.of[str(side)]) for side in memory}
    choice = choose_optimizer(
        {side: each.median for side, each in seconds.items()},
        {side: each.median for side, each in memory.items()},
    )
    return ResultGroup(
        kind=OPTIMIZER_KIND,
        what=result.what,
        rows=[
            ResultRow(str(ALONE), timing(result.times.of[str(ALONE)])),
            *(ResultRow(str(side), seconds[side], memory=memory[side]) for side in memory),
        ],
        rounds=result.repeats.rounds,
        calls=result.repeats.calls,
        notes=[f"{side} was left out: {words.splitlines()[0]}" for side, words in result.refused.items()],
        warnings=[] if result.warning is None else [result.warning],
        choice=choice,
    )


def _notes(result: StepResult) -> list[str]:
    notes = [_added_note(result)]
    if result.unused:
        count = f"{len(result.unused)} of {result.tensors}"
        notes.append(
            f"torch runs with find_unused_parameters=True, without which it would raise: {count} parameters "
            f"got no gradient in some step (first: {result.unused[0]})"
        )
    return notes


def _added_note(result: StepResult) -> str:
    ours, theirs = (timing(result.times.added(side)) for side in (PLAIN, TORCH))
    if theirs.low <= 0:
        return "what synchronisation adds is smaller than the noise"
    by_torch = f"synchronisation adds {format_seconds(theirs.median)} under torch"
    if ours.low <= 0:
        return f"{by_torch}; what it adds under paceline is smaller than the noise"
    share = with_quartiles(ours, factor=1 / theirs.median, to="..")
    return f"{by_torch} and {format_seconds(ours.median)} under paceline: {share} of it"


def collective_results(case: CollectiveCase, seconds: SecondsBySide, *, calls: int) -> ResultGroup:
    """Calls of a collective."""
    rows = []
    for side, values in seconds.items():
        value, spread = ratio(seconds["gloo"], values)
        rows.append(
            ResultRow(
                side,
                timing(values),
                times_as_fast=None if side == "memcpy" else value,
                spread=spread if side not in ("gloo", "memcpy") else None,
            )
        )
    return ResultGroup(case.collective, format_size(case.size), rows, len(seconds["gloo"]), calls)


def as_json(
    groups: Sequence[ResultGroup], options: Mapping[str, object], warnings: Sequence[str]
) -> dict[str, Any]:
    """All results, with the machine, the versions and the options."""
    rows = [
        {"kind": group.kind, "what": group.what, **asdict(row), "rounds": group.rounds, "calls": group.calls}
        for group in groups
        for row in group.rows
    ]
    of_groups = [{"what": group.what, "warning": text} for group in groups for text in group.warnings]
    return {
        "machine": processor(),
        "system": platform.platform(),
        "versions": {"paceline": paceline.__version__, **versions()},
        "options": dict(options),
        "rows": rows,
        "notes": [{"what": group.what, "note": text} for group in groups for text in group.notes],
        "warnings": of_groups + [{"what": None, "warning": text} for text in warnings],
        "choices": [
            {"what": group.what, "side": str(group.choice.side), "why": group.choice.why}
            for group in groups
            if group.choice is not None
        ],
    }


def show_steps(group: ResultGroup, console: Console) -> None:
    """A table of a model's steps, one row per side, with its notes and warnings."""
    unit, factor = time_unit(max(row.seconds.median for row in group.rows))
    table = _table(
        f"step of {group.what}: {group.about}", ("side", f"step, {unit}", f"adds, {unit}", "times as fast")
    )
    for row in group.rows:
        adds = "" if row.adds is None else with_quartiles(row.adds, factor=factor, to="..")
        step = with_quartiles(row.seconds, factor=factor, to="..")
        table.add_row(escape(row.side), step, adds, _times_as_fast(row))
    console.print(table)
    _show_notes(group, console)


def show_optimizers(group: ResultGroup, console: Console) -> None:
    """A table of a model's steps with AdamW, one row per side, and which side to take."""
    unit, factor = time_unit(max(row.seconds.median for row in group.rows))
    title = f"step of {group.what} with {ADAMW}, and memory of all ranks together"
    table = _table(title, ("side", f"step, {unit}", "memory, MB"))
    for row in group.rows:
        held = "" if row.memory is None else with_quartiles(row.memory, factor=1e-6, to="..")
        table.add_row(escape(row.side), with_quartiles(row.seconds, factor=factor, to=".."), held)
    console.print(table)
    if group.choice is not None:
        console.print(escape(str(group.choice)), style="bold")
    _show_notes(group, console)


def _show_notes(group: ResultGroup, console: Console) -> None:
    for note in group.notes:
        console.print(escape(note))
    for warning in group.warnings:
        console.print(escape(warning), style="bold yellow")
    console.print()


def show_collectives(groups: Sequence[ResultGroup], console: Console) -> None:
    """A table of a collective by size, one row per side."""
    table = _table("all-reduce of float32", ("size", "through", "time per call", "times as fast"))
    for group in groups:
        for number, row in enumerate(group.rows):
            unit, factor = time_unit(row.seconds.median)
            time = f"{with_quartiles(row.seconds, factor=factor, to='..')} {unit}"
            table.add_row("" if number else group.what, escape(row.side), time, _times_as_fast(row))
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


def _times_as_fast(row: ResultRow) -> str:
    if row.times_as_fast is None:
        return ""
    if row.spread is None:
        return f"{row.times_as_fast:.0f}"
    return with_quartiles(Timing(row.times_as_fast, *row.spread), to="..")
