"""Which rank is late, by how much, since when, and what it is slow at.

In the last steps, which are recorded whole, by when ranks come to where they meet. In all steps of a long
run, of which there are only sums, by who waits least.
"""

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.recording.rows import Column, Sum
from paceline.tools.report.parts import Durations, Part, median, quartiles
from paceline.tools.report.runs import Section

# A rank is late if it is so by this share of a step, and not by less than can be told from noise.
_SHARE = 0.03
_LEAST = 100_000
# In fewer steps it may be chance; what is over is worth telling if it was in so many, and this share of all.
_FEWEST = 8
_FEWEST_OVER = 32
_LONG = 0.05
# What a rank does by itself: in these it waits for others.
_OWN: list[Part] = [part for part in Part if part not in (Part.BUFFERS, Part.WAITING, Part.COMMUNICATION)]


class Meeting(enum.StrEnum):
    """Where ranks wait for each other."""

    START = "the start of forward"
    """If module buffers are made equal there."""
    END = "the end of backward"


@dataclass(frozen=True)
class Late:
    """A rank that others wait for.

    Attributes:
        rank: which.
        where: at what it comes late; a ``Meeting``.
        late_ms: by how much it comes after the middle one of the others, in the middle one of these steps.
        last: in which share of these steps it came last.
        since: the first of them.
        until: the last, if it was late no more after that.
        give: by how many steps the first may be wrong.
        part: what it is slow at; None if no part of its own stands out.
        part_ms: how much longer that takes than on the middle one of the others.
        step_ms: how long a step takes then, in the middle one.
        other_ms: and in the middle one of the other steps, if there are any.
    """

    rank: int
    where: str
    late_ms: float
    last: float
    since: int
    until: int | None
    give: int
    part: str | None
    part_ms: float
    step_ms: float
    other_ms: float | None


@dataclass(frozen=True)
class Arrivals:
    """How a rank comes to where ranks meet: how late in the middle step, and how often as the last."""

    rank: int
    where: str
    late_ms: float
    last: float


def behind(times: Sequence[int]) -> list[int]:
    """By how much each is after the middle one of the others; the earlier of two middle ones."""
    if len(times) < 2:
        return [0] * len(times)
    ordered = sorted(times)
    middle = (len(times) - 2) // 2
    return [time - ordered[middle + (bisect_left(ordered, time) <= middle)] for time in times]


def stretch(late: Sequence[float], least: float, *, over: int = _FEWEST) -> tuple[int, int] | None:
    """From where to where a rank is late: where what exceeds a bar adds up to most.

    The bar is half of what it is late by, once that is known. One very late step counts for a few. Most of
    the steps must be late, or it is noise; and so it may be if it is over and was not long.

    Args:
        late: by how much, step by step.
        least: what is worth telling.
        over: how many steps it must have been if it is over.
    """
    found = _heaviest(late, least)
    if found is not None:
        found = _heaviest(late, max(least, median(late[slice(*found)]) / 2))
    if found is None:
        return None
    start, end = found
    fewest = max(over, _LONG * len(late)) if len(late) - end >= _FEWEST else _FEWEST
    low, middle, _ = quartiles(late[start:end])
    return found if end - start >= min(fewest, len(late)) and low >= least / 2 and middle >= least else None


def _heaviest(late: Sequence[float], bar: float) -> tuple[int, int] | None:
    best, found, total, start = 0.0, None, 0.0, 0
    for place, each in enumerate(late):
        if total <= 0:
            total, start = 0.0, place
        total += max(-bar, min(each - bar, 3 * bar))
        if total > best:
            best, found = total, (start, place + 1)
    return found


def late_ranks(section: Section, spent: Sequence[Durations], step_ns: float) -> list[Late]:
    """Who is late, those that cost most first."""
    if len(section.tracks) < 2:
        return []
    least = max(_SHARE * step_ns, _LEAST)
    found = _in_rows(section, spent, least) or _in_sums(section, least)
    return sorted(found, key=lambda each: -each.late_ms)


def arrivals(section: Section, step_ns: float, late_ranks: Sequence[Late]) -> list[Arrivals]:
    """How each rank comes to where the late one is late, or to the end of backward."""
    where = late_ranks[0].where if late_ranks else Meeting.END
    late = _meetings(section, max(_SHARE * step_ns, _LEAST)).get(Meeting(where), [])
    return [
        Arrivals(track.rank, where, median(own) / 1e6, _share_last(late, number, 0, len(own)))
        for number, (track, own) in enumerate(zip(section.tracks, late, strict=True))
    ]


# Of each rank in each step that all ranks have: by how much it came after the middle one of the others.
Lateness = Sequence[Sequence[int]]


def _meetings(section: Section, least: float) -> dict[Meeting, Lateness]:
    """Wherever the ranks meet."""
    found = {Meeting.END: _at_the_end(section, least)}
    if all(map(any, _times(section, Column.BUFFERS_END))):
        found[Meeting.START] = _compared(_times(section, Column.FORWARD_START))
    return found


def _at_the_end(section: Section, least: float) -> Lateness:
    ends, uncertainty = _times(section, Column.BACKWARD_END), section.clock_uncertainty
    if uncertainty is None or 2 * uncertainty > least:
        # Clocks do not tell. But all are given the last bucket at one time: who came last waits least.
        landings = _times(section, Column.LANDED)
        ends = [[a - b for a, b in zip(*both, strict=True)] for both in zip(ends, landings, strict=True)]
    return _compared(ends)


