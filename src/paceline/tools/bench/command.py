"""``paceline bench``: torch against paceline on the user's machine, and on the user's model."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from paceline.errors import BenchError, OptionError, RankDiedError, RanksError
from paceline.testing import RankPool
from paceline.tools.bench import drawing, results, svg
from paceline.tools.bench.collectives import KB, MB, SIDES, Case, Seconds, can_share, time_case
from paceline.tools.bench.measure import machine
from paceline.tools.bench.models import MODELS
from paceline.tools.bench.own import Own
from paceline.tools.bench.sides import Side
from paceline.tools.bench.steps import Budget, Measured, time_steps
from paceline.tools.bench.table import show_collectives, show_steps
from paceline.tools.bench.training import Subject
from paceline.tools.run import agent
from paceline.tools.run.failures import means_lost_rank

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
STEP_SIDES = (Side("torch"), Side("torch", "backend"), Side("paceline"))
NAMES = ("tiny-layers", "transformer", "conv", "mlp")
QUICK_NAMES = ("tiny-layers", "conv")
SIZES = (4 * KB, 64 * KB, MB, 25 * MB)
QUICK_SIZES = (4 * KB, MB)
ROUNDS, QUICK_ROUNDS, QUICK_CALLS = 10, 3, 2
# Load a core from which on a machine is busy; what an earlier run of ours has left is less.
BUSY = 1.25
# For each model.
BUDGET, QUICK_BUDGET = Budget(20.0), Budget(0.5)
MEMORY = "memory may have run out: each rank holds a copy of the model for each side"


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    ranks: int
    own: Own | None
    quick: bool
    timeout: float

    @property
    def threads(self) -> int:
        """How many each rank has: as under ``paceline run``."""
        return int(agent.rank_environment(self.ranks)["OMP_NUM_THREADS"])

    def as_json(self) -> dict[str, Any]:
        """All of them, also what follows from them."""
        model = None if self.own is None else self.own.what
        return {
            "ranks": self.ranks,
            "threads": self.threads,
            "model": model,
            "quick": self.quick,
            "timeout": self.timeout,
        }


@dataclass
class Found:
    """What was measured so far."""

    steps: list[Measured] = field(default_factory=list)
    collectives: dict[Case, Seconds] = field(default_factory=dict)
    blocks: list[results.Block] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def _own(_: click.Context, __: click.Parameter, text: str | None) -> Own | None:
    try:
        return None if text is None else Own.parse(text)
    except OptionError as error:
        raise click.BadParameter(str(error)) from error


def _writable(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Found out before minutes are spent on what is to be written."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"there is no such folder (folder: {path.parent}, here: {Path.cwd()})")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"it cannot be written (file: {path}, here: {Path.cwd()})")
    return path


def _drawable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix != ".svg":
        raise click.BadParameter(f"a plot is an SVG file: its name ends in .svg (given: {path})")
    return _writable(context, parameter, path)


_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "-n", "--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Ranks on this host."
)
@click.option(
    "--model", "own", metavar="MODULE:FN", callback=_own, help="Measure a model of your own: see above."
)
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: to see that all works.")
@click.option("--plot", type=_FILE, callback=_drawable, help="Draw what was measured, as SVG.")
@click.option("--json", "written", type=_FILE, callback=_writable, help="Write the figures down, as JSON.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that a model, or a size, may take before its ranks are ended.",
)
def bench(
    *, ranks: int, own: Own | None, quick: bool, plot: Path | None, written: Path | None, timeout: float
) -> None:
    """Measure torch against paceline on this machine.

    All-reduces of a few sizes, and training steps of a few models: under torch's DistributedDataParallel on
    gloo, under torch's on the backend paceline, and under paceline's, turn by turn in one run. Takes two
    minutes or so on two cores. Each figure is a median, with the quartiles behind it.

    With --model, training steps of your own model instead. MODULE:FN is a function in a module that can be
    imported from here, or in a file (path/to/file.py:FN). It is called without arguments on each rank, once
    for each side, and returns (module, inputs) or (module, inputs, loss). Inputs are a tensor, a tuple of
    positional arguments or a dict of keyword arguments. The loss is a function of the output; without one it
    is the output if that is one number, its .loss or ["loss"], or else the mean square of the tensors in it.

    Gradients of all sides are compared, and the table says so if they differ. Exit codes: 0 measured,
    1 failed, 2 wrong usage.
    """
    options, found = Options(ranks, own, quick, timeout), Found(doubts=_crowd())
    console = Console(highlight=False)
    try:
        for number, blocks in enumerate(_measured(options, found)):
            if number == 0:
                console.print(_head(options))
            _show(blocks, console)
    except RanksError as error:
        _fail(error)
    except KeyboardInterrupt:
        _say("ended by SIGINT")
        sys.exit(EXIT_INTERRUPTED)
    for doubt in found.doubts:
        console.print(doubt, style="bold yellow", markup=False)
    try:
        _write(options, found, plot, written)
    except OSError as error:
        raise click.ClickException(str(error)) from error


def _crowd() -> list[str]:
    """Word of others who use the cores, before we do."""
    load, cores = os.getloadavg()[0], agent.available_cores()
    if load <= BUSY * cores:
        return []
    return [
        f"other programs kept this machine busy: the figures are rough (load: {load:.1f}, cores: {cores})"
    ]


def _measured(options: Options, found: Found) -> Iterator[Sequence[results.Block]]:
    """What belongs together, as soon as it is measured."""
    if options.own is not None:
        yield [_steps(options.own, options, found)]
        return
    yield list(_all_reduces(options, found))
    for name in QUICK_NAMES if options.quick else NAMES:
        try:
            yield [_steps(MODELS[name], options, found)]
        except RanksError as error:
            if not isinstance(lacks := _cause(error), BenchError):
                raise
            found.doubts.append(f"{MODELS[name].what} was left out: {lacks}")


def _all_reduces(options: Options, found: Found) -> Iterator[results.Block]:
    with RankPool(options.ranks, timeout=options.timeout) as pool:
        sides = SIDES if all(pool.run(can_share)) else [side for side in SIDES if side != "shared"]
        for size in QUICK_SIZES if options.quick else SIZES:
            case = Case("all_reduce", options.ranks, size)
            _say(f"timing {case}")
            rounds, calls = (QUICK_ROUNDS, QUICK_CALLS) if options.quick else (ROUNDS, case.calls)
            found.collectives[case] = time_case(pool, case, sides, rounds=rounds, calls=calls)
            found.blocks.append(results.of_collective(case, found.collectives[case], calls=calls))
            yield found.blocks[-1]


def _steps(subject: Subject, options: Options, found: Found) -> results.Block:
    _say(f"timing steps of {subject.what}")
    measured = time_steps(
        subject,
        STEP_SIDES,
        QUICK_BUDGET if options.quick else BUDGET,
        world=options.ranks,
        threads=options.threads,
        timeout=options.timeout,
    )
    found.steps.append(measured)
    found.blocks.append(results.of_steps(measured))
    return found.blocks[-1]


def _head(options: Options) -> str:
    threads = "1 thread" if options.threads == 1 else f"{options.threads} threads"
    ranks = f"{options.ranks} ranks of {threads} each"
    return f"{machine()}\n{ranks}; medians (quartiles); times as fast as torch on gloo\n"


def _show(blocks: Sequence[results.Block], console: Console) -> None:
    if blocks[0].kind == "step":
        for block in blocks:
            show_steps(block, console)
    else:
        show_collectives(blocks, console)


def _write(options: Options, found: Found, plot: Path | None, written: Path | None) -> None:
    if written is not None:
        told = results.as_json(found.blocks, options.as_json(), found.doubts)
        written.write_text(json.dumps(told, indent=2) + "\n")
        _say(f"figures: {written}")
    if plot is not None:
        svg.write(plot, _sections(found), title="torch and paceline", note=_note(options))
        _say(f"plot: {plot}")


def _note(options: Options) -> str:
    return f"medians, thin lines: quartiles; {options.ranks} ranks; {machine()}"


def _sections(found: Found) -> Sequence[svg.Section]:
    drawn = [drawing.of_steps(found.steps)] if found.steps else []
    return [*drawn, *([drawing.of_collectives(found.collectives, columns=1)] if found.collectives else [])]


def _fail(error: RanksError) -> NoReturn:
    """Tell what went wrong, once, and exit."""
    cause = _cause(error)
    if isinstance(cause, OptionError | BenchError):
        _say(str(cause))
        sys.exit(EXIT_USAGE if isinstance(cause, OptionError) else EXIT_FAILED)
    # A note has what a rank raised, with its traceback.
    notes = getattr(cause, "__notes__", [])
    _say("\n".join(notes) if notes else str(cause))
    if isinstance(cause, TimeoutError) and not notes:
        _say("--timeout gives it longer")
    if isinstance(cause, RankDiedError) and "SIGKILL" in str(cause):
        _say(MEMORY)
    sys.exit(EXIT_FAILED)


def _cause(error: RanksError) -> Exception:
    """The first of the ranks' failures that is not about the loss of another rank, if there is any."""
    return min(error.exceptions, key=_is_consequence)


def _is_consequence(error: Exception) -> bool:
    types = [f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__]
    return means_lost_rank(types, str(error))


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
