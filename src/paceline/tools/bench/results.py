"""What was measured, as lines: for a table, and for JSON."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import paceline
from paceline.tools.bench.collectives import Case, Seconds, shown_size
from paceline.tools.bench.measure import Timing, processor, ratio, timing
from paceline.tools.bench.sides import ALONE, Side
from paceline.tools.bench.steps import Measured
from paceline.tools.formatting import milliseconds

TORCH, PACELINE = Side("torch"), Side("paceline")


@dataclass(frozen=True)
class Line:
    """One side: seconds, what it adds to the module's own, and how often its time goes into torch's."""

    side: str
    seconds: Timing
    adds: Timing | None = None
    times_as_fast: float | None = None
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class Block:
    """What sides were compared in, how often they were timed, what is to be said of it, and what in doubt."""

    kind: str
    what: str
    lines: Sequence[Line]
    rounds: int
    calls: int
    about: str = ""
    notes: Sequence[str] = ()
    doubts: Sequence[str] = ()


def of_steps(measured: Measured) -> Block:
    """Training steps of a model."""
    of = measured.seconds.of
    torch_seconds = of[str(TORCH)]
    lines = [Line(str(ALONE), timing(of[str(ALONE)]))]
    for side in (name for name in of if name != str(ALONE)):
        value, spread = ratio(torch_seconds, of[side])
        adds = timing([ours - alone for ours, alone in zip(of[side], of[str(ALONE)], strict=True)])
        lines.append(Line(side, timing(of[side]), adds, value, None if side == str(TORCH) else spread))
    pace = measured.pace
    about = f"{measured.elements:,} parameters in {measured.tensors:,} tensor{'s' * (measured.tensors > 1)}"
    doubts = [] if measured.wrong is None else [measured.wrong]
    return Block("step", measured.what, lines, pace.rounds, pace.calls, about, _notes(measured), doubts)


def _notes(measured: Measured) -> list[str]:
    notes = [_what_is_added(measured)]
    if measured.unused:
        count = f"{len(measured.unused)} of {measured.tensors}"
        notes.append(
            f"torch runs with find_unused_parameters=True, without which it would raise: {count} parameters "
            f"got no gradient in some step (first: {measured.unused[0]})"
        )
    return notes


def _what_is_added(measured: Measured) -> str:
    ours, theirs = (measured.seconds.added(side) for side in (PACELINE, TORCH))
    if (base := timing(theirs)).low <= 0:
        return "what synchronisation adds cannot be told from noise"
    torch_words = f"synchronisation adds {milliseconds(base.median * 1e3)} under torch"
    if (own := timing(ours)).low <= 0:
        return f"{torch_words}, and under paceline what cannot be told from noise"
    share = "{:.2f} ({:.2f}..{:.2f})".format(
        *(each / base.median for each in (own.median, own.low, own.high))
    )
    return f"{torch_words} and {milliseconds(own.median * 1e3)} under paceline: {share} of it"


def of_collective(case: Case, seconds: Seconds, *, calls: int) -> Block:
    """Calls of a collective."""
    lines = []
    for side, values in seconds.items():
        value, spread = ratio(seconds["gloo"], values)
        lines.append(
            Line(
                side,
                timing(values),
                times_as_fast=None if side == "floor" else value,
                spread=spread if side not in ("gloo", "floor") else None,
            )
        )
    return Block(case.collective, shown_size(case.size), lines, len(seconds["gloo"]), calls)


def as_json(blocks: Sequence[Block], options: Mapping[str, object], doubts: Sequence[str]) -> dict[str, Any]:
    """All of it, with the machine, and what it ran with."""
    versions = {
        "paceline": paceline.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    rows = [
        {"kind": block.kind, "what": block.what, **asdict(line), "rounds": block.rounds, "calls": block.calls}
        for block in blocks
        for line in block.lines
    ]
    notes = [{"what": block.what, "note": note} for block in blocks for note in block.notes]
    doubted = [{"what": block.what, "doubt": doubt} for block in blocks for doubt in block.doubts]
    return {
        "machine": processor(),
        "system": platform.platform(),
        "versions": versions,
        "options": dict(options),
        "rows": rows,
        "notes": notes,
        "doubts": doubted + [{"what": None, "doubt": doubt} for doubt in doubts],
    }
