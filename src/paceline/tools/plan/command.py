"""``paceline plan``: predicts steps on more hosts, in the terminal, as JSON and as a page."""

import json
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.errors import PacelineError
from paceline.recording.files import write_file
from paceline.tools.formatting import byte_size, milliseconds, plural, printable
from paceline.tools.plan.calibration import Calibration
from paceline.tools.plan.cluster import (
    HOOKS,
    Cluster,
    parse_count,
    parse_hooks,
    parse_hosts,
    parse_latency,
    parse_link,
)
from paceline.tools.plan.plan_page import COLUMNS, describe_choice, plan_page, row_texts
from paceline.tools.plan.prediction import HookToTake, Prediction, choose, predict
from paceline.tools.plan.recorded_steps import RecordedSteps, read_steps

_FILE = click.Path(dir_okay=False, path_type=Path)
_FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("folder", type=_FOLDER)
@click.option("--hosts", default="2,8,64,1024", show_default=True, help="Numbers of hosts.")
@click.option("--ranks-per-host", help="By default as many as on a recorded host.")
@click.option("--link", default="10Gbit", show_default=True, help="What each host can send per second.")
@click.option("--latency", default="50us", show_default=True, help="From one host to another.")
@click.option(
    "--hook", default="none,fp16,int8,power_sgd,outer", show_default=True, help=f"Of {', '.join(HOOKS)}."
)
@click.option("--cores-per-host", help="If a host's ranks share fewer cores than they are.")
@click.option("-o", "--output", type=_FILE, help="Where to write the page; by default FOLDER/plan.html.")
@click.option("--open", "opened", is_flag=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON instead of a table.")
def plan(
    folder: Path,
    *,
    hosts: str,
    ranks_per_host: str | None,
    link: str,
    latency: str,
    hook: str,
    cores_per_host: str | None,
    output: Path | None,
    opened: bool,
    as_json: bool,
) -> None:
    """Predict the steps of a recorded training on more hosts, and say which hook to take.

    FOLDER is where ranks recorded on one host: `paceline run --record FOLDER`. What hooks cost is measured on
    this machine first, which takes some seconds.
    """
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    try:
        numbers, hooks = parse_hosts(hosts), parse_hooks(hook)
        rate, delay = parse_link(link), parse_latency(latency)
        ranks = None if ranks_per_host is None else parse_count("ranks per host", ranks_per_host)
        cores = None if cores_per_host is None else parse_count("cores per host", cores_per_host)
        recorded = read_steps(folder)
        cluster = Cluster(numbers, recorded.ranks_per_host if ranks is None else ranks, rate, delay, cores)
        calibration = Calibration(recorded, cluster)
        predictions = predict(recorded, cluster, hooks, calibration)
        choices = choose(predictions)
        page = plan_page(recorded, cluster, predictions, choices)
        written, about_page = _write_page(page, output, folder)
    except (PacelineError, OSError) as error:
        raise click.ClickException(printable(str(error))) from error
    if as_json:
        measured = calibration.measured
        click.echo(json.dumps(_as_json(recorded, cluster, measured, predictions, choices), indent=2))
    else:
        _print_plan(recorded, predictions, choices, console)
    console.print(escape(printable(about_page)))
    if opened and written is not None:
        webbrowser.open(written.resolve().as_uri())


def _write_page(page: str, output: Path | None, folder: Path) -> tuple[Path | None, str]:
    """Write the page; returns where, and what to say of it. Nobody asked for it to be in the folder."""
    written = output or folder / "plan.html"
    try:
        write_file(written, page.encode("utf-8", "replace"))
    except OSError as error:
        if output is not None:
            raise
        return None, f"no page was written: {error}; take another place: --output FILE"
    return written, f"page: {written}"


def _as_json(
    recorded: RecordedSteps,
    cluster: Cluster,
    measured: Sequence[Mapping[str, object]],
    predictions: Sequence[Prediction],
    choices: Sequence[HookToTake],
) -> dict[str, object]:
    return {
        "recorded": {
            "module": recorded.module,
            "ranks": recorded.ranks,
            "hosts": recorded.hosts,
            "steps": len(recorded.steps),
            "missing_ranks": list(recorded.missing),
            "other_modules": list(recorded.other_modules),
            "paused_steps": recorded.paused_steps,
            "paused_ms": recorded.paused_seconds * 1e3,
            "step_ms": recorded.step_seconds * 1e3,
            "own_ms": recorded.own_seconds * 1e3,
            "bucket_bytes": [bucket.nbytes for bucket in recorded.buckets],
        },
        "cluster": asdict(cluster),
        "measured": measured,
        "predictions": [asdict(each) for each in predictions],
        "choices": [asdict(each) for each in choices],
    }


def _print_plan(
    recorded: RecordedSteps,
    predictions: Sequence[Prediction],
    choices: Sequence[HookToTake],
    console: Console,
) -> None:
    module = escape(printable(recorded.module))
    steps = f"{plural(len(recorded.steps), 'step')} of {milliseconds(recorded.step_seconds * 1e3)}"
    console.print(
        f"\n[bold]{module}[/bold], {byte_size(recorded.nbytes)} of gradients; recorded on "
        f"{plural(recorded.ranks, 'rank')}: {steps}"
    )
    for note in recorded.notes:
        console.print(escape(printable(note)))
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "hook" else "right", no_wrap=True)
    for each in predictions:
        table.add_row(*row_texts(each))
    console.print(table)
    for choice in choices:
        console.print(describe_choice(choice))
