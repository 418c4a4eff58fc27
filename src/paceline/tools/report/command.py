"""``paceline report``: what a recording says, in the terminal and as a page."""

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
from paceline.tools.report.analysis import Findings
from paceline.tools.report.report import page, recorded
from paceline.tools.report.runs import Section
from paceline.tools.report.scalars import write_scalars
from paceline.tools.report.trace import write_trace
from paceline.tools.report.words import milliseconds, ranks

Found = Sequence[tuple[Section, Findings]]
_FILE = click.Path(dir_okay=False, path_type=Path)
_FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("folder", type=_FOLDER)
@click.option(
    "-o", "--output", type=_FILE, help="Where to put the page; report.html in the folder by default."
)
@click.option("--trace", type=_FILE, help="Also write a trace for Perfetto or Chrome (.json or .json.gz).")
@click.option("--tensorboard", type=_FOLDER, help="Also write scalars for TensorBoard into a folder.")
@click.option("--open", "opened", is_flag=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON, and no summary.")
def report(
    folder: Path,
    *,
    output: Path | None,
    trace: Path | None,
    tensorboard: Path | None,
    opened: bool,
    as_json: bool,
) -> None:
    """Say where the time of recorded steps went, and write a page that shows it.

    FOLDER is what the ranks recorded into: `paceline run --record FOLDER`, or PACELINE_RECORD in their
    environment.
    """
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    try:
        found = recorded(folder)
        written = output or folder / "report.html"
        written.write_text(page(found), "utf-8")
        _write_more([section for section, _ in found], trace, tensorboard, console)
    except (PacelineError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps([asdict(findings) for _, findings in found], indent=2))
    else:
        for _, findings in found:
            _summarise(findings, console)
    console.print(f"page: {escape(str(written))}")
    if opened:
        webbrowser.open(written.resolve().as_uri())


def _write_more(
    sections: Sequence[Section], trace: Path | None, tensorboard: Path | None, console: Console
) -> None:
    if trace is not None:
        steps = write_trace(sections, trace)
        console.print(f"trace of the last {steps:,} steps: {escape(str(trace))}")
    if tensorboard is not None:
        write_scalars(sections, tensorboard)
        console.print(f"scalars: {escape(str(tensorboard))}")


def _summarise(findings: Findings, console: Console) -> None:
    group = ranks(list(findings.group))
    console.print(f"\n[bold]{escape(findings.module)}[/bold] on {group}, {findings.steps:,} steps")
    console.print(escape(findings.verdict))
    if findings.missing:
        console.print(f"[yellow]no recording of {ranks(list(findings.missing))}[/yellow]")
    console.print(_parts_table(findings))
    changes = [f"{each.change}\n    {each.figure}" for each in findings.suggestions]
    _list("what to change", changes or ["nothing: no part of a step stands out"], console)


def _parts_table(findings: Findings) -> Table:
    table = Table(box=None, padding=(0, 2), show_header=False)
    whole = sum(findings.parts.values()) or 1.0
    for part, spent in findings.parts.items():
        if spent:
            table.add_row(part, milliseconds(spent), f"{spent / whole:.0%}")
    hidden = "none" if findings.hidden is None else f"{findings.hidden:.0%}"
    table.add_row("communication hidden", hidden, f"of {milliseconds(findings.under_way_ms)}")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _list(title: str, lines: Iterable[str], console: Console) -> None:
    console.print(f"{title}:")
    for line in lines:
        console.print(f"  - {escape(line)}")
