"""How a run goes while it runs: read from the ranks' recordings, of which this process is not one."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RecordingError
from paceline.recording.reader import Chapter, latest
from paceline.recording.rows import Column, Kind, first_launch

# So many steps the figures are of.
WINDOW = 32
# In so many of them a rank must come last to be called the slowest, and by so much of a step.
MOST = 2 / 3
NOTABLE = 0.02


@dataclass(frozen=True)
class Pace:
    """The last steps of a run.

    Attributes:
        step: the last step that every rank has ended.
        steps_a_second: the median rate.
        count_a_second: samples, or whatever is counted, of all ranks; None if nothing is.
        unit: what is counted.
        hidden: the share of communication that went on during backward; None if there was none.
        slowest: the rank that the others waited for in most steps; None if there is none, or hardly.
        behind: so many seconds a step, in the median.
    """

    step: int
    steps_a_second: float
    count_a_second: float | None
    unit: str
    hidden: float | None
    slowest: int | None
    behind: float

    def __str__(self) -> str:
        return ", ".join(self.parts())

    def parts(self) -> list[str]:
        """What there is to tell, the most important first."""
        parts = [f"step {self.step:,}", f"{self.steps_a_second:,.3g} steps/s"]
        if self.count_a_second is not None:
            parts.append(f"{self.count_a_second:,.0f} {self.unit}/s")
        if self.hidden is not None:
            parts.append(f"{self.hidden:.0%} of communication hidden")
        if self.slowest is not None:
            parts.append(f"rank {self.slowest} last, by {self.behind * 1e3:.3g} ms")
        return parts


def look(folder: Path) -> Pace | None:
    """The pace of the run that is recorded in a folder; None if there is nothing to tell yet."""
    try:
        return pace(latest(folder, rows=WINDOW + 1))
    except RecordingError:  # a rank is just beginning its file
        return None


def pace(chapters: Sequence[Chapter]) -> Pace | None:
    """The same of the chapters that are being written: of the wrapper that has stepped last."""
    by_wrapper: dict[int, list[Chapter]] = {}
    for chapter in chapters:
        by_wrapper.setdefault(chapter.wrapper, []).append(chapter)
    for same in sorted(by_wrapper.values(), key=_last_end, reverse=True):
        if (found := _pace(same)) is not None:
            return found
    return None


def _last_end(chapters: Sequence[Chapter]) -> int:
    return max((chapter.rows[-1][Column.END] for chapter in chapters if chapter.rows), default=0)


def _pace(chapters: Sequence[Chapter]) -> Pace | None:
    by_step = _trained(chapters)
    if len(by_step) < 2:
        return None
    begins = [statistics.median(row[Column.BEGIN] for row in rows.values()) for rows in by_step.values()]
    seconds = [(later - begin) / 1e9 for begin, later in itertools.pairwise(begins)]
    counted = sum(row[Column.COUNT] for rows in [*by_step.values()][:-1] for row in rows.values())
    step = statistics.median(seconds)
    slowest, behind = _slowest([*by_step.values()])
    is_notable = behind > NOTABLE * step
    return Pace(
        step=max(by_step),
        steps_a_second=1 / step,
        count_a_second=counted / sum(seconds) if counted else None,
        unit=str(chapters[0].about["unit"]),
        hidden=_hidden(row for rows in by_step.values() for row in rows.values()),
        slowest=slowest if is_notable else None,
        behind=behind if is_notable else 0.0,
    )


def _trained(chapters: Sequence[Chapter]) -> dict[int, dict[int, Sequence[int]]]:
    """Of each step that every rank has ended, in order: the rows of the ranks that had inputs."""
    ended = [
        {row[Column.STEP] for row in chapter.rows if row[Column.KIND] in (Kind.ORDINARY, Kind.SHADOW)}
        for chapter in chapters
    ]
    by_step: dict[int, dict[int, Sequence[int]]] = {}
    for chapter in chapters:
        for row in chapter.rows:
            if row[Column.KIND] == Kind.ORDINARY:
                by_step.setdefault(row[Column.STEP], {})[chapter.rank] = row
    return {step: by_step[step] for step in sorted(set.intersection(*ended)) if step in by_step}


def _slowest(by_step: Sequence[Mapping[int, Sequence[int]]]) -> tuple[int | None, float]:
    """Who was latest in most steps, and by how much; where ranks have one clock."""
    late = [_lateness(rows) for rows in by_step if len(rows) > 1]
    last = [max(found, key=found.__getitem__) for found in late]
    slowest = max(last, key=last.count, default=None)
    if slowest is None or last.count(slowest) < MOST * len(by_step):
        return None, 0.0
    return slowest, statistics.median(found[slowest] for found in late if slowest in found) / 1e9


def _lateness(rows: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """How much later than the first each rank came to where they meet: for buffers, after backward."""
    late = dict.fromkeys(rows, 0)
    buffers = all(row[Column.BUFFERS_END] for row in rows.values())
    for place in (Column.FORWARD_START, Column.BACKWARD_END)[0 if buffers else 1 :]:
        first = min(row[place] for row in rows.values())
        for rank, row in rows.items():
            late[rank] += row[place] - first
    return late


def _hidden(rows: Iterable[Sequence[int]]) -> float | None:
    """The share of communication that ended before backward did."""
    hidden = total = 0
    for row in rows:
        launch = first_launch(row)
        total += row[Column.LANDED] - launch
        hidden += max(0, row[Column.BACKWARD_END] - launch)
    return hidden / total if total > 0 else None