def _times(section: Section, column: Column) -> list[list[int]]:
    return [
        [track[column][place] for place in places]
        for track, places in zip(section.tracks, section.matched, strict=True)
    ]


def _compared(times: Sequence[Sequence[int]]) -> Lateness:
    steps = map(behind, zip(*times, strict=True))
    return list(zip(*steps, strict=True)) or [[] for _ in times]


def _share_last(late: Sequence[Sequence[float]], rank: int, start: int, end: int) -> float:
    steps = list(zip(*(own[start:end] for own in late), strict=True))
    times = sum(1 for step in steps if step[rank] == max(step) > min(step))
    return times / max(1, len(steps))


def _in_rows(section: Section, spent: Sequence[Durations], least: float) -> list[Late]:
    """Who is late where ranks meet; a rank that is so in both places, where it is so by more."""
    found: dict[int, Late] = {}
    for meeting, late in _meetings(section, least).items():
        for number, own in enumerate(late):
            where = stretch(own, least, over=_FEWEST_OVER)
            if where is not None:
                each = _late(section, spent, late, number, meeting=meeting, where=where, least=least)
                known = found.get(each.rank)
                if known is None or known.late_ms < each.late_ms:
                    found[each.rank] = each
    return list(found.values())


def _late(
    section: Section,
    spent: Sequence[Durations],
    late: Lateness,
    number: int,
    *,
    meeting: Meeting,
    where: tuple[int, int],
    least: float,
) -> Late:
    start, end = where
    steps, own = section.steps, late[number]
    since, give = _earlier(section, number, steps[start], least) if start == 0 else (steps[start], 0)
    part, part_ms = _slow_part(section, spent, number, where)
    step_ms, other_ms = _steps(_matched_lengths(section, number), where)
    return Late(
        rank=section.tracks[number].rank,
        where=meeting,
        late_ms=median(own[start:end]) / 1e6,
        last=_share_last(late, number, start, end),
        since=since,
        until=None if len(own) - end < _FEWEST else steps[end - 1],
        give=give,
        part=part,
        part_ms=part_ms,
        step_ms=step_ms,
        other_ms=other_ms,
    )


def _matched_lengths(section: Section, number: int) -> list[float]:
    lengths = section.tracks[number].lengths
    return [lengths[place] for place in section.matched[number]]


def _steps(lengths: Sequence[float], where: tuple[int, int]) -> tuple[float, float | None]:
    """How long steps are while a rank is late, and otherwise."""
    others = [*lengths[: where[0]], *lengths[where[1] :]]
    return median(lengths[slice(*where)]) / 1e6, median(others) / 1e6 if others else None


def _slow_part(
    section: Section, spent: Sequence[Durations], late: int, where: tuple[int, int]
) -> tuple[str | None, float]:
    excess: dict[Part, float] = {}
    for part in _OWN:
        typical = [
            int(median([own[part][place] for place in places[slice(*where)]]))
            for own, places in zip(spent, section.matched, strict=True)
        ]
        excess[part] = behind(typical)[late]
    part = max(excess, key=lambda each: excess[each])
    return (str(part), excess[part] / 1e6) if excess[part] >= _LEAST else (None, 0.0)


def _waits(section: Section) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """The blocks that all ranks have, by first step and number of steps; how late each rank was."""
    exposed = [
        {
            (each[Sum.FIRST], each[Sum.STEPS]): each[Sum.EXPOSED] // max(1, each[Sum.STEPS])
            for each in track.sums
        }
        for track in section.tracks
    ]
    blocks = sorted(set(exposed[0]).intersection(*exposed[1:]))
    late = [behind([-own[block] for own in exposed]) for block in blocks]
    return blocks, [list(own) for own in zip(*late, strict=True)] or [[] for _ in exposed]


def _earlier(section: Section, number: int, first: int, least: float) -> tuple[int, int]:
    """Since when it is late, if that was before the first whole row; and give or take how many steps."""
    blocks, late = _waits(section)
    where = stretch(late[number], least / 2)
    if where is None or blocks[where[0]][0] >= first or sum(blocks[where[1] - 1]) < first:
        return first, 0
    since, many = blocks[where[0]]
    return since, many - 1


def _in_sums(section: Section, least: float) -> list[Late]:
    """Who was late in steps of which only sums are left."""
    blocks, late = _waits(section)
    found = []
    for number, own in enumerate(late):
        where = stretch(own, least)
        if where is not None and blocks[where[0]][1] > 1:
            start, end = where
            late_ms, last = median(own[start:end]) / 1e6, _share_last(late, number, start, end)
            first, many = blocks[start]
            until = sum(blocks[end - 1]) - 1 if end < len(blocks) else None
            steps = _steps(_block_lengths(section, number, blocks), where)
            rank = section.tracks[number].rank
            found.append(Late(rank, Meeting.END, late_ms, last, first, until, many - 1, None, 0.0, *steps))
    return found


def _block_lengths(section: Section, number: int, blocks: Sequence[tuple[int, int]]) -> list[float]:
    """How long a step is on average in each block."""
    known = {
        each[Sum.FIRST]: each[Sum.STEP] / max(1, each[Sum.STEPS]) for each in section.tracks[number].sums
    }
    return [known[first] for first, _ in blocks]
