"""Faults planted in a training: who is told, how soon, whether rank and line are named, and how it ends.

python benchmarks/faults.py [--faults NAME ...] [--worlds N ...] [--transports NAME ...] [--wrappers NAME ...]
                            [--said FOLDER] [--figures FILE]

Each run starts ranks as real processes of one training script (fault_script.py), plants one fault in one rank
(fault_list.py), and reads what every rank writes to stderr, with the time (fault_run.py). A rank is told when
it writes a line that names the culprit, and no other rank, with a word that says what is wrong
(fault_judge.py). 30 s after the fault all processes are killed. Runs take turns, one at a time. The transport
"hosts" needs root, to make network namespaces; torch's wrapper runs on gloo only. ``--figures`` keeps the
results of the runs that are not repeated.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fault_judge import Observed, Verdict, is_sound, judge
from fault_list import FAULTS, PAUSE_SECONDS
from fault_run import DEADLINE_SECONDS, GROUP_TIMEOUT_SECONDS, Cell, NotReachedError, Run, run_cell
from fault_tables import outcome
from figures import load, merge

from paceline.testing.hosts import why_not
from paceline.tools.bench.measure import processor, versions

WORLDS = (2, 3, 4)
TRANSPORTS = ("shm", "gloo", "hosts")
WRAPPERS = ("paceline", "torch", "torch-barrier")
# To start a rank, and to let it end, on two cores.
RANK_SECONDS = 2.0


def cells(
    faults: Sequence[str], worlds: Sequence[int], transports: Sequence[str], wrappers: Sequence[str]
) -> list[Cell]:
    """The runs that make sense: torch's wrapper on gloo, some faults with two hosts only."""
    return [
        Cell(fault, wrapper, transport, world)
        for wrapper in wrappers
        for transport in transports
        for fault in faults
        for world in worlds
        if (wrapper == "paceline" or transport == "gloo")
        and (transport == "hosts" or not FAULTS[fault].hosts_only)
    ]


def expected_seconds(cell: Cell) -> float:
    """How long a run takes if all ranks are told and end, or go on."""
    fault = FAULTS[cell.fault]
    struck = GROUP_TIMEOUT_SECONDS if fault.held else PAUSE_SECONDS if fault.goes_on else 2.0
    return RANK_SECONDS * (1 + cell.world) + struck


def estimate(planned: Sequence[Cell]) -> str:
    """The runs, the time that they need, and how much it can be."""
    least = sum(map(expected_seconds, planned))
    most = sum(RANK_SECONDS * (1 + cell.world) + DEADLINE_SECONDS for cell in planned)
    return f"{len(planned)} runs: about {math.ceil(least / 60)} minutes, at most {math.ceil(most / 60)}"


def figures_of(cell: Cell, seen: Observed, verdict: Verdict) -> dict[str, Any]:
    """What the docs need of a run."""
    told = None if verdict.told is None else round(verdict.told, 3)
    sound = is_sound(verdict, must_go_on=FAULTS[cell.fault].goes_on)
    return {**asdict(cell), **asdict(verdict), "told": told, "where": seen.where, "sound": sound}


def save(path: Path | None, found: Sequence[dict[str, Any]]) -> None:
    """Put results into a file of figures; those of other runs stay there."""
    if path is None:
        return
    new = {_key(each) for each in found}
    kept = [each for each in load(path).get("faults", {}).get("cells", ()) if _key(each) not in new]
    entry = {
        "command": "python benchmarks/faults.py",
        "machine": processor(),
        **versions(),
        "deadline": DEADLINE_SECONDS,
        "faults": {name: fault.what for name, fault in FAULTS.items()},
        "cells": sorted([*kept, *found], key=_key),
    }
    merge(path, "faults", entry)


def _key(figures: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(figures[name] for name in ("wrapper", "transport", "fault", "world"))


def keep_said(folder: Path | None, run: Run) -> None:
    """Write down what the ranks of a run have said."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    cell = run.cell
    path = folder / f"{cell.wrapper}-{cell.transport}-{cell.fault}-{cell.world}.txt"
    began = run.began or 0.0
    said = (f"{line.seconds - began:8.2f} s, rank {line.rank}: {line.text}\n" for line in run.lines)
    path.write_text(f"{cell}, culprit: {cell.culprit}, step: {cell.step}\n{''.join(said)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plant faults in a training, and see who is told.")
    parser.add_argument("--faults", nargs="+", choices=(*FAULTS, "all"), default=["all"], metavar="NAME")
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS, metavar="N")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--wrappers", nargs="+", choices=WRAPPERS, default=WRAPPERS)
    parser.add_argument("--said", type=Path, metavar="FOLDER", help="keep what the ranks of each run say")
    parser.add_argument(
        "--figures", type=Path, metavar="FILE", help="put the results into FILE, from which docs take them"
    )
    arguments = parser.parse_args()
    if "all" in arguments.faults:
        arguments.faults = [*FAULTS]
    if "hosts" in arguments.transports and (reason := why_not()) is not None:
        parser.error(f"no hosts can be made: {reason}; run as root, or with --transports shm gloo")
    return arguments


def run_and_judge(cell: Cell, said: Path | None) -> dict[str, Any]:
    """The figures of one run."""
    run = run_cell(cell)
    keep_said(said, run)
    seen = run.observed()
    return figures_of(cell, seen, judge(seen))


def main() -> None:
    arguments = parse()
    planned = cells(arguments.faults, arguments.worlds, arguments.transports, arguments.wrappers)
    print(estimate(planned), file=sys.stderr)
    failed = False
    for number, cell in enumerate(planned, 1):
        what = f"{number}/{len(planned)} {cell.wrapper}, {cell.transport}, {cell.world} ranks"
        try:
            figures = run_and_judge(cell, arguments.said)
        except NotReachedError as error:
            failed = True
            print(f"{what}: {error}", file=sys.stderr)
            continue
        save(arguments.figures, [figures])
        print(f"{what}: {FAULTS[cell.fault].what}: {outcome(figures, deadline=DEADLINE_SECONDS)}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
