"""The run's figures as TensorBoard scalars, by rank and step."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import MissingPackageError
from paceline.recording.rows import Sum
from paceline.tools.report.runs import Section


def write_scalars(sections: Sequence[Section], folder: Path) -> None:
    """Write them for TensorBoard, a run for each rank of each wrapper.

    Raises:
        MissingPackageError: tensorboard is not installed.
    """
    make_writer = _writer()
    for number, section in enumerate(sections):
        name = section.module if len(sections) == 1 else f"{number}-{section.module}"
        for track in section.tracks:
            writer = make_writer(str(folder / _plain(name) / f"rank{track.rank}"))
            for tag, value, step, seconds in _scalars(section, track.sums):
                writer.add_scalar(tag, value, step, walltime=seconds)
            writer.close()


def _writer() -> Any:
    # Here, because it is an extra: who writes none needs none.
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingPackageError(
            f"tensorboard scalars need a package that is not installed (missing: {error.name}); "
            "install it with `pip install 'paceline[tensorboard]'`"
        ) from error
    return SummaryWriter


def _scalars(section: Section, sums: Sequence[Sequence[int]]) -> Iterator[tuple[str, float, int, float]]:
    """Of each block of steps: tag, value, its first step, and when that began."""
    for each in sums:
        steps = max(1, each[Sum.STEPS])
        step, seconds = each[Sum.FIRST], (each[Sum.START] + int(section.about["epoch"])) / 1e9
        for name in (
            Sum.STEP,
            Sum.FORWARD,
            Sum.BUFFERS,
            Sum.BACKWARD,
            Sum.EXPOSED,
            Sum.COMMUNICATION,
            Sum.OPTIMIZER,
        ):
            yield f"milliseconds/{name.name.lower()}", each[name] / steps / 1e6, step, seconds
        if each[Sum.COMMUNICATION]:
            hidden = 1 - min(1.0, each[Sum.EXPOSED] / each[Sum.COMMUNICATION])
            yield "communication hidden", hidden, step, seconds
        if each[Sum.COUNT] and each[Sum.STEP]:
            yield (
                f"{_plain(str(section.about['unit']))} a second",
                each[Sum.COUNT] / (each[Sum.STEP] / 1e9),
                step,
                seconds,
            )


def _plain(name: str) -> str:
    """A name that is one folder, whatever a class is called."""
    return (
        "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name).strip(".") or "_"
    )
