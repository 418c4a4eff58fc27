"""``paceline report``: summarises a recording in the terminal, and writes the page."""

import json
import webbrowser
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.errors import PacelineError
from paceline.tools.formatting import milliseconds, rank_list
from paceline.tools.report.analysis import RunAnalysis, analyse_recording
from paceline.tools.report.html_page import html_page
from paceline.tools.report.perfetto_trace import write_trace
from paceline.tools.report.tensorboard_scalars import write_scalars
from paceline.tools.report.wrapper_runs import WrapperRun

_FILE = click.Path(dir_okay=False, path_type=Path)
_FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("folder", type=_FOLDER)
@click.option("-o", "--output", type=_FILE, help="Where to write the page; by default FOLDER/report.html.")
@click.option("--trace", type=_FILE, help="Also write a trace for Perfetto or Chrome (.json or .json.gz).")
@click.option("--tensorboard", type=_FOLDER, help="Also write scalars for TensorBoard into this folder.")
@click.option("--open", "opened", is_flag=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the analysis as JSON instead of a summary.")
def report(
    folder: Path,
    *,
    output: Path | None,
    trace: Path | None,
    tensorboard: Path | None,
    opened: bool,
    as_json: bool,
) -> None:
    """Show where the time of recorded steps went, and write a page about it.

    FOLDER is where the ranks recorded: `paceline run --record FOLDER`, or PACELINE_RECORD=FOLDER in their
    environment.
    """
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    try:
        analysed = analyse_recording(folder)
        written = output or folder / "report.html"
        written.write_text(html_page(analysed), "utf-8")
        _write_more([run for run, _ in analysed], trace, tensorboard, console)
    except (PacelineError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps([asdict(analysis) for _, analysis in analysed], indent=2))
    else:
        for _, analysis in analysed:
            _print_summary(analysis, console)
    console.print(f"page: {escape(str(written))}")
    if opened:
        webbrowser.open(written.resolve().as_uri())


def _write_more(
    runs: Sequence[WrapperRun], trace: Path | None, tensorboard: Path | None, console: Console
) -> None:
    if trace is not None:
        steps = write_trace(runs, trace)
        console.print(f"trace of the last {steps:,} steps: {escape(str(trace))}")
    if tensorboard is not None:
        write_scalars(runs, tensorboard)
        console.print(f"scalars: {escape(str(tensorboard))}")


def _print_summary(analysis: RunAnalysis, console: Console) -> None:
    ranks = rank_list(analysis.group)
    console.print(f"\n[bold]{escape(analysis.module)}[/bold] on {ranks}, {analysis.steps:,} steps")
    console.print(escape(analysis.summary))
    if analysis.missing_ranks:
        console.print(f"[yellow]no recording of {rank_list(analysis.missing_ranks)}[/yellow]")
    console.print(_parts_table(analysis))
    changes = [f"{each.change}\n    {each.evidence}" for each in analysis.suggestions]
    _print_list("suggestions", changes or ["none: no part of a step stands out"], console)


def _parts_table(analysis: RunAnalysis) -> Table:
    table = Table(box=None, padding=(0, 2), show_header=False)
    whole = sum(analysis.parts.values()) or 1.0
    for part, spent in analysis.parts.items():
        if spent:
            table.add_row(part, milliseconds(spent), f"{spent / whole:.0%}")
    overlap = "none" if analysis.overlap is None else f"{analysis.overlap:.0%}"
    communication = f"of {milliseconds(analysis.communication_ms)}"
    table.add_row("communication that overlaps with backward", overlap, communication)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _print_list(title: str, lines: Iterable[str], console: Console) -> None:
    console.print(f"{title}:")
    for line in lines:
        console.print(f"  - {escape(line)}")
