"""From chapters, which ranks wrote each for itself, to what they did together.

A section is one wrapper on all of its ranks. Its tracks are the steps of the plan that most steps had, with
all times on the clock of the first rank's host.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paceline.errors import RecordingError
from paceline.recording.reader import Chapter
from paceline.recording.rows import BucketColumn, Column, Kind
from paceline.tools.report.clocks import SAME, Crossing, Offset, offset

_NUMBERS = ("world", "hosts", "epoch", "first_cap", "cap", "version")
_WORDS = ("module", "backend", "transport", "device", "exchange", "unit", "host", "boot")
_TIMES = frozenset(Column) - {Column.STEP, Column.KIND, Column.FORWARDS, Column.COUNT}


@dataclass(frozen=True)
class Track:
    """One rank's steps with one plan.

    Attributes:
        about: what the rank wrote of itself.
        columns: of numbers, as ``Column`` says; then those of the buckets.
        sums: of all steps with all plans.
        written: how many steps the plan had in all; the columns have the last ones.
        clock: what was added to the times.
    """

    about: Mapping[str, Any]
    columns: Sequence[Sequence[int]]
    sums: Sequence[Sequence[int]]
    written: int
    clock: Offset

    @property
    def rank(self) -> int:
        """Of the process."""
        return int(self.about["rank"])

    def __len__(self) -> int:
        return len(self.columns[Column.STEP])

    def __getitem__(self, column: Column) -> Sequence[int]:
        return self.columns[column]

    def bucket(self, index: int, column: BucketColumn) -> Sequence[int]:
        """One of a bucket's columns."""
        return self.columns[len(Column) + index * len(BucketColumn) + column]

    def since(self, step: int) -> "Track":
        """The same from a step on."""
        first = next((place for place, each in enumerate(self[Column.STEP]) if each >= step), len(self))
        return self if first == 0 else replace(self, columns=[column[first:] for column in self.columns])

    @cached_property
    def lengths(self) -> Sequence[int]:
        """From each step's begin to the next one's; to its own end where there is no next."""
        begins = self[Column.BEGIN]
        own = [
            max(end, optimizer)
            for end, optimizer in zip(self[Column.END], self[Column.OPTIMIZER_END], strict=True)
        ]
        ends = [*begins[1:], own[-1]] if begins else []
        return [max(0, end - begin) for begin, end in zip(begins, ends, strict=True)]


@dataclass(frozen=True)
class PlanNote:
    """A plan that the wrapper had: its number, how many steps and buckets, and how they were averaged."""

    number: int
    steps: int
    buckets: int
    exchange: str


