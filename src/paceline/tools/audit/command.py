"""``paceline audit``: says which tensor differs first, and in which step."""

from collections.abc import Sequence
from pathlib import Path

import click

from paceline.errors import PacelineError
from paceline.tools.audit.checkpoint_differences import (
    CheckpointDifference,
    checkpoint_differences,
    is_checkpoint,
    load_checkpoint,
)
from paceline.tools.audit.run_differences import FirstDifference, compare_ranks, compare_runs, read_run

_DIFFERENCES_SHOWN = 20


class _NothingToCompareError(click.ClickException):
    exit_code = 2


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.pass_context
def audit(context: click.Context, paths: Sequence[Path]) -> None:
    """Find where two checkpoints, two runs, or the ranks of one run begin to differ.

    PATHS are two checkpoints (files of torch.save, or folders of torch.distributed.checkpoint), or one or two
    folders in which ranks recorded: `paceline run --record FOLDER`, or PACELINE_RECORD=FOLDER.

    The exit code is 0 if nothing differs, 1 if something does, and 2 if the files cannot be compared.
    """
    if len(paths) > 2:
        raise click.UsageError("give one folder, two folders or two checkpoints")
    try:
        lines = _checkpoint_lines(*paths) if all(map(is_checkpoint, paths)) else _run_lines(*paths)
    except PacelineError as error:
        raise _NothingToCompareError(str(error)) from error
    for line in lines or ["nothing differs"]:
        click.echo(_printable(line))
    context.exit(1 if lines else 0)


def _checkpoint_lines(first: Path, second: Path | None = None) -> list[str]:
    if second is None:
        raise click.UsageError("give a second checkpoint to compare with")
    found = checkpoint_differences(load_checkpoint(first), load_checkpoint(second))
    more = len(found) - _DIFFERENCES_SHOWN
    lines = [_describe_value(each) for each in found[:_DIFFERENCES_SHOWN]]
    return [*lines, f"and {more:,} more"] if more > 0 else lines


def _describe_value(found: CheckpointDifference) -> str:
    return f"{found.name or 'the value'} {found.how}"


def _run_lines(first: Path, second: Path | None = None) -> list[str]:
    run = read_run(first)
    if second is not None:
        return _describe_first(compare_runs(run, read_run(second)))
    findings = [finding for finding in run[0].findings if finding]
    return [*_describe_first(compare_ranks(run)), *(f"told in the run: {each}" for each in findings)]


def _describe_first(found: FirstDifference | None) -> list[str]:
    if found is None:
        return []
    since = "" if found.last_equal is None else f" (equal in step {found.last_equal})"
    wrapper = f" of wrapper {found.wrapper}" if found.wrapper else ""
    return [
        f"{found.sides[0]} and {found.sides[1]} differ in step {found.step}{since}{wrapper}: {found.what}"
    ]


def _printable(line: str) -> str:
    """A line without escape sequences that names in a file may have."""
    return "".join(each if each.isprintable() else "?" for each in line)
