"""``paceline bench``: torch and paceline on the user's machine, with our models or the user's own."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from paceline.errors import BenchError, MissingPackageError, OptionError, RankDiedError, RanksError
from paceline.testing import RankPool
from paceline.tools.bench import results
from paceline.tools.bench.collective_times import (
    COLLECTIVE_SIDES,
    KB,
    MB,
    CollectiveCase,
    SecondsBySide,
    ranks_share_memory,
    time_case,
)
from paceline.tools.bench.held_memory import MemoryCase, held_memory
from paceline.tools.bench.measure import Size, machine, size
from paceline.tools.bench.models import ADAMW, MODELS, SGD, BenchModel, OptimizerKind
from paceline.tools.bench.plots import check_plot_file, save_plot
from paceline.tools.bench.sides import HOST, PLAIN, SHARDED, TORCH, Side
from paceline.tools.bench.step_times import StepResult, TimeBudget, time_steps
from paceline.tools.bench.user_model import UserModel
from paceline.tools.formatting import plural
from paceline.tools.run import agent
from paceline.tools.run.failures import means_lost_rank

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
COMPARED_SIDES = (TORCH, Side("torch", "backend"), PLAIN)
# With AdamW, of the user's model.
CHOICE_SIDES = (PLAIN, SHARDED, HOST)
MEMORY_RUNS, QUICK_MEMORY_RUNS = 3, 2
NAMES = ("tiny-layers", "transformer", "conv", "mlp")
QUICK_NAMES = ("tiny-layers", "conv")
SIZES = (4 * KB, 64 * KB, MB, 25 * MB)
QUICK_SIZES = (4 * KB, MB)
ROUNDS, QUICK_ROUNDS, QUICK_CALLS = 10, 3, 2
# A machine is busy if its load per core is higher than this; an earlier run of this command leaves less.
BUSY_LOAD = 1.25
# For each model.
BUDGET, QUICK_BUDGET = TimeBudget(20.0), TimeBudget(0.5)
MEMORY_HINT = "memory may have run out: each rank holds a copy of the model for each side"


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command that change what is measured."""

    ranks: int
    model: UserModel | None
    quick: bool
    timeout: float

    @property
    def threads(self) -> int:
        """How many threads each rank has: as many as under ``paceline run``."""
        return int(agent.rank_environment(self.ranks)["OMP_NUM_THREADS"])

    def as_json(self) -> dict[str, Any]:
        """All options, and the number of threads that follows from them."""
        model = None if self.model is None else self.model.what
        return {
            "ranks": self.ranks,
            "threads": self.threads,
            "model": model,
            "quick": self.quick,
            "timeout": self.timeout,
        }


@dataclass
class Measurements:
    """What was measured so far."""

    steps: list[StepResult] = field(default_factory=list)
    collectives: dict[CollectiveCase, SecondsBySide] = field(default_factory=dict)
    groups: list[results.ResultGroup] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def _user_model(_: click.Context, __: click.Parameter, text: str | None) -> UserModel | None:
    try:
        return None if text is None else UserModel.parse(text)
    except OptionError as error:
        raise click.BadParameter(str(error)) from error


def _writable(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Check the path before minutes are spent on measuring."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(
            f"there is no such folder (folder: {path.parent}, current folder: {Path.cwd()})"
        )
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"it cannot be written (file: {path}, current folder: {Path.cwd()})")
    return path


def _plot_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    try:
        if path is not None:
            check_plot_file(path)
    except OptionError as error:
        raise click.BadParameter(str(error)) from error
    except MissingPackageError as error:
        raise click.ClickException(str(error)) from error
    return _writable(context, parameter, path)