@dataclass(frozen=True)
class Section:
    """One wrapper on all of its ranks.

    Attributes:
        module: the class of what is wrapped.
        group: the ranks that it averages over.
        tracks: what the ranks did with the plan that had most steps, by rank.
        plans: all of its plans.
        missing: ranks of the group that recorded nothing of it.
    """

    module: str
    group: Sequence[int]
    tracks: Sequence[Track]
    plans: Sequence[PlanNote]
    missing: Sequence[int]

    @property
    def about(self) -> Mapping[str, Any]:
        """What the first rank wrote."""
        return self.tracks[0].about

    @property
    def buckets(self) -> Sequence[Mapping[str, Any]]:
        """Of the plan, in the order in which they leave."""
        return list(self.about["buckets"])

    @property
    def clock_uncertainty(self) -> int | None:
        """By how many nanoseconds two ranks' times may be apart wrongly; None if nobody can say."""
        known = [track.clock.uncertainty for track in self.tracks]
        return None if None in known else max(each for each in known if each is not None)

    @cached_property
    def matched(self) -> Sequence[Sequence[int]]:
        """Of each track, where the steps are that every rank did in the ordinary way."""
        places = [
            {
                step: place
                for place, (step, kind) in enumerate(zip(track[Column.STEP], track[Column.KIND], strict=True))
                if kind == Kind.ORDINARY
            }
            for track in self.tracks
        ]
        everywhere = sorted(set(places[0]).intersection(*places[1:]))
        return [[own[step] for step in everywhere] for own in places]

    @cached_property
    def steps(self) -> Sequence[int]:
        """The numbers of those."""
        numbers = self.tracks[0][Column.STEP]
        return [numbers[place] for place in self.matched[0]]

    @cached_property
    def last_arrivals(self) -> Mapping[int, int]:
        """When the last rank came to the end of backward, by step."""
        last: dict[int, int] = {}
        for track in self.tracks:
            for step, arrival in zip(track[Column.STEP], track[Column.BACKWARD_END], strict=True):
                if arrival > last.get(step, 0):
                    last[step] = arrival
        return last

    def since(self, step: int) -> "Section":
        """The same from a step on."""
        return replace(self, tracks=[track.since(step) for track in self.tracks])

    def name_of(self, slot: int) -> str:
        """A parameter's name."""
        names = self.about["slots"]
        return str(names[slot]) if 0 <= slot < len(names) else f"slot {slot}"

    def kinds(self, kind: Kind) -> int:
        """How many steps were of a kind on some rank."""
        found = {
            step
            for track in self.tracks
            for step, each in zip(track[Column.STEP], track[Column.KIND], strict=True)
            if each & kind
        }
        return len(found)


def sections(chapters: Iterable[Chapter]) -> list[Section]:
    """One for each wrapper, the one with most time first.

    Raises:
        RecordingError: no step was recorded, or a rank does not say of what.
    """
    chapters = list(chapters)
    for chapter in chapters:
        _check(chapter)
    found = [_section(each) for each in _by_wrapper(chapters)]
    if not any(len(track) for each in found for track in each.tracks):
        raise RecordingError("no step was recorded: the ranks ended before the first synced backward had")
    whole = [each for each in found if all(map(len, each.tracks))]
    return sorted(whole, key=lambda each: -max(sum(track.lengths) for track in each.tracks))


def _check(chapter: Chapter) -> None:
    """See that everything is there that is read later."""
    about = chapter.about
    try:
        numbers = [about[name] for name in _NUMBERS] + [*about["group"], *about["nbytes"]]
        numbers += [each for bucket in about["buckets"] for each in (bucket["nbytes"], len(bucket["slots"]))]
        words = [about[name] for name in _WORDS]
        sound = all(isinstance(each, int) for each in numbers) and all(
            isinstance(each, str) for each in words
        )
        wrong = "" if sound and len(about["slots"]) == len(about["nbytes"]) else "not what a rank writes"
    except (KeyError, TypeError) as error:
        wrong = f"it lacks {error}"
    if wrong:
        name = f"rank{chapter.rank}-wrapper{chapter.wrapper}-plan{chapter.plan}.json"
        raise RecordingError(f"the recording is damaged ({name}: {wrong})")


def _by_wrapper(chapters: Iterable[Chapter]) -> list[list[Chapter]]:
    """Those of one wrapper on all of its ranks, which may have counted their wrappers differently."""
    by_rank: dict[tuple[int, int], list[Chapter]] = defaultdict(list)
    for chapter in chapters:
        by_rank[chapter.rank, chapter.wrapper].append(chapter)
    seen: Counter[tuple[Any, ...]] = Counter()
    together: dict[tuple[Any, ...], list[Chapter]] = defaultdict(list)
    for (rank, _), own in sorted(by_rank.items()):
        what = (tuple(own[0].about["group"]), str(own[0].about["module"]))
        together[*what, seen[rank, what]].extend(own)
        seen[rank, what] += 1
    return list(together.values())


