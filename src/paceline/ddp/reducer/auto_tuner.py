"""Has the hook "auto" follow what steps show: measures, decides, and tries bucket caps, on all ranks alike.

Every decision is taken at the end of a step that all ranks have ended well, from numbers that all ranks have
gathered: see Note [Decisions of auto].

Note [Speed of running steps]. A rank that comes early waits for the others, and cannot tell this from a slow
link. So of all ranks' communication times the shortest counts: that of the rank that came last.
"""

import enum
import logging
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.link_speed import DEADLINE, measure_links, open_wires
from paceline.ddp.buckets.cap_choice import ReadyTimes, choose_caps
from paceline.ddp.buckets.plan import BucketCaps, BucketPlan
from paceline.ddp.exchange.chosen import ChosenExchange
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.reducer.planner import Planner, PlanStage
from paceline.ddp.reducer.step_context import StepContext
from paceline.errors import MismatchError, PeerError, UnmeasuredError
from paceline.hooks.auto import Auto
from paceline.hooks.choice import (
    HookCost,
    Link,
    ReadyBucket,
    StepWork,
    choose,
    format_time,
    has_changed,
    predict,
)
from paceline.recording.recorder import RecordedTimes
from paceline.tensors.dtensor import Trained

_T = TypeVar("_T")
_LOG = logging.getLogger("paceline")
# Steps that do not count after a change: the first has new memory, or the residuals of another hook.
_SETTLING = 2
# Steps whose median counts.
_WINDOW = 8
# Below this, a change of latency is noise of the processor.
_NOTABLE_LATENCY = 1e-3
# Links are measured again only after steps that took this many times as long as the last measurement: on a
# busy processor, communication often takes twice or half as long for no lasting reason.
_STEPS_PER_MEASUREMENT = 20
# A trial is kept only if steps become shorter by this part.
_FASTER = 0.02


class Stage(enum.Enum):
    """What the next steps are for."""

    IDLE = enum.auto()  # nothing: see why_idle
    DECIDING = enum.auto()  # the decision was made without knowing when gradients are ready
    FITTING = enum.auto()  # they show whether another bucket cap is worth a trial
    TRIAL = enum.auto()  # they have another bucket cap
    WATCHING = enum.auto()  # they show whether the link has changed


class Failure(enum.IntEnum):
    """How a measurement failed on a rank, from harmless to what the user has to know."""

    NONE = 0
    WIRES = 1  # messages did not come: the way between hosts, or a rank that was stopped for a while
    ERROR = 2  # anything else that was raised


@dataclass(frozen=True)
class Measured:
    """What ranks have measured together.

    Attributes:
        link: the slowest link.
        costs: what each hook costs on the slowest rank, by name.
        seconds: how long they measured.
    """

    link: Link
    costs: dict[str, HookCost]
    seconds: float


@dataclass(frozen=True)
class SteadySteps:
    """What all ranks know of the last steps: medians, in seconds.

    Attributes:
        step: from forward to averaged gradients, of the slowest rank.
        communication: see Note [Speed of running steps].
        backward: of the first rank that had inputs.
        ready: when each bucket was ready on that rank, after the start of backward.
    """

    step: float
    communication: float
    backward: float
    ready: Sequence[float]


@dataclass(frozen=True)
class Trial:
    """A bucket cap is tried.

    Attributes:
        before: the caps that it is held against.
        seconds: how long a step took with them.
        communication: the same for its communication, by which a change of the link is noticed.
    """

    before: BucketCaps
    seconds: float
    communication: float


