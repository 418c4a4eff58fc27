"""How a run ended that stalled or failed: what each rank did in its last minute, and what happened first."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from paceline.tools.formatting import plural
from paceline.watch.error_words import is_consequence
from paceline.watch.rank_page import Activity, Moment, PageContent, Sample
from paceline.watch.stacks import decode

_MOST_LINES = 12
_MOST_FRAMES = 12
_NAMES = {
    Activity.OUTSIDE: "outside of forward and backward",
    Activity.FORWARD: "forward",
    Activity.BACKWARD: "backward",
    Activity.OPTIMIZER: "optimizer",
    Activity.WRAPPING: "wrapping",
    Activity.INPUTS: "waiting for inputs (join)",
    Activity.BUFFERS: "waiting for module buffers",
    Activity.BUCKET: "waiting for a bucket",
    Activity.UPDATE: "waiting for the update of shared parameters",
    Activity.OUTER: "waiting in an outer step",
    Activity.TUNING: "measuring links for the hook auto",
}


@dataclass(frozen=True)
class RankLastMinute:
    """One rank's last minute: what it did, oldest first, and its stack at the end, innermost line first."""

    rank: int
    lines: Sequence[str]
    stack: Sequence[str]


@dataclass(frozen=True)
class LastMinute:
    """The last minute of all ranks, and what happened first in one sentence."""

    first: str
    ranks: Sequence[RankLastMinute]


def last_minute(pages: Sequence[PageContent]) -> LastMinute | None:
    """The last minute of a run, from the ranks' pages; None if every rank has ended in order."""
    if all(page.told.moment is Moment.EXITED and not page.told.text for page in pages):
        return None
    ranks = [RankLastMinute(page.rank, _lines(page), _stack(page)) for page in pages]
    return LastMinute(_printable(what_was_first(pages)), ranks)


def what_was_first(pages: Sequence[PageContent]) -> str:
    """What happened first: an exception, the rank that others have waited for, or that stopped first."""
    raised = [page for page in pages if page.told.moment is Moment.EXITED and page.told.text]
    if causes := [page for page in raised if not is_consequence(page.told.text)]:
        return _ended_by(causes)
    told = [page for page in pages if page.told.moment in (Moment.STALLED, Moment.FAILED)]
    if told:
        first = min(told, key=_told_at)
        at = _clock(first, first.told.since)
        return f"first, rank {first.rank} waited in vain since {at}: {first.told.text}"
    silent = [page for page in pages if page.told.moment is Moment.NOTHING]
    if not silent:
        return _ended_by(raised)
    first = min(silent, key=lambda page: page.heartbeat + page.epoch)
    where = f" at {first.samples[-1].line}" if first.samples else ""
    doing = f"{_NAMES[first.doing.activity]}, {_steps(first.doing.step, first.doing.step)}"
    at = _clock(first, first.heartbeat)
    return f"first, rank {first.rank} gave its last sign of life, at {at}{where} ({doing})"


def _ended_by(raised: Sequence[PageContent]) -> str:
    first = min(raised, key=_told_at)
    return f"first, rank {first.rank} ended by {first.told.text}"


def _told_at(page: PageContent) -> int:
    return page.told.since + page.epoch


def _lines(page: PageContent) -> list[str]:
    """A rank's samples, those of one line together."""
    groups = [list(same) for _, same in groupby(page.samples, key=lambda sample: sample.line)]
    end = page.samples[-1].at if page.samples else 0
    lines = [_line(group, end) for group in groups]
    more = len(lines) - _MOST_LINES
    left_out = [f"(left out: {plural(more, 'earlier line')})"] if more > 0 else []
    return [*left_out, f"until {_clock(page, end)}:", *lines[-_MOST_LINES:]] if lines else ["no samples"]


def _line(samples: Sequence[Sample], end: int) -> str:
    start, stop = _before(samples[0], end), _before(samples[-1], end)
    when = start if start == stop else f"{start} to {stop}"
    activities = ", ".join(dict.fromkeys(_NAMES[sample.activity] for sample in samples))
    steps = _steps(samples[0].step, samples[-1].step)
    return _printable(f"{when}  {steps}, {activities}: {samples[-1].line}")


def _before(sample: Sample, end: int) -> str:
    """How long before the end a sample was taken."""
    seconds = round((end - sample.at) / 1e9)
    return f"-{seconds} s" if seconds else "0 s"


def _steps(first: int, last: int) -> str:
    """The steps from one to another; below zero, the first step has not begun."""
    if last < 0:
        return "before the first step"
    if first < 0:
        return f"until step {last}"
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _stack(page: PageContent) -> list[str]:
    return [_printable(str(line)) for line in decode(page.stack)[:_MOST_FRAMES]]


def _clock(page: PageContent, at: int) -> str:
    return datetime.fromtimestamp((at + page.epoch) / 1e9).strftime("%H:%M:%S")


def _printable(text: str) -> str:
    """A text without characters that a terminal would act on."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)