def _section(chapters: Sequence[Chapter]) -> Section:
    steps: Counter[int] = Counter()
    for chapter in chapters:
        steps[chapter.plan] = max(steps[chapter.plan], chapter.written)
    ranks = sorted({chapter.rank for chapter in chapters})
    plan = max(steps, key=lambda number: (steps[number], -number))
    main = [chapter for chapter in chapters if chapter.plan == plan and chapter.rows]
    if not main:
        main = [chapter for chapter in chapters if chapter.plan == plan]
    about = main[0].about
    # A folder that was used twice may hold files of a run that had more ranks.
    main = [chapter for chapter in main if len(chapter.about["buckets"]) == len(about["buckets"])]
    sums = {
        rank: [each for chapter in chapters if chapter.rank == rank for each in chapter.sums]
        for rank in ranks
    }
    clocks = _clocks(main)
    return Section(
        module=str(about["module"]),
        group=list(about["group"]),
        tracks=[_track(chapter, sums[chapter.rank], clocks[_host(chapter)]) for chapter in main],
        plans=[_note(chapters, number, steps[number]) for number in sorted(steps)],
        missing=sorted(set(about["group"]) - {chapter.rank for chapter in main}),
    )


def _note(chapters: Sequence[Chapter], number: int, steps: int) -> PlanNote:
    about = next(chapter.about for chapter in chapters if chapter.plan == number)
    return PlanNote(number, steps, len(about["buckets"]), str(about["exchange"]))


def _track(chapter: Chapter, sums: Sequence[Sequence[int]], clock: Offset) -> Track:
    width = len(Column) + len(chapter.about["buckets"]) * len(BucketColumn)
    columns: list[Sequence[int]] = [list(each) for each in zip(*chapter.rows, strict=True)] or [[]] * width
    if clock is not SAME:
        ahead = [clock.at(step) for step in columns[Column.STEP]]
        for place, column in enumerate(columns):
            if _is_time(place):
                columns[place] = [time and time + more for time, more in zip(column, ahead, strict=True)]
    return Track(chapter.about, columns, sums, chapter.written, clock)


def _is_time(place: int) -> bool:
    if place < len(Column):
        return place in _TIMES
    return (place - len(Column)) % len(BucketColumn) != BucketColumn.LAST


def _host(chapter: Chapter) -> str:
    """Ranks of one boot of one machine share a clock."""
    return str(chapter.about.get("boot") or chapter.about.get("host"))


def _clocks(chapters: Sequence[Chapter]) -> dict[str, Offset]:
    hosts: dict[str, list[Chapter]] = defaultdict(list)
    for chapter in chapters:
        hosts[_host(chapter)].append(chapter)
    (first, reference), *others = hosts.items()
    clocks = {first: SAME}
    if others:
        ours = _crossings(reference)
        for name, chapters in others:
            guess = int(chapters[0].about["epoch"]) - int(reference[0].about["epoch"])
            clocks[name] = offset(ours, _crossings(chapters), guess=guess)
    return clocks


def _crossings(chapters: Sequence[Chapter]) -> dict[int, list[Crossing]]:
    """Of each step that no rank of the host has lost: when each bucket left last and was back first."""
    found: dict[int, list[Crossing]] = {}
    lost: set[int] = set()
    for chapter in chapters:
        for row in chapter.rows:
            own = list(
                zip(row[_LAUNCHES :: len(BucketColumn)], row[_RETURNS :: len(BucketColumn)], strict=True)
            )
            step = row[Column.STEP]
            if row[Column.KIND] & Kind.LOST:
                lost.add(step)
            known = found.get(step)
            found[step] = own if known is None else [_joined(*pair) for pair in zip(known, own, strict=True)]
    return {step: each for step, each in found.items() if step not in lost}


_LAUNCHES = len(Column) + BucketColumn.LAUNCH
_RETURNS = len(Column) + BucketColumn.DONE


def _joined(one: Crossing, other: Crossing) -> Crossing:
    if not all((*one, *other)):
        return (0, 0)
    return max(one[0], other[0]), min(one[1], other[1])
