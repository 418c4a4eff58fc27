"""Who is missing when a rank waits long, and how that is told; without looking at any process."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.watch.process_state import ProcessState
from paceline.watch.rank_page import WAITING, Activity, Doing, Told
from paceline.watch.stacks import CodeLine

_NAMES_SHOWN = 4
# In these a rank works too, so one that cannot run keeps the others waiting.
_WORKS_IN = frozenset({Activity.WRAPPING, Activity.TUNING})
_CANNOT_RUN = frozenset({ProcessState.STOPPED, ProcessState.TRACED, ProcessState.HOLDS_LOCK})
_GONE = frozenset({ProcessState.ENDED, ProcessState.SILENT})
# Lines are taken once per second.
_OLD_SECONDS = 1.5
_STEPS_KEPT = 31
# A wait is long after this many usual steps.
_USUAL_STEPS = 5
# The first steps may take twice as long. Modules are wrapped after ranks have loaded data and models.
_FIRST_STEPS, _SLOW_START, _WRAPPING = 2, 2, 6
# A rank that came back from this place before is told after this many times as long.
_CAME_BACK = 2


@dataclass(frozen=True)
class RankStatus:
    """What is known of one rank; it can be sent as JSON.

    Attributes:
        rank: the global rank.
        state: of its process.
        activity: what it does; None if it has not come to wrap a module.
        wrapper, step, bucket: see ``Doing``.
        seconds: since when.
        line: the user's line that it is in.
        kind: what it does in a library.
        place: the line of the training loop that it is in.
        seen_seconds: how old the line is.
        is_consequence: whether it has raised because of another rank.
        because_of: that rank, if it is known; otherwise -1.
        raised: the exception that has ended it, with its line.
        host: the name of its host, if that is another one.
    """

    rank: int
    state: ProcessState
    activity: Activity | None = None
    wrapper: int = 0
    step: int = -1
    bucket: int = -1
    seconds: float = 0.0
    line: CodeLine | None = None
    kind: str | None = None
    place: CodeLine | None = None
    seen_seconds: float = 0.0
    is_consequence: bool = False
    because_of: int = -1
    raised: str = ""
    host: str = ""

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RankStatus":
        """A status that another host has sent."""
        changed = {
            "state": ProcessState(values["state"]),
            "activity": None if values["activity"] is None else Activity(values["activity"]),
            "line": None if values["line"] is None else CodeLine(*values["line"]),
            "place": None if values["place"] is None else CodeLine(*values["place"]),
        }
        return cls(**{**values, **changed})

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks."""
        if self.activity in _WORKS_IN and self.state in _CANNOT_RUN:
            return False
        return self.activity in WAITING and self.state not in _GONE

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, or is about to, or its host has been heard before and is silent now."""
        is_silent = self.state is ProcessState.SILENT and self.activity is not None
        return is_silent or self.state is ProcessState.ENDED or bool(self.raised)


@dataclass(frozen=True)
class Wait:
    """A wait of this rank.

    Attributes:
        rank: this rank.
        doing: what it waits for.
        seconds: since when.
        names: the parameters that it waits for.
    """

    rank: int
    doing: Doing
    seconds: float
    names: Sequence[str] = ()


def missing_ranks(doing: Doing, others: Iterable[RankStatus]) -> list[RankStatus]:
    """Of the other ranks, those that this one waits for.

    They are those that have ended. If there are none, those that do not wait themselves. If all do, those
    that wait for something else.
    """
    everyone = [*others]
    # A rank that raised because of another one is not the cause, unless there is no other.
    first = [other for other in everyone if not other.is_consequence]
    for ranks in (first, everyone):
        # Wherever it was: one that gave up its step, and then ended, is ahead of the others.
        if ended := [other for other in ranks if other.state is ProcessState.ENDED]:
            return ended
        if behind := [other for other in ranks if not _has_come(doing, other)]:
            return [other for other in behind if not other.is_waiting] or behind
    return []


def _has_come(doing: Doing, other: RankStatus) -> bool:
    """Whether another rank has come to what this one waits for, or has passed it."""
    if other.wrapper != doing.wrapper or other.activity is None:
        return False
    if other.step != doing.step:
        return other.step > doing.step
    if other.state is ProcessState.ENDED or not other.is_waiting:
        return False
    return (other.activity, other.bucket) >= (doing.activity, doing.bucket)


def describe_awaited(doing: Doing, names: Sequence[str] = ()) -> str:
    """What a rank waits for, in words."""
    match doing.activity:
        case Activity.WRAPPING:
            return "the other ranks to wrap their module"
        case Activity.BUFFERS:
            return f"the module buffers of step {doing.step}"
        case Activity.UPDATE:
            return f"the other ranks to come to the optimizer before step {doing.step}"
        case Activity.OUTER:
            return f"the other ranks of this host to come to the outer step before step {doing.step}"
        case Activity.TUNING:
            return f"the other ranks to measure links for the hook auto before step {doing.step}"
        case Activity.INPUTS:
            return "the other ranks to say whether they have inputs (join)"
        case _:
            what = f" ({', '.join(shorten_names(names))})" if names else ""
            return f"bucket {doing.bucket}{what} of step {doing.step}"


def shorten_names(names: Sequence[str]) -> list[str]:
    """The first and the last of many names."""
    return [*names] if len(names) <= _NAMES_SHOWN else [*names[:2], "…", names[-1]]


def describe_rank(status: RankStatus) -> str:
    """What a missing rank does, in words; without its number."""
    if status.activity is None:
        is_silent = status.state is ProcessState.SILENT
        return f"{status.state} (on host {status.host})" if is_silent else "has not wrapped its module yet"
    is_old = status.seen_seconds > _OLD_SECONDS or status.state is ProcessState.ENDED
    where = "" if status.line is None else f"at {status.line}"
    about = [_describe_activity(status)]
    if status.kind is not None and not status.is_waiting and not is_old:
        about.insert(0, f"it {status.kind}")
    if is_old and where:
        where = f"last seen {status.seen_seconds:.0f} s ago {where}"
    if status.host:
        about.append(f"on host {status.host}")
    if status.raised:
        state = ProcessState.ENDED if status.state is ProcessState.ENDED else "is about to end"
        return f"{state} by {status.raised} ({'; '.join(about)})"
    if where:
        where = f", {where}" if is_old else f" {where}"
    return f"{status.state}{where} ({'; '.join(about)})"


def _describe_activity(status: RankStatus) -> str:
    assert status.activity is not None
    seconds = f"for {status.seconds:.0f} s"
    if status.activity in WAITING:
        doing = Doing(status.activity, status.wrapper, status.step, status.bucket)
        return f"waits {seconds} for {describe_awaited(doing)}"
    where = {
        Activity.OUTSIDE: "outside of forward and backward",
        Activity.FORWARD: "in forward",
        Activity.BACKWARD: "in backward",
        Activity.OPTIMIZER: "in the optimizer's step",
    }[status.activity]
    return f"{where} {seconds}, step {status.step}"


def describe_missing(missing: Sequence[RankStatus]) -> str:
    """Who is missing, and what each of them does."""
    if not missing:
        return "every rank has come: the network is slow, or a message is lost"
    if all(each.is_waiting for each in missing):
        things = "; ".join(f"rank {each.rank} {_describe_activity(each)}" for each in missing)
        return f"ranks wait for different things: {things}"
    return "; ".join(f"rank {each.rank} is missing: it {describe_rank(each)}" for each in missing)


def describe_stall(wait: Wait, missing: Sequence[RankStatus]) -> str:
    """The whole message of a waiting rank."""
    awaited = describe_awaited(wait.doing, wait.names)
    return f"rank {wait.rank} has waited {wait.seconds:.0f} s for {awaited}; {describe_missing(missing)}"


def describe_end(wait: Wait, told: Told) -> str:
    """The message of a rank whose wait is over."""
    came = f"rank {told.rank} has come" if told.rank >= 0 else "it is over"
    return f"rank {wait.rank} waited {wait.seconds:.0f} s for {describe_awaited(wait.doing)}; {came}"


class Patience:
    """How long a wait may take before it is told, learned from the run.

    Args:
        least: at least so many seconds.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._steps: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._last: tuple[int, float] | None = None
        self._came_back: dict[CodeLine, float] = {}

    def see(self, step: int, now: float) -> None:
        """Note at which step this rank is; the first steps say nothing about later ones."""
        if step < _FIRST_STEPS:
            self._last = None
        elif self._last is None or step < self._last[0]:
            self._last = (step, now)
        elif step > self._last[0]:
            self._steps.append((now - self._last[1]) / (step - self._last[0]))
            self._last = (step, now)

    @property
    def usual_step(self) -> float:
        """The seconds of the median step; 0 if there was none."""
        return statistics.median(self._steps) if self._steps else 0.0

    def least_seconds(self, doing: Doing) -> float:
        """How many seconds a wait takes at least before anybody looks for missing ranks."""
        if doing.activity is Activity.WRAPPING:
            return self._least * _WRAPPING
        factor = _SLOW_START if doing.step < _FIRST_STEPS else 1
        return max(self._least * factor, _USUAL_STEPS * self.usual_step)

    def seconds(self, doing: Doing, missing: Sequence[RankStatus]) -> float:
        """After how many seconds a wait for these ranks is told."""
        least = self.least_seconds(doing)
        before = [self._came_back[each.place] for each in missing if each.place in self._came_back]
        return max([least, *(_CAME_BACK * seconds for seconds in before)])

    def learn_end(self, missing: Sequence[RankStatus], seconds: float) -> None:
        """Note that ranks have come back after so long."""
        for each in missing:
            if each.place is not None:
                self._came_back[each.place] = max(seconds, self._came_back.get(each.place, 0.0))
