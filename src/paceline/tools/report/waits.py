"""Which bucket waits for which parameter, and which for an earlier bucket."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.recording.rows import BucketColumn, Column
from paceline.tools.report.parts import median, samples
from paceline.tools.report.runs import Section, Track

# Less is what it takes to launch one.
_HELD = 50_000


@dataclass(frozen=True)
class Times:
    """A bucket on one rank, in milliseconds since backward began, in the middle step."""

    ready: float
    launch: float
    done: float


@dataclass(frozen=True)
class Waits:
    """A bucket, and what keeps it.

    Attributes:
        bucket: its place in the plan.
        nbytes: of its gradients.
        slots: how many parameters it has.
        ranks: its times on each rank.
        last: the parameter whose gradient comes last.
        last_share: in which share of the steps it is that one.
        held_ms: how long it is full and must let others leave first.
        behind: which earlier bucket that is.
        behind_last: and the parameter that this one waits for.
    """

    bucket: int
    nbytes: int
    slots: int
    ranks: Sequence[Times]
    last: str
    last_share: float
    held_ms: float
    behind: int | None
    behind_last: str | None


def bucket_waits(section: Section) -> list[Waits]:
    """Of each bucket."""
    lasts: list[str] = []
    found = []
    queues = [_Queue(track) for track in section.tracks]
    for bucket in range(len(section.buckets)):
        slot, share = _last(section, bucket)
        lasts.append(section.name_of(slot) if share else "none")
        held, before = _held(queues, bucket)
        found.append(
            Waits(
                bucket,
                int(section.buckets[bucket]["nbytes"]),
                len(section.buckets[bucket]["slots"]),
                [_times(track, bucket) for track in section.tracks],
                lasts[bucket],
                share,
                held / 1e6,
                before,
                None if before is None else lasts[before],
            )
        )
    return found


def _times(track: Track, bucket: int) -> Times:
    start, places = track[Column.BACKWARD_START], samples(track)
    columns = (
        track.bucket(bucket, each) for each in (BucketColumn.READY, BucketColumn.LAUNCH, BucketColumn.DONE)
    )
    return Times(
        *(
            round(median([column[place] - start[place] for place in places if column[place]]) / 1e6, 4)
            for column in columns
        )
    )


def _last(section: Section, bucket: int) -> tuple[int, float]:
    """The slot that most often is the last, and how often."""
    lasts: Counter[int] = Counter()
    for track in section.tracks:
        ready, last = track.bucket(bucket, BucketColumn.READY), track.bucket(bucket, BucketColumn.LAST)
        lasts.update(last[place] for place in samples(track) if ready[place])
    if not lasts:
        return 0, 0.0
    slot, times = lasts.most_common(1)[0]
    return slot, times / lasts.total()


class _Queue:
    """One rank's buckets, asked for in the order in which they leave."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._places = samples(track)
        # Of each step: when the latest bucket so far was full, and which that is.
        self._latest = [(0, -1)] * len(self._places)

    def next(self, bucket: int) -> Iterator[tuple[int, int | None]]:
        """Of each step: how long it waited though it was full, and for which one that was not."""
        ready = self._track.bucket(bucket, BucketColumn.READY)
        launch = self._track.bucket(bucket, BucketColumn.LAUNCH)
        for number, place in enumerate(self._places):
            time, before = self._latest[number]
            if ready[place] and launch[place]:
                yield max(0, launch[place] - ready[place]), before if time > ready[place] else None
            self._latest[number] = max(self._latest[number], (ready[place], bucket))


def _held(queues: Sequence[_Queue], bucket: int) -> tuple[float, int | None]:
    """How long a full bucket waits in the middle step, and most often for which earlier one."""
    found = [each for queue in queues for each in queue.next(bucket)]
    held = median([time for time, _ in found])
    before = Counter(each for _, each in found if each is not None)
    if not before or held < _HELD:
        return held, None
    return held, before.most_common(1)[0][0]
