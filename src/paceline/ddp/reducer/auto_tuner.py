"""Has the hook "auto" follow what steps show: measures, decides, and tries bucket caps, on all ranks alike.

Every decision is taken at the end of a step that all ranks have ended well, from numbers that all ranks have
gathered: see Note [Decisions of auto].

Note [Speed of running steps]. A rank that comes early waits for the others, and cannot tell this from a slow
link. So of all ranks' communication times the shortest counts: that of the rank that came last.
"""

import enum
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from paceline.comm.group import Group
from paceline.comm.link_speed import DEADLINE, Link
from paceline.ddp.buckets.cap_choice import ReadyTimes, choose_caps
from paceline.ddp.buckets.plan import BucketCaps, BucketPlan
from paceline.ddp.exchange.chosen import ChosenExchange
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.reducer.link_measurement import LinkMeasurement, Measured, gather
from paceline.ddp.reducer.planner import Planner, PlanStage
from paceline.ddp.reducer.step_context import StepContext
from paceline.errors import MismatchError, UnmeasuredError
from paceline.hooks.auto import Auto
from paceline.hooks.choice import (
    ReadyBucket,
    StepWork,
    choose,
    format_time,
    has_changed,
    predict,
)
from paceline.recording.recorder import RecordedTimes

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
        communication: the same for its communication on the link of the decision, to notice a change by.
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
        self._measurement = LinkMeasurement(self._hook, self._device, self._reduce_dtype)
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
        first, *others = group.gather_objects(self._hook.signature, self._device)
        for rank, theirs in enumerate(others, start=1):
            if theirs != first:
                raise MismatchError(
                    "ranks have different errors that the hook auto may make: give all the same max_error "
                    f"(rank 0: {first}; rank {rank}: {theirs})"
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
            self._stage, self._reference = Stage.WATCHING, self._as_decided(steady.communication)
        else:
            self._first_caps = self._first_caps or planner.caps
            self._trial = Trial(planner.caps, steady.step, self._as_decided(steady.communication))
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

    def _measure(self, context: StepContext) -> Measured:
        self._seconds_since = 0.0  # also of a measurement that fails
        return self._measurement.measure(context)

    def _measure_again(self, steady: SteadySteps, context: StepContext) -> bool:
        """Measure, and decide if the link is not that of the decision any more; returns whether it is not.

        It is not worth the end of a training: if messages do not come, everything stays as it is.
        """
        assert self._measured is not None
        assert self._hook.choice is not None
        try:
            self._measured = self._measure(context)
        except UnmeasuredError as error:
            self._say(context.group, f"keeps what it has: {error}")
            # The next attempt may take as long.
            self._measured = replace(self._measured, seconds=DEADLINE.total_seconds())
            return False
        is_another = _is_another(self._hook.choice.link, self._measured.link)
        if is_another:
            self._decide(context, _work(context, steady))
            self._stage = Stage.FITTING
            self._begin_window()
        self._reference = self._as_decided(steady.communication)
        return is_another

    def _as_decided(self, communication: float) -> float:
        """How long communication would take on the link of the decision, so that small changes add up."""
        assert self._measured is not None
        assert self._hook.choice is not None
        return communication * self._measured.link.bandwidth / self._hook.choice.link.bandwidth

    def _agree(self, group: Group, buckets: int) -> SteadySteps | None:
        """What all ranks know of the last steps; None if no rank had inputs."""
        own = [0.0] * (3 + buckets)
        if self._times:
            rows = [(each.step, each.communication, each.backward, *each.ready) for each in self._times]
            own = [statistics.median(column) for column in zip(*rows, strict=True)]
        known = [row for row in gather(group, own, self._device) if row[0]]
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


def _work(context: StepContext, steady: SteadySteps) -> StepWork:
    slots, plan = context.parameters.slots, context.bucket_set.plan
    return ReadyTimes(slots, plan, steady.ready).work(slots, plan, steady.backward)


def _is_another(before: Link, now: Link) -> bool:
    """Whether a link is more than twice as fast as before, or less than half as fast."""
    notable = [max(_NOTABLE_LATENCY, link.latency) for link in (before, now)]
    return has_changed(before.bandwidth, now.bandwidth) or has_changed(*notable)