_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option(
    "-n", "--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Ranks on this host."
)
@click.option("--model", metavar="MODULE:FN", callback=_user_model, help="Measure your own model: see above.")
@click.option("--quick", is_flag=True, help="Take seconds instead of minutes, to see that everything works.")
@click.option(
    "--plot",
    type=_FILE,
    callback=_plot_file,
    help="Plot the results: .svg, .png or another format of matplotlib, which is needed for it.",
)
@click.option("--json", "written", type=_FILE, callback=_writable, help="Write the results as JSON.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that one model, or one size, may take before its ranks are stopped.",
)
def bench(
    *,
    ranks: int,
    model: UserModel | None,
    quick: bool,
    plot: Path | None,
    written: Path | None,
    timeout: float,
) -> None:
    """Measure torch and paceline on this machine.

    Measures all-reduces of a few sizes, and training steps of a few models: under torch's
    DistributedDataParallel on gloo, under torch's on the backend paceline, and under paceline's, which take
    turns in one run. Takes about two minutes on two cores. Each figure is a median with its quartiles.

    With --model, measures training steps of your own model instead. MODULE:FN is a function in a module that
    can be imported from here, or in a file (path/to/file.py:FN). It is called without arguments on each rank,
    once for each side, and returns (module, inputs) or (module, inputs, loss). Inputs are a tensor, a tuple
    of positional arguments or a dict of keyword arguments. The loss is a function of the output; without one
    it is the output if that is one number, its .loss or ["loss"], or else the mean square of its tensors.

    After these steps, which have SGD, steps of your model with AdamW are measured under paceline: with a
    plain optimizer, a ShardedOptimizer and a HostOptimizer, with the memory of all ranks together. The last
    line says which to take: the fastest step, and of those within 5 % of it the one with the least memory.

    The gradients of all sides are compared, and the table warns if they differ. Exit codes: 0 measured,
    1 failed, 2 wrong usage.
    """
    options, measured = BenchOptions(ranks, model, quick, timeout), Measurements(warnings=_busy_warning())
    console = Console(highlight=False)
    try:
        for number, groups in enumerate(_measure(options, measured)):
            if number == 0:
                console.print(_heading(options))
            _show(groups, console)
    except RanksError as error:
        _fail(error)
    except KeyboardInterrupt:
        _say("stopped by SIGINT")
        sys.exit(EXIT_INTERRUPTED)
    for warning in measured.warnings:
        console.print(warning, style="bold yellow", markup=False)
    try:
        _write(options, measured, plot, written)
    except OSError as error:
        raise click.ClickException(str(error)) from error


def _busy_warning() -> list[str]:
    """A warning if other programs use the cores; to be called before we use them."""
    load, cores = os.getloadavg()[0], agent.available_cores()
    if load <= BUSY_LOAD * cores:
        return []
    return [f"other programs keep this machine busy: figures are inexact (load: {load:.1f}, cores: {cores})"]


def _measure(options: BenchOptions, measured: Measurements) -> Iterator[Sequence[results.ResultGroup]]:
    """Yield the groups of each table as soon as they are measured."""
    if options.model is not None:
        yield [_measure_steps(options.model, options, measured)]
        try:
            yield [_measure_optimizers(options.model, options, measured)]
        except RanksError as error:
            measured.warnings.append(f"steps with {ADAMW} were left out: {_first_line(_root_cause(error))}")
        return
    yield list(_measure_all_reduces(options, measured))
    for name in QUICK_NAMES if options.quick else NAMES:
        try:
            yield [_measure_steps(MODELS[name], options, measured)]
        except RanksError as error:
            if not isinstance(reason := _root_cause(error), BenchError):
                raise
            measured.warnings.append(f"{MODELS[name].what} was left out: {reason}")


def _measure_all_reduces(options: BenchOptions, measured: Measurements) -> Iterator[results.ResultGroup]:
    with RankPool(options.ranks, timeout=options.timeout) as pool:
        has_shared = all(pool.run(ranks_share_memory))
        sides = [side for side in COLLECTIVE_SIDES if has_shared or side != "shared"]
        for size in QUICK_SIZES if options.quick else SIZES:
            case = CollectiveCase("all_reduce", options.ranks, size)
            _say(f"timing {case}")
            rounds, calls = (QUICK_ROUNDS, QUICK_CALLS) if options.quick else (ROUNDS, case.calls)
            seconds = time_case(pool, case, sides, rounds=rounds, calls=calls)
            measured.collectives[case] = seconds
            measured.groups.append(results.collective_results(case, seconds, calls=calls))
            yield measured.groups[-1]


