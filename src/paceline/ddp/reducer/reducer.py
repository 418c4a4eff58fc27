"""Averages gradients over the ranks while backward still runs.

What lives as long as the wrapper does: which plan is in force, what parameters have accumulated, and which
backward is running. Each synced backward is a step of its own, see Note [One step].

Note [Linearity]. What is averaged is ``.grad`` as it stands: the average of what is equal on all ranks is
itself, so a second backward, or one that follows accumulation, gives the sum of the averages.
"""

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.ddp.buckets.plan import Plan as BucketPlan
from paceline.ddp.buckets.plan import Slot
from paceline.ddp.exchange.exchange import Average, Exchange
from paceline.ddp.reducer.accumulation import Accumulation
from paceline.ddp.reducer.autograd_hooks import Arrivals, at_end_of_backward, current_backward
from paceline.ddp.reducer.bucket_set import Fleet
from paceline.ddp.reducer.group_turns import lane_of
from paceline.ddp.reducer.in_backward import InBackward
from paceline.ddp.reducer.in_flight import Flight
from paceline.ddp.reducer.planner import Planner
from paceline.ddp.reducer.readiness import Ledger
from paceline.ddp.reducer.step import BATCH, Means, Step
from paceline.ddp.reducer.step_report import Outcome, Summary, Waybill
from paceline.ddp.reducer.strict import Strict
from paceline.ddp.reducer.variants.compiled_graph import traced_reduction
from paceline.ddp.reducer.variants.distributed_autograd import RemoteGrads
from paceline.ddp.state.buffers import ModuleBuffers
from paceline.ddp.state.precision import Precision
from paceline.errors import StepError, UnsupportedError
from paceline.recording.chapter import About, Bucket, Plan
from paceline.recording.recorder import Recorder, folder_from_environment
from paceline.recording.rows import Kind
from paceline.tensors.dtensor import LocalParameter, Trained, whole_parameter


class Phase(enum.Enum):
    """What a gradient that arrives is for."""

    IDLE = enum.auto()
    ACCUMULATING = enum.auto()
    SYNCING = enum.auto()