class AutoTuner:
    """Decides for the hook "auto" of one wrapper.

    Args:
        hook: the hook.
        plain: averages where the hook has nothing to choose from.
        device: where the module is.
        reduce_dtype: in which gradients travel; None if each does in its parameter's own type.
        may_choose_caps: whether the user left the bucket caps open.
    """

    def __init__(
        self,
        hook: Auto,
        plain: Exchange,
        device: torch.device,
        *,
        reduce_dtype: torch.dtype | None,
        may_choose_caps: bool,
    ) -> None:
        hook.claim(self)
        self._hook = hook
        self._plain = plain
        self._device = device
        self._reduce_dtype = reduce_dtype
        self._may_choose_caps = may_choose_caps
        self._first_caps: BucketCaps | None = None
        self.restart()

    def restart(self, planner: Planner | None = None) -> None:
        """Begin anew, as when the group has changed.

        Args:
            planner: gets back the caps from before all trials: a new rank has no others.
        """
        if self._first_caps is not None and planner is not None:
            planner.use_caps(self._first_caps)
        self._hook.take(None)
        self._trial: Trial | None = None
        # Of a rank that measures links, a process group; None until all ranks have opened theirs.
        self._wires: list[Any] | None = None
        self._measured: Measured | None = None
        self._seconds_since = 0.0  # of steps, since ranks have measured
        self._stage = Stage.DECIDING
        self._reference: float | None = None
        self._plan: BucketPlan | None = None
        self._begin_window()

    def exchange_in(self, group: Group) -> Exchange:
        """The exchange among some ranks: the hook's, if it has something to choose from."""
        self._hook.release()
        if why_idle(group, self._device) is None:
            return ChosenExchange(group, self._plain, self._hook)
        self._hook.claim(self)
        return self._plain.for_group(group)

    def begin(self, context: StepContext) -> None:
        """Measure, and decide before there is a step; every rank calls this at once."""
        if (why := why_idle(context.group, self._device)) is not None:
            self._stage = Stage.IDLE
            say_idle(context.group, why)
            return
        self._check_same(context.group)
        self._measured = self._measure(context)
        # As far as is known before the first step, all gradients are ready at once.
        nbytes = sum(slot.nbytes for slot in context.parameters.slots)
        self._decide(context, StepWork([ReadyBucket(nbytes, 0.0)]))

    def after_step(self, context: StepContext, planner: Planner) -> None:
        """A step has ended well on every rank: decide, if it is time."""
        if self._stage is Stage.DECIDING and self._measured is None:
            self.begin(context)
        if self._stage is Stage.IDLE:
            return
        if context.bucket_set.plan is not self._plan:
            self._plan = context.bucket_set.plan
            self._begin_window()
        self._seen += 1
        if self._seen > _SETTLING and (times := context.recorder.step_times()) is not None:
            self._times.append(times)
        if self._seen == _SETTLING + _WINDOW:
            steady = self._agree(context.group, len(self._plan.buckets))
            self._begin_window(settled=True)
            if steady is not None:
                self._seconds_since += _WINDOW * steady.step
            if steady is not None and planner.stage is not PlanStage.GUESS:
                self._act(steady, context, planner)

    def _begin_window(self, *, settled: bool = False) -> None:
        self._seen = _SETTLING if settled else 0
        self._times: list[RecordedTimes] = []

    def _act(self, steady: SteadySteps, context: StepContext, planner: Planner) -> None:
        if self._stage is Stage.TRIAL:
            self._judge_trial(steady, context.group, planner)
        elif self._stage is Stage.WATCHING:
            self._watch(steady, context)
        elif self._stage is Stage.FITTING or not self._decide(context, _work(context, steady)):
            # The link may have changed since it was measured.
            is_due = self._may_measure and self._is_slow(steady, context)
            if not (is_due and self._measure_again(steady, context)):
                self._fit(steady, context, planner)
        else:
            self._stage = Stage.FITTING
            self._begin_window()

    def _check_same(self, group: Group) -> None:
        """Raise if ranks have different hooks to choose from."""
        first, *others = group.gather_objects(self._hook.allowed, self._device)
        for rank, allowed in enumerate(others, start=1):
            if allowed != first:
                raise MismatchError(
                    "ranks have different errors that the hook auto may make: give all the same max_error "
                    f"(hooks on rank 0: {', '.join(first)}; on rank {rank}: {', '.join(allowed)})"
                )

    def _decide(self, context: StepContext, work: StepWork) -> bool:
        """Take the fastest hook; returns whether it is another one."""
        assert self._measured is not None
        before = None if self._hook.choice is None else self._hook.choice.name
        choice = choose(work, self._measured.costs, self._measured.link, now=before)
        self._hook.take(choice)
        if choice.name == before:
            return False
        self._say(context.group, str(choice))
        return True

    def _fit(self, steady: SteadySteps, context: StepContext, planner: Planner) -> None:
        """Begin a trial of another bucket cap, if one promises shorter steps."""
        assert self._measured is not None
        assert self._hook.choice is not None
        caps = None
        if self._may_choose_caps and planner.stage is PlanStage.LEARNED:
            slots, plan = context.parameters.slots, context.bucket_set.plan
            caps = choose_caps(
                slots,
                planner.order,
                plan,
                _work(context, steady),
                ReadyTimes(slots, plan, steady.ready),
                self._measured.costs[self._hook.choice.name],
                self._measured.link,
                first=planner.caps[0],
            )
        if caps is None:
            self._stage, self._reference = Stage.WATCHING, steady.communication
        else:
            self._first_caps = self._first_caps or planner.caps
            self._trial = Trial(planner.caps, steady.step, steady.communication)
            planner.use_caps(caps)
            self._stage = Stage.TRIAL

    def _judge_trial(self, steady: SteadySteps, group: Group, planner: Planner) -> None:
        """Keep the cap that was tried only if steps have become shorter."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        tried = f"{planner.caps[1] / (1 << 20):g} MiB: {format_time(steady.step)} per step"
        if steady.step < (1 - _FASTER) * trial.seconds:
            self._say(group, f"keeps a bucket cap of {tried}, {format_time(trial.seconds)} before")
        else:
            self._say(group, f"goes back from a bucket cap of {tried}, {format_time(trial.seconds)} before")
            planner.use_caps(trial.before)
        # The link may have changed in the trial.
        self._stage, self._reference = Stage.WATCHING, trial.communication

    def _watch(self, steady: SteadySteps, context: StepContext) -> None:
        """Measure again if communication takes half as long as before, or twice as long."""
        assert self._reference is not None
        if not has_changed(self._reference, steady.communication) or not self._may_measure:
            return
        self._measure_again(steady, context)

    @property
    def _may_measure(self) -> bool:
        assert self._measured is not None
        return self._seconds_since >= _STEPS_PER_MEASUREMENT * self._measured.seconds

    def _is_slow(self, steady: SteadySteps, context: StepContext) -> bool:
        """Whether communication takes more than twice as long as the whole of what was predicted."""
        assert self._measured is not None
        assert self._hook.choice is not None
        cost = self._measured.costs[self._hook.choice.name]
        return steady.communication > 2 * predict(_work(context, steady), cost, self._measured.link)

    def _measure_again(self, steady: SteadySteps, context: StepContext) -> bool:
        """Measure, and decide if the link is another; returns whether it is.

        It is not worth the end of a training: if messages do not come, everything stays as it is.
        """
        assert self._measured is not None
        try:
            old, self._measured = self._measured.link, self._measure(context)
        except UnmeasuredError as error:
            self._say(context.group, f"keeps what it has: {error}")
            # The next attempt may take as long.
            self._measured = replace(self._measured, seconds=DEADLINE.total_seconds())
            return False
        self._reference = steady.communication
        if not _is_another(old, self._measured.link):
            return False
        self._decide(context, _work(context, steady))
        self._stage = Stage.FITTING
        self._begin_window()
        return True

    def _measure(self, context: StepContext) -> Measured:
        """Measure links and hooks on all ranks; all get the same numbers, those of the slowest.

        An error on one rank is raised on all of them.
        """
        began = time.perf_counter()
        self._seconds_since = 0.0  # also of a measurement that fails
        group, shared = context.group, context.group.shared
        gradients = [*map(self._travelling, context.parameters.local)]
        members = group.size if shared is None else shared.hosts
        # Hooks first: what one rank raises by itself, the others learn before they wait for its messages.
        costs = self._on_all(group, lambda: self._hook.measure_costs(gradients, members))
        try:
            self._open_wires(group)
            link = self._on_all(group, self._slowest_link, uses_wires=True)
        except BaseException:
            self._wires = None
            raise
        own = [
            time.perf_counter() - began,
            link.latency,
            -link.bandwidth,
            *(s for cost in costs.values() for s in (cost.before, cost.after)),
        ]
        taken, latency, negative, *seconds = map(max, zip(*_gather(group, own, self._device), strict=True))
        # Each of a host's leaders has a part of the work. Predictions are by the bytes of slots.
        size = sum(each.nbytes for each in gradients) / max(
            1, sum(x.nbytes for x in context.parameters.slots)
        )
        share = 1 if shared is None else shared.leaders
        pairs = zip(seconds[::2], seconds[1::2], strict=True)
        return Measured(
            Link(latency, -negative),
            {
                name: replace(
                    cost, before=size * before / share, after=size * after / share, sent=size * cost.sent
                )
                for (name, cost), (before, after) in zip(costs.items(), pairs, strict=True)
            },
            taken,
        )

    def _open_wires(self, group: Group) -> None:
        """Open what links are measured through, unless it is open."""
        if self._wires is not None:
            return
        # A name that nobody has used before: the time of the first rank.
        [[now], *_] = _gather(group, [time.time()], self._device)
        name, own, shared = f"links/{group.wrapper}/{now}", self._hook.group, group.shared
        # One rank per host measures: what goes between two hosts shares a link.
        members = [own] if own is not None and (shared is None or shared.rank == 0) else []
        self._wires = self._on_all(
            group, lambda: [open_wires(each, self._device, name) for each in members], uses_wires=True
        )

    def _slowest_link(self) -> Link:
        """The slowest of this rank's links; of a rank that measures none, one that is faster than all."""
        if not self._wires or self._hook.group is None:
            return Link(0.0, float("inf"))
        links = measure_links(self._hook.group, self._wires[0], self._device).values()
        return Link(max(each.latency for each in links), min(each.bandwidth for each in links))

    def _on_all(self, group: Group, measure: Callable[[], _T], *, uses_wires: bool = False) -> _T:
        """What this rank measures, unless a rank raises in it; then every rank raises.

        Args:
            group: the ranks.
            measure: measures.
            uses_wires: whether it sends messages, which may not come.
        """
        raised: BaseException | None = None
        failure = Failure.NONE
        try:
            found = measure()
        except BaseException as error:  # of Ctrl-C too: the others would wait
            raised = error
            # gloo raises nothing more special.
            failure = Failure.WIRES if uses_wires and isinstance(error, RuntimeError) else Failure.ERROR
        worst = max(theirs for [theirs] in _gather(group, [float(failure)], self._device))
        if worst == Failure.NONE:
            return found
        own = None if raised is None else f"{type(raised).__name__}: {raised}"
        reasons = enumerate(group.gather_objects(own, self._device))
        told = "; ".join(f"rank {group.name_ranks([rank])[0]}: {each}" for rank, each in reasons if each)
        what = f"ranks could not measure links and hooks for the hook auto; no step is lost ({told})"
        if worst == Failure.WIRES:
            raise UnmeasuredError(what) from raised
        # A rank that has waited in vain raises as the others do.
        if raised is None or failure is not Failure.ERROR:
            raise PeerError(what) from raised
        raised.add_note(f"paceline: {what}")
        raise raised

    def _travelling(self, parameter: Trained) -> Tensor:
        """A stand-in without memory for a gradient in the type in which it travels."""
        own = parameter.dtype
        dtype = own if self._reduce_dtype is None or own.is_complex else self._reduce_dtype
        return torch.empty(parameter.shape, dtype=dtype, device="meta")

    def _agree(self, group: Group, buckets: int) -> SteadySteps | None:
        """What all ranks know of the last steps; None if no rank had inputs."""
        own = [0.0] * (3 + buckets)
        if self._times:
            rows = [(each.step, each.communication, each.backward, *each.ready) for each in self._times]
            own = [statistics.median(column) for column in zip(*rows, strict=True)]
        known = [row for row in _gather(group, own, self._device) if row[0]]
        if not known:
            return None
        _, _, backward, *ready = known[0]
        return SteadySteps(max(row[0] for row in known), min(row[1] for row in known), backward, ready)

    def _say(self, group: Group, what: str) -> None:
        if group.rank == 0:
            _LOG.warning("paceline: the hook auto: %s", what)