def _measure_steps(model: BenchModel, options: BenchOptions, measured: Measurements) -> results.ResultGroup:
    result = _time_steps(model, COMPARED_SIDES, SGD, options)
    measured.steps.append(result)
    measured.groups.append(results.step_results(result))
    return measured.groups[-1]


def _time_steps(
    model: BenchModel, sides: Sequence[Side], kind: OptimizerKind, options: BenchOptions
) -> StepResult:
    _say(f"timing steps of {model.what}{'' if kind == SGD else f' with {kind}'}")
    return time_steps(
        model,
        sides,
        QUICK_BUDGET if options.quick else BUDGET,
        world=options.ranks,
        threads=options.threads,
        timeout=options.timeout,
        kind=kind,
    )


def _measure_optimizers(
    model: BenchModel, options: BenchOptions, measured: Measurements
) -> results.ResultGroup:
    result = _time_steps(model, CHOICE_SIDES, ADAMW, options)
    taken = [side for side in CHOICE_SIDES if str(side) not in result.refused]
    memory = {side: _peak_memory(model, side, options) for side in taken}
    measured.steps.append(replace(result, what=f"{result.what} with {ADAMW}"))
    measured.groups.append(results.optimizer_results(result, memory))
    return measured.groups[-1]


def _peak_memory(model: BenchModel, side: Side, options: BenchOptions) -> Size:
    """The most that all ranks hold together after a part of a step, in several runs."""
    _say(f"memory of {model.what} under {side}")
    # The ranks of a user's model may compute other gradients, in another order.
    case = MemoryCase(model, side, ADAMW, gradients=0)
    runs = QUICK_MEMORY_RUNS if options.quick else MEMORY_RUNS
    held = [held_memory(case, world=options.ranks, timeout=options.timeout) for _ in range(runs)]
    return size([max(each.since_module) for each in held])


def _heading(options: BenchOptions) -> str:
    ranks = f"{plural(options.ranks, 'rank')} with {plural(options.threads, 'thread')} each"
    return f"{machine()}\n{ranks}; medians (quartiles); times as fast as torch on gloo\n"


def _show(groups: Sequence[results.ResultGroup], console: Console) -> None:
    match groups[0].kind:
        case "step":
            for group in groups:
                results.show_steps(group, console)
        case results.OPTIMIZER_KIND:
            for group in groups:
                results.show_optimizers(group, console)
        case _:
            results.show_collectives(groups, console)


def _write(options: BenchOptions, measured: Measurements, plot: Path | None, written: Path | None) -> None:
    if written is not None:
        content = results.as_json(measured.groups, options.as_json(), measured.warnings)
        written.write_text(json.dumps(content, indent=2) + "\n")
        _say(f"figures: {written}")
    if plot is not None:
        save_plot(
            plot,
            title="torch and paceline",
            note=f"{plural(options.ranks, 'rank')}; {machine()}",
            steps=measured.steps,
            collectives=measured.collectives,
        )
        _say(f"plot: {plot}")


def _fail(error: RanksError) -> NoReturn:
    """Print what went wrong, once, and exit."""
    cause = _root_cause(error)
    if isinstance(cause, OptionError | BenchError):
        _say(str(cause))
        sys.exit(EXIT_USAGE if isinstance(cause, OptionError) else EXIT_FAILED)
    # A note has the rank's traceback.
    notes = getattr(cause, "__notes__", [])
    _say("\n".join(notes) if notes else str(cause))
    if isinstance(cause, TimeoutError) and not notes:
        _say("--timeout gives it more time")
    if isinstance(cause, RankDiedError) and "SIGKILL" in str(cause):
        _say(MEMORY_HINT)
    sys.exit(EXIT_FAILED)


def _root_cause(error: RanksError) -> Exception:
    """The first of the ranks' errors that is not about the loss of another rank, if there is one."""
    return min(error.exceptions, key=_is_secondary)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _is_secondary(error: Exception) -> bool:
    types = [f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__]
    return means_lost_rank(types, str(error))


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