class Reducer:
    """One wrapped module's gradients.

    Args:
        slots: every parameter that may get a gradient, now or once it is thawed.
        parameters: the parameters, in the order of the slots.
        group: whom to average with.
        planner: makes the plans.
        buffers: the module's buffers; each step tells the ranks whether anyone's have changed.
        as_views: whether gradients are views of the buckets' storage.
        strict: raises where torch's reducer raises.
        about: what a recording of the wrapper is of.
        precision: what lowers the parameters for forward and backward, if anything does.

    Attributes:
        syncs: whether a backward is to be synced.
        nested: whether another wrapper averages the same gradients; it finds them in ``.grad`` until the end.
        weighs: whether contributions may be weighed.
        ranks: among how many ranks the next step's sum is shared out.
        in_backward: optimizers that step as soon as gradients are averaged.
        announced: whether the next backward is to be synced whatever its forward was.
        expected: whether a forward was called since the last backward of the lane.
        lane: the reducers of the group, which take turns.
        step: how many steps there were.
        recorder: stamps what happens.
        summary: what the ranks said of the last step.
        error: the last error in words.
        remote: watches distributed autograd.
        trainable_at_wrap: slots that the first plan covers; torch's figures count them alone.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        parameters: Sequence[Trained],
        group: Group,
        planner: Planner,
        buffers: ModuleBuffers,
        *,
        as_views: bool,
        strict: Strict | None,
        about: Callable[[Group], About],
        precision: Precision | None = None,
    ) -> None:
        self.slots = slots
        self.parameters = parameters
        self.group = group
        self.planner = planner
        self.exchange: Exchange = Average(group)
        self._whole = [whole_parameter(each) for each in parameters]
        self.strict = strict
        self.precision = precision
        self.in_backward = InBackward(self._whole)
        self.ranks = group.size
        self.syncs = True
        self.weighs = True
        self.step = 0
        self.summary: Summary | None = None
        self.recorder = Recorder(map(id, self._whole), folder_from_environment())
        self._about = about
        self.error: str | None = None
        self._buffers = buffers
        self._as_views = as_views
        self._lock = threading.RLock()  # gradients on several devices arrive in several threads
        self._phase = Phase.IDLE
        self._accumulation = Accumulation(parameters)
        self._step: Step | None = None
        self._given_up: Flight | None = None
        self._local_parts = [each for each in parameters if isinstance(each, LocalParameter)]
        self._lend: Callable[[], contextlib.AbstractContextManager[Sequence[int]]] = _nothing_lent
        self.remote = RemoteGrads(self, slots, self._whole)
        self._slot_of = {id(parameter): slot for slot, parameter in enumerate(parameters)}
        self._arrivals = Arrivals(
            _weakly(self), every=1 if strict is not None else BATCH, in_graph=traced_reduction(self)
        )
        weakref.finalize(self, self._arrivals.remove)
        self._looked_at = 0
        self._backward = -1
        self._detached = False
        self._patient = False  # users' hooks come after ours in this step, so nothing is taken before its end
        self.nested = False
        self._awaited: list[torch.futures.Future[Any]] = []
        self.announced = False
        self.expected = False
        self.lane = lane_of(group.name)
        self.lane.join(self)
        self.trainable_at_wrap = sorted(planner.order)
        self.ledger = Ledger(planner.plan, len(slots))
        self._lay_out()

    def prepare(self) -> None:
        """Get ready for a forward: settle a step that was given up, adopt a new plan."""
        with self._lock:
            if self._phase is not Phase.IDLE:
                return
            self._settle_given_up()
            if self.strict is not None:
                self.strict.begin()
            if not self.step:
                self.in_backward.look()
            if self.fleet.plan is not self.planner.plan:
                self._lay_out()
            self._watch()
            for part in self._local_parts:
                part.keep_hooks()
            if current_backward() == -1:
                self._patient = not self._arrivals.stay_last()
            else:
                self._patient = self._arrivals.are_not_last()
            self._patient |= self.nested

    def begin(self, *, synced: bool) -> None:
        """A backward has begun, or was found to be running."""
        if self._detached:
            return
        with self._lock:
            if self._phase is Phase.IDLE:
                at_end_of_backward(self._end, self._lose)
                self._backward = current_backward()
                self._phase = Phase.ACCUMULATING
                if self.weighed:
                    self._accumulation.weights.begin()
            if synced and self._phase is Phase.ACCUMULATING:
                self._start_step()
            self._accumulation.refuse_mixed()

    def borrow(self, lend: Callable[[], contextlib.AbstractContextManager[Sequence[int]]]) -> None:
        """A backward of distributed autograd has begun: see Note [Lent gradients]."""
        if self.weighed:
            # Kept as well: distributed autograd loses the words of an error.
            self.error = "contributions cannot be weighed in distributed autograd"
            raise UnsupportedError(self.error)
        with self._lock:
            self.begin(synced=True)
            self._lend = lend

    @property
    def watched(self) -> list[int]:
        """Slots whose gradients are averaged."""
        return self.planner.order

    def is_in(self, backward: int) -> bool:
        """Whether a step has begun in that backward."""
        return self._phase is Phase.SYNCING and self._backward == backward

    def give_up(self, outcome: Outcome, reason: str) -> None:
        """Tell the other ranks, by the rest of this step's collectives, that the step is lost."""
        with self._lock, torch.no_grad():
            if self._phase is not Phase.SYNCING:
                self._start_step()
            try:
                flight = self._current.flight
                if flight.broken is None:
                    self.group.roll_call.tell_why(self.step, reason)
                    flight.launch_nothing(outcome)
            finally:
                self.drop()

    def weigh(self, weight: float) -> contextlib.AbstractContextManager[None]:
        """Count what backward adds inside by a weight."""
        if not self.weighs:
            raise UnsupportedError("a fused optimizer steps before weights are known, so they cannot count")
        return self._accumulation.weigh(weight)

    def use(self, exchange: Exchange) -> None:
        """Average by another exchange from now on."""
        self._settle_given_up()
        self.exchange = exchange
        self._lay_out()

    def move_to(self, group: Group) -> None:
        """Go on with another group, as if training began anew."""
        if self._given_up is not None and self._given_up.broken is not None:
            self._given_up = None  # nothing of it will ever come
        self._settle_given_up()
        self.lane.leave(self)
        self.group = group
        self.ranks = group.size
        self.lane = lane_of(group.name)
        self.lane.join(self)
        self.step = 0
        self.planner.restart()
        self._buffers.forget()
        self.use(self.exchange.on(group))

    def check_finalised(self) -> None:
        """Raise if a step has begun and not ended."""
        if self._phase is not Phase.IDLE:
            raise StepError(f"step {self.step} has not been finished (rank: {self.group.rank})")

    def run_empty_step(self) -> None:
        """Take part in a step of the other ranks with nothing; parameters get the averages as theirs do."""
        with self._lock:
            self._accumulation.clear()
            self._start_step()
            self._current.shadow()
            self.finish()
            self.follow_up()

    @property
    def uses_rebuilt_plan(self) -> bool:
        """Whether the plan in force is the one that the first backward taught."""
        return self.planner.rebuilt and self.fleet.plan is self.planner.plan

    @property
    def launched(self) -> int:
        """How many buckets left in the last step."""
        return 0 if self._step is None else len(self._step.flight.pending)

    def detach(self) -> None:
        """Take all hooks off the parameters."""
        self._detached = True
        self._arrivals.remove()

    def wait_for(self, futures: Sequence["torch.futures.Future[Any]"]) -> None:
        """Have futures waited for at the end of the next step."""
        self._awaited.extend(futures)

    def _look(self) -> None:
        """Take in the gradients that have arrived since the last look."""
        with self._lock:
            noted = self._arrivals.noted
            arrived = [self._slot_of[id(parameter)] for parameter in noted[self._looked_at :]]
            self._looked_at = len(noted)
            if self._phase is Phase.IDLE:
                self.begin(synced=self.syncs)
            if self._phase is Phase.ACCUMULATING:
                self._accumulation.add(arrived)
                return
            if self.strict is not None:
                for slot in arrived:
                    self.strict.mark(slot)
            self._current.take_in(arrived)

    def _start_step(self) -> None:
        self._phase = Phase.IDLE
        self.prepare()
        self._phase = Phase.SYNCING
        self._step = Step(
            self._means,
            number=self.step,
            ranks=self.ranks,
            accumulated=self._accumulation.slots,
            hold=not self.planner.learned or self._patient or self.lane.is_shared(self),
            patient=self._patient,
        )
        self._step.begin()

    @property
    def _current(self) -> Step:
        assert self._step is not None
        return self._step

    @property
    def weighed(self) -> bool:
        """Whether contributions count by a weight."""
        return self._accumulation.weighed

    def _end(self) -> None:
        with self._lock:
            try:
                if self._phase is Phase.ACCUMULATING:
                    self._look()
                    self._rest()
                elif self._phase is Phase.SYNCING:
                    self.lane.finish(self._backward)
            except BaseException as error:
                self.error = f"{type(error).__name__}: {error}"
                raise

    def _lose(self) -> None:
        refused = None if self.strict is None else self.strict.error
        self.error = refused or f"an exception in backward of step {self.step}"
        # That exception is on its way; if the group is gone too, it says more than a second one.
        with contextlib.suppress(Exception):
            if self._phase is Phase.SYNCING:
                self.lane.fail_backward(self._backward)
        self._rest()

    def finish(self) -> None:
        """End the step: average the gradients, or raise and drop them."""
        with self._lock, torch.no_grad():
            accumulated = self._accumulation.slots
            try:
                with self._lend() as arrived:
                    self._arrivals.noted.extend(self.parameters[slot] for slot in arrived)
                    self._look()
                    self._learn(self._current.finalise())
                if self._lend is not _nothing_lent:
                    self._accumulation.slots = accumulated
                self.recorder.ended(Kind.SHADOW if self._current.flight.is_shadow else Kind.ORDINARY)
            except BaseException:
                self.drop()
                raise
            finally:
                self._rest()

    def follow_up(self) -> None:
        """Do what follows a step that has ended well: what raises here is this rank's affair alone."""
        assert self.summary is not None
        with torch.no_grad():
            self.exchange.finish(self._whole, self.summary.used, self.summary.total_weight)
            while self._awaited:
                self._awaited.pop().wait()
            if self.precision is not None:
                self.precision.cast_grads()
            self.in_backward.step()

    def _rest(self) -> None:
        self._phase = Phase.IDLE
        self.announced = False
        self._lend = _nothing_lent
        self._arrivals.clear()
        self._looked_at = 0

    def _learn(self, summary: Summary) -> None:
        if summary.thawed:
            self.planner.thaw([slot for slot in self._means.outside if summary.used[slot]])
        self.ledger.learn()
        self.planner.learn(summary.order)
        self.summary = summary
        self._buffers.learn(changed=summary.buffers_changed)
        self._accumulation.clear()
        self.ranks = self.group.size
        self.step += 1

    def drop(self) -> None:
        """Forget a step that is lost, with all gradients: the same on every rank."""
        # What is in flight still reads and writes the storage.
        self._given_up = None if self._step is None else self._step.flight
        self.group.finish_behind()
        self.recorder.ended(Kind.LOST)
        for bucket in self.fleet.buckets:
            bucket.reset()
        for slot in self.planner.order:
            self.parameters[slot].grad = None
        self._accumulation.drop()
        self.ranks = self.group.size
        self.expected = False
        self.step += 1
        self._rest()

    def _settle_given_up(self) -> None:
        if self._given_up is not None:
            self._given_up.settle()
            self._given_up = None

    def _lay_out(self) -> None:
        """Make the plan's buckets; their storage comes when it is first needed."""
        plan = self.planner.plan
        waybill = Waybill(
            slots=len(self.slots),
            buckets=len(plan.buckets),
            world=self.group.size,
            teaching=self.planner.teaching,
        )
        self.fleet = Fleet(
            plan,
            self.slots,
            self.parameters,
            waybill,
            waybill_rides=self.exchange.carries_waybill,
            as_views=self._as_views,
            dtype=None if self.precision is None else self.precision.reduce_dtype,
            empty=self.group.empty,
        )
        learned, self.ledger = self.ledger, Ledger(plan, len(self.slots))
        self.ledger.expect_as(learned)
        self._means = Means(
            parameters=self.parameters,
            fleet=self.fleet,
            ledger=self.ledger,
            exchange=self.exchange,
            group=self.group,
            weights=self._accumulation.weights,
            buffers=self._buffers,
            recorder=self.recorder,
            outside=self.planner.outside(),
            as_views=self._as_views,
            skips_unused=self.strict is not None and self.strict.skips_unused,
        )
        self.recorder.follow(self._described(plan), self._about(self.group))
        self._unwatched = set(self.planner.order)
        self._watch()

    def _described(self, plan: BucketPlan) -> Plan:
        sizes = [sum(self.slots[slot].nbytes for slot in members) for members in plan.buckets]
        buckets = [Bucket(members, size) for members, size in zip(plan.buckets, sizes, strict=True)]
        return Plan(buckets, self.exchange.name)

    def _watch(self) -> None:
        """Put hooks on the planned parameters; on one that is frozen on this rank as soon as it is thawed."""
        if self._detached:
            return
        thawed = {slot for slot in self._unwatched if self.parameters[slot].requires_grad}
        if not thawed:
            return
        self._unwatched -= thawed
        eager = {slot for slot in thawed if self.fleet.prompt[slot]}
        if self.planner.learned:
            eager.update(members[-1] for members in self.fleet.plan.buckets if members)
        self._arrivals.watch({slot: self.parameters[slot] for slot in thawed}, eager=eager)


def _nothing_lent() -> contextlib.AbstractContextManager[Sequence[int]]:
    return contextlib.nullcontext(())


def _weakly(reducer: Reducer) -> Callable[[], None]:
    """The reducer's look at arrivals; not kept alive by it, because parameters' hooks hold it."""
    alive = weakref.ref(reducer)

    def look() -> None:
        if (here := alive()) is not None:
            here._look()

    return look
