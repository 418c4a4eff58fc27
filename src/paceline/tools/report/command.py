"""``paceline report``: summarises a recording in the terminal, and writes the page."""

import contextlib
import json
import webbrowser
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.errors import PacelineError, RecordingError
from paceline.recording.files import write_file
from paceline.recording.healings import read_healings
from paceline.tools.formatting import milliseconds, percent, plain_number, plural, printable, rank_list
from paceline.tools.report.analysis import RunAnalysis, analyse_recording
from paceline.tools.report.html_page import html_page
from paceline.tools.report.last_minute import LastMinute, last_minute
from paceline.tools.report.perfetto_trace import write_trace
from paceline.tools.report.run_history import RunHistory
from paceline.tools.report.tensorboard_scalars import write_scalars
from paceline.tools.report.wrapper_runs import WrapperRun
from paceline.watch.rank_page import read_pages

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
    last = _last_minute(folder) if folder.is_dir() else None
    try:
        analysed = analyse_recording(folder)
        written = output or folder / "report.html"
        write_file(written, html_page(analysed, last).encode("utf-8"))
        _write_more([run for run, _ in analysed], trace, tensorboard, console)
    except (PacelineError, OSError) as error:
        _print_last_minute(last, console)
        raise click.ClickException(printable(str(error))) from error
    if as_json:
        click.echo(json.dumps([asdict(analysis) for _, analysis in analysed], indent=2))
    else:
        for _, analysis in analysed:
            _print_summary(analysis, console)
        _print_history(analysed[0][1].history, console)
    _print_last_minute(last, console)
    console.print(f"page: {_shown(str(written))}")
    if opened:
        webbrowser.open(written.resolve().as_uri())


def _last_minute(folder: Path) -> LastMinute | None:
    """How the run ended; without ranks that had no number any more, because they were not replaced."""
    pages = read_pages(folder)
    with contextlib.suppress(RecordingError):  # it is told when all else is read
        for healing in read_healings(folder)[-1:]:
            pages = [page for page in pages if page.rank < healing.world]
    return last_minute(pages)


def _write_more(
    runs: Sequence[WrapperRun], trace: Path | None, tensorboard: Path | None, console: Console
) -> None:
    if trace is not None:
        steps = write_trace(runs, trace)
        console.print(f"trace of the last {plural(steps, 'step')}: {_shown(str(trace))}")
    if tensorboard is not None:
        write_scalars(runs, tensorboard)
        console.print(f"scalars: {_shown(str(tensorboard))}")


def _print_summary(analysis: RunAnalysis, console: Console) -> None:
    ranks = rank_list(analysis.group)
    steps = plural(analysis.steps, "step")
    console.print(f"\n[bold]{_shown(analysis.module)}[/bold] on {ranks}, {steps}, {_rates(analysis)}")
    console.print(_shown(analysis.summary))
    if analysis.missing_ranks:
        console.print(f"[yellow]no recording of {rank_list(analysis.missing_ranks)}[/yellow]")
    console.print(_parts_table(analysis))
    if analysis.why_no_overlap:
        console.print(f"nothing hides communication: {analysis.why_no_overlap}")
    changes = [f"{_shown(each.change)}\n    {_shown(each.evidence)}" for each in analysis.suggestions]
    _print_list("suggestions", changes or ["no change is suggested"], console)


def _rates(analysis: RunAnalysis) -> str:
    """Steps and units per second of wall time, and of which steps that is."""
    rates = [f"{plain_number(analysis.steps_per_second)} steps/s"]
    if analysis.units_per_second is not None:
        rates.append(f"{plain_number(analysis.units_per_second)} {_shown(analysis.unit)}/s")
    return ", ".join(rates) + (f" ({analysis.figures_of})" if analysis.figures_of else "")


def _print_history(history: RunHistory, console: Console) -> None:
    """What happened to the ranks and the samples of the run."""
    if history.healed:
        console.print(f"\n{_shown(history.healed)}")
    if history.ledger is not None:
        colour = "green" if history.ledger.is_right else "red"
        console.print(f"[{colour}]{_shown(history.samples)}[/{colour}]")


def _parts_table(analysis: RunAnalysis) -> Table:
    table = Table(box=None, padding=(0, 2), show_header=False)
    whole = sum(analysis.parts.values()) or 1.0
    for part, spent in analysis.parts.items():
        if spent:
            table.add_row(part, milliseconds(spent), percent(spent / whole))
    table.add_row("wall time per step", milliseconds(whole), percent(1.0))
    overlap = "none" if analysis.overlap is None else percent(analysis.overlap)
    of = f"of {milliseconds(analysis.communication_ms)}"
    table.add_row("communication that overlaps with backward", overlap, of)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _print_last_minute(last: LastMinute | None, console: Console) -> None:
    """How a run ended that stalled or failed."""
    if last is None:
        return
    console.print(f"\n[bold]the last minute[/bold]\n{escape(last.first)}")
    for rank in last.ranks:
        _print_list(f"rank {rank.rank}", rank.lines, console)
        for line in rank.stack:
            console.print(f"      {escape(line)}")


def _print_list(title: str, lines: Iterable[str], console: Console) -> None:
    console.print(f"{title}:")
    for line in lines:
        console.print(f"  - {line}")


def _shown(text: str) -> str:
    """Text that may be from a recording, as it is and without effect on the terminal."""
    return escape(printable(text))
