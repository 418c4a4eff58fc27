"""Writes the figures of a run as TensorBoard scalars, by rank and step."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import MissingPackageError
from paceline.recording.files import make_folder, write_file
from paceline.recording.rows import SumColumn
from paceline.tools.report.wrapper_runs import WrapperRun

_TIMES = (
    SumColumn.STEP,
    SumColumn.JOIN,
    SumColumn.BUFFERS,
    SumColumn.FORWARD,
    SumColumn.BACKWARD,
    SumColumn.WAIT_AFTER_BACKWARD,
    SumColumn.COMMUNICATION,
    SumColumn.OPTIMIZER,
)


def write_scalars(runs: Sequence[WrapperRun], folder: Path) -> None:
    """Write the scalars into a folder, with one TensorBoard run per rank and wrapper.

    Raises:
        MissingPackageError: tensorboard is not installed.
    """
    make_writer = _writer()
    for number, run in enumerate(runs):
        name = run.module if len(runs) == 1 else f"{number}-{run.module}"
        for timeline in run.timelines:
            scalars = _scalars(run, timeline.sums)
            _write_run(make_writer, scalars, folder / _safe_name(name) / f"rank{timeline.rank}")


def _write_run(make_writer: Any, scalars: Iterable[tuple[str, float, int, float]], folder: Path) -> None:
    for each in (folder.parent, folder):
        if each.is_symlink():
            raise OSError(f"{each} is a symbolic link, and is not written to")
    make_folder(folder)
    # TensorBoard would follow a link that has the name of its file, so it writes elsewhere.
    with tempfile.TemporaryDirectory(prefix="paceline-") as unfinished:
        writer = make_writer(unfinished)
        for tag, value, step, seconds in scalars:
            writer.add_scalar(tag, value, step, walltime=seconds)
        writer.close()
        for path in Path(unfinished).iterdir():
            write_file(folder / path.name, path.read_bytes())


def _writer() -> Any:
    # Imported here because it is an extra, which is needed only to write scalars.
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingPackageError(
            f"tensorboard scalars need a package that is not installed (missing: {error.name}); "
            "install it with `pip install 'paceline[tensorboard]'`"
        ) from error
    return SummaryWriter


def _scalars(run: WrapperRun, sums: Sequence[Sequence[int]]) -> Iterator[tuple[str, float, int, float]]:
    """For each block of steps: tag, value, the number of its first step, and when that began."""
    for each in sums:
        steps = max(1, each[SumColumn.STEPS])
        step = each[SumColumn.FIRST_STEP]
        seconds = (each[SumColumn.START] + int(run.description["epoch"])) / 1e9
        for column in _TIMES:
            yield f"milliseconds/{column.name.lower()}", each[column] / steps / 1e6, step, seconds
        if each[SumColumn.COMMUNICATION]:
            wait = each[SumColumn.WAIT_AFTER_BACKWARD] / each[SumColumn.COMMUNICATION]
            yield "communication overlap", 1 - min(1.0, wait), step, seconds
        if each[SumColumn.COUNT] and each[SumColumn.STEP]:
            rate = each[SumColumn.COUNT] / (each[SumColumn.STEP] / 1e9)
            yield f"{_safe_name(str(run.description['unit']))} per second", rate, step, seconds


def _safe_name(name: str) -> str:
    """A name that can be used for one folder, whatever a class is called."""
    return (
        "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name).strip(".") or "_"
    )