def say_idle(group: Group, why: str) -> None:
    """Say in one line that the hook "auto" has nothing to choose from."""
    if group.rank == 0:
        _LOG.warning("paceline: the hook auto has nothing to do: %s", why)


def why_idle(group: Group, device: torch.device) -> str | None:
    """Why the hook "auto" has nothing to choose from; the same on all ranks of a group, and None if it has.

    Args:
        group: the ranks.
        device: where the module is.
    """
    reasons = {
        # Costs are those of the processor, and messages both ways at once would wait for each other in NCCL.
        "parameters are on an accelerator": device.type != "cpu",
        "the group's ranks may change": group.may_change or group.awaits_others,
        "there is one rank": group.size == 1,
        "all ranks are on one host": group.shared is not None and group.shared.hosts == 1,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _gather(group: Group, own: Sequence[float], device: torch.device) -> list[tuple[float, ...]]:
    """Every rank's numbers, of which all ranks have as many."""
    layout = struct.Struct(f"<{len(own)}d")
    return [layout.unpack(theirs) for theirs in group.gather_bytes(layout.pack(*own), device)]


def _work(context: StepContext, steady: SteadySteps) -> StepWork:
    slots, plan = context.parameters.slots, context.bucket_set.plan
    return ReadyTimes(slots, plan, steady.ready).work(slots, plan, steady.backward)


def _is_another(before: Link, now: Link) -> bool:
    """Whether a link is more than twice as fast as before, or less than half as fast."""
    notable = [max(_NOTABLE_LATENCY, link.latency) for link in (before, now)]
    return has_changed(before.bandwidth, now.bandwidth) or has_changed(*notable)
