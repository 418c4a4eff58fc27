"""Averages gradients over the ranks while backward still runs.

Note [One step]. Every synced backward issues the same collectives on every rank: one a bucket of the plan,
in plan order, the last with the waybill. What a rank does not have counts as zeros, so no rank needs to
know beforehand what another uses. What arrives after its bucket has left is told in the waybill, and those
buckets are reduced once more, on every rank alike. A rank that raises sends the rest of its step as zeros
with word of it, so the others raise too, and the next step finds all ranks at the same place.

Note [Linearity]. What is averaged is ``.grad`` as it stands: the average of what is equal on all ranks is
itself, so a second backward, or one that follows accumulation, gives the sum of the averages.
"""

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from paceline.buckets.plan import Slot
from paceline.comm.group import Group
from paceline.errors import OptionError, StepError, WeightsError
from paceline.hooks.exchange import Average, Bucket, Exchange
from paceline.hooks.in_backward import InBackward
from paceline.module_state.buffers import ModuleBuffers
from paceline.module_state.precision import Precision
from paceline.reducer import verdict
from paceline.reducer.autograd_hooks import Arrivals, at_end_of_backward, current_backward
from paceline.reducer.fleet import Fleet
from paceline.reducer.flight import Flight
from paceline.reducer.lane import lane_of
from paceline.reducer.ledger import Ledger, Schedule
from paceline.reducer.planner import Planner
from paceline.reducer.settlement import Settlement
from paceline.reducer.strict import Strict
from paceline.reducer.times import Times
from paceline.reducer.waybill import Outcome, Report, Summary, Waybill
from paceline.reducer.weights import Weights
from paceline.tensors.dtensor import LocalParameter, Trained, whole_parameter

# So many small gradients are copied at once: enough to share the cost of a call, few enough for the cache.
_BATCH = 64


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
        precision: what lowers the parameters for forward and backward, if anything does.

    Attributes:
        syncs: whether a backward is to be synced.
        ranks: among how many ranks the next step's sum is shared out.
        in_backward: optimizers that step as soon as gradients are averaged.
        expected: whether a forward was called since the last backward of the lane.
        lane: the reducers of the group, which take turns.
        step: how many steps there were.
        summary: what the ranks said of the last step.
        times: when what happened in the last step.
        error: the last error in words.
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
        self.step = 0
        self.summary: Summary | None = None
        self.times = Times()
        self.error: str | None = None
        self._buffers = buffers
        self._as_views = as_views
        self._lock = threading.RLock()  # gradients on several devices arrive in several threads
        self._phase = Phase.IDLE
        self._accumulated = bytearray(len(slots))
        self._used = bytearray(len(slots))
        self._given_up: Flight | None = None
        self._weights = Weights(parameters)
        self._local_parts = [each for each in parameters if isinstance(each, LocalParameter)]
        self._slot_of = {id(parameter): slot for slot, parameter in enumerate(parameters)}
        self._arrivals = Arrivals(_weakly(self), every=1 if strict is not None else _BATCH)
        weakref.finalize(self, self._arrivals.remove)
        self._looked_at = 0
        self._untaken: list[int] = []
        self._backward = -1
        self._detached = False
        self._patient = False  # users' hooks come after ours in this step, so nothing is taken before its end
        self._awaited: list[torch.futures.Future[Any]] = []
        self.expected = False
        self.lane = lane_of(group.name)
        self.lane.join(self)
        self.trainable_at_wrap = sorted(planner.order)
        self.ledger = Ledger(planner.plan, len(slots))
        self._lay_out()
        self._flight = self._new_flight()

    def prepare(self) -> None:
        """Get ready for a forward: settle a step that was given up, adopt a new plan."""
        with self._lock:
            if self._phase is not Phase.IDLE:
                return
            self._settle_given_up()
            if self.strict is not None:
                self.strict.begin()
            if self.fleet.plan is not self.planner.plan:
                self._lay_out()
            self._watch()
            for part in self._local_parts:
                part.keep_hooks()
            if current_backward() == -1:
                self._arrivals.stay_last()
            self._patient = self._arrivals.are_not_last()

    def begin(self, *, synced: bool) -> None:
        """A backward has begun, or was found to be running."""
        with self._lock:
            if self._phase is Phase.IDLE:
                at_end_of_backward(self._end, self._lose)
                self._backward = current_backward()
                self._phase = Phase.ACCUMULATING
                if self._weighed:
                    self._weights.begin()
            if synced and self._phase is Phase.ACCUMULATING:
                self._start_step()
            self._refuse_mixed_weights()

    def is_in(self, backward: int) -> bool:
        """Whether a step has begun in that backward."""
        return self._phase is Phase.SYNCING and self._backward == backward

    def give_up(self, outcome: Outcome, reason: str) -> None:
        """Tell the other ranks, by the rest of this step's collectives, that the step is lost."""
        with self._lock, torch.no_grad():
            if self._phase is not Phase.SYNCING:
                self._start_step()
            try:
                if self._flight.broken is None:
                    self.group.roll_call.tell_why(self.step, reason)
                    self._flight.launch_nothing(outcome)
            finally:
                self.drop()

    @contextlib.contextmanager
    def weigh(self, weight: float) -> Iterator[None]:
        """Count what backward adds inside by a weight."""
        if self._weighed:
            raise OptionError(f"a weight holds already (outer: {self._weights.now}, inner: {weight})")
        self._check_accumulated()
        with self._weights.hold(weight):
            yield

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

    def shadow(self) -> None:
        """Take part in a step of the other ranks with nothing; gradients stay as they are."""
        with self._lock:
            kept = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
            self._accumulated = bytearray(len(self.slots))
            self._start_step()
            for bucket in self.fleet.buckets:
                bucket.zero()  # in new storage: what is kept may be views of the old
            self._flight.shadow()
            self.exchange.begin(0.0)
            self.finish()
            for parameter, grad in zip(self.parameters, kept, strict=True):
                parameter.grad = grad

    @property
    def launched(self) -> int:
        """How many buckets left in the last step."""
        return len(self._flight.pending)

    def _get_local_used_map(self) -> Tensor:
        """How many ranks used each trainable parameter in the last step; torch's name for it."""
        assert self.summary is not None
        used = [self.summary.used[slot] for slot in self.trainable_at_wrap]
        return torch.tensor(used, dtype=torch.int32, device=self.parameters[0].device)

    def _run_allreduce_hook(self, bucket: Any) -> "torch.futures.Future[Any]":
        """A future of the sum of a hook's bucket; torch's name for it, which its own hooks call."""
        return self.group.all_reduce_future(bucket.buffer())

    def _ddp_graph_static(self) -> bool:
        """Whether every step used the same parameters; torch's name for it."""
        return self.ledger.steady

    def detach(self) -> None:
        """Take all hooks off the parameters."""
        self._detached = True
        self._arrivals.remove()

    def wait_for(self, futures: Sequence["torch.futures.Future[Any]"]) -> None:
        """Have futures waited for at the end of the next step."""
        self._awaited.extend(futures)

    # Note [One step], from the first gradient to the last bucket's launch.

    def _look(self) -> None:
        """Take in the gradients that have arrived since the last look."""
        with self._lock:
            noted = self._arrivals.noted
            arrived = [self._slot_of[id(parameter)] for parameter in noted[self._looked_at :]]
            self._looked_at = len(noted)
            if self._phase is Phase.IDLE:
                self.begin(synced=self.syncs)
            if self._phase is Phase.ACCUMULATING:
                for slot in arrived:
                    self._accumulated[slot] = True
                return
            if self.strict is not None:
                for slot in arrived:
                    self.strict.mark(slot)
            self._mark(arrived)
            self._untaken += arrived
            if len(self._untaken) >= _BATCH:
                self._take_small(self._untaken)
                self._untaken = []

    def _mark(self, arrived: Sequence[int]) -> None:
        mark, prompt = self.ledger.mark, self.fleet.prompt
        for slot in arrived:
            full = mark(slot)
            if prompt[slot]:
                self._take(slot)
            if full is not None:
                self._schedule.release(full)
                self._send_off()
        if self.exchange.serial:
            self._send_off()

    def _send_off(self) -> None:
        while self._flight.has_room and (number := self._schedule.pop()) is not None:
            self._launch(number)

    def _start_step(self) -> None:
        self._phase = Phase.IDLE
        self.prepare()
        self._phase = Phase.SYNCING
        self._flight = self._new_flight()
        self.exchange.begin(self._weights.total)
        hold = not self.planner.learned or self._patient or self.lane.is_shared(self)
        self._schedule = Schedule(len(self.fleet.buckets), hold=hold)
        for bucket in self.fleet.buckets:
            bucket.begin()
        self._untaken = []
        self.ledger.begin(self._accumulated)
        self._used = self.ledger.used
        self.times.backward_began()

    def _new_flight(self) -> Flight:
        return Flight(self.fleet, self.exchange, self.group, self.step, self.times)

    def _take(self, slot: int) -> None:
        if self._patient or not self.ledger.is_ready(slot):
            return
        if self._weighed:
            self._weights.blend(slot)
        if self.parameters[slot].grad is not None:
            with torch.no_grad():
                self.fleet.bucket_of[slot].take(slot, self._factor)

    def _take_small(self, slots: Sequence[int]) -> None:
        if self._weighed or self._patient:  # each has to be blended, or its own hooks to run: at the end
            return
        # A slot that was thawed in another group may be watched and not planned.
        ready = [slot for slot in slots if self.ledger.is_ready(slot) and slot in self.fleet.bucket_of]
        with torch.no_grad():
            for bucket, members in groupby(ready, key=self.fleet.bucket_of.__getitem__):
                bucket.take_small(members)

    def _launch(self, number: int) -> None:
        self.ledger.mark_left(number)
        with torch.no_grad():
            self._fill(self.fleet.buckets[number], self._used, complete=self.ledger.is_as_expected(number))
            self._flight.launch(number, self._report)

    def _fill(self, bucket: Bucket, used: bytearray, *, complete: bool = False) -> None:
        if self._weighed:
            for slot in bucket.slots:
                self._weights.blend(slot.index)
                if not self._weights.now:  # counts nothing
                    used[slot.index] = self._accumulated[slot.index]
        bucket.fill(self._factor, used, complete=complete and not self._weighed)

    @property
    def _weighed(self) -> bool:
        return self._weights.now is not None

    @property
    def _factor(self) -> float:
        return 1.0 if self._weighed else self.exchange.factor(self.ranks)

    def _report(self) -> Report:
        for slot in self._outside:
            parameter = self.parameters[slot]
            if self._weighed:
                self._weights.blend(slot)
            self._used[slot] = parameter.requires_grad and parameter.grad is not None
        return Report(
            used=self._used,
            late=self.ledger.late,
            thawed=any(self._used[slot] for slot in self._outside),
            buffers_changed=self._buffers.changed(),
            weight=self._weights.total,
            order=self.ledger.order,
        )

    # Note [One step], from the end of backward to the averaged gradients.

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
            try:
                self._look()
                self._finalise()
            except BaseException:
                self.drop()
                raise
            finally:
                self._rest()

    def _rest(self) -> None:
        self._phase = Phase.IDLE
        self._arrivals.clear()
        self._looked_at = 0

    def _finalise(self) -> None:
        self.times.backward_ended()
        for number in self._schedule.rest():
            if not self._skips(number):
                self._flight.make_room()
                self._launch(number)
        again = {number: self._second(number) for number in self.ledger.late}
        late = self._weighed or self.precision is not None
        mistake = self._flight.land_all(hand_out=not late)
        summary = self._flight.read_waybill(self._report)
        if mistake is not None:
            raise mistake
        verdict.check(summary, self.step, self.group)
        settlement = Settlement(self.fleet, self._flight, summary, gain=self.exchange.gain)
        with contextlib.nullcontext() if self.precision is None else self.precision.returning():
            settlement.hand_out(late=late)
            self._reduce_again(summary, settlement, again)
        if self._weighed:
            self._weights.sync()
        self._learn(summary)
        self.in_backward.step()

    def _skips(self, number: int) -> bool:
        members = self.fleet.plan.buckets[number]
        may_skip = self.strict is not None and self.strict.skips_unused and number != self.fleet.plan.carrier
        return may_skip and not any(self._used[slot] for slot in members)

    def _reduce_again(self, summary: Summary, settlement: Settlement, again: dict[int, Bucket]) -> None:
        """Reduce what came too late for its bucket, and what no bucket had a place for."""
        for number in summary.late:
            settlement.add(number, again.get(number) or self._second(number, empty=True))
        if summary.thawed:
            thawed = [slot for slot in self._outside if summary.used[slot]]
            # They were blended when they were reported.
            settlement.thaw(thawed, self._factor, self._used, as_views=self._as_views)
            self.planner.thaw(thawed)

    def _second(self, number: int, *, empty: bool = False) -> Bucket:
        bucket = self.fleet.bucket(self.fleet.plan.buckets[number], as_views=True)
        if empty:
            bucket.zero()
        else:
            self._fill(bucket, bytearray(len(self.slots)))
        return bucket

    def _learn(self, summary: Summary) -> None:
        self.exchange.finish(self._whole, summary.used)
        self.ledger.learn()
        self.planner.learn(summary.order)
        self.summary = summary
        self._buffers.learn(changed=summary.buffers_changed)
        while self._awaited:
            self._awaited.pop().wait()
        self._accumulated = bytearray(len(self.slots))
        self.ranks = self.group.size
        self.step += 1

    def drop(self) -> None:
        """Forget a step that is lost, with all gradients: the same on every rank."""
        # What is in flight still reads and writes the storage.
        self._given_up = self._flight
        for bucket in self.fleet.buckets:
            bucket.reset()
        for slot in self.planner.order:
            self.parameters[slot].grad = None
        self._accumulated = bytearray(len(self.slots))
        self._weights.reset()
        if self.precision is not None:
            self.precision.restore()
        self.ranks = self.group.size
        self.expected = False
        self.step += 1
        self._rest()

    def _settle_given_up(self) -> None:
        if self._given_up is not None:
            self._given_up.settle()
            self._given_up = None

    def _refuse_mixed_weights(self) -> None:
        if self._weights.carries and not self._weighed:
            raise WeightsError("earlier passes were weighed and this one is not; weigh every pass, or none")

    def _check_accumulated(self) -> None:
        """Forget passes whose gradients were cleared; refuse to go on from others without a weight."""
        if self._weights.carries:
            cleared = self._weights.were_cleared()
        else:
            cleared = not any(map(self._has_accumulated, range(len(self.slots))))
        if cleared:
            self._accumulated = bytearray(len(self.slots))
            self._weights.reset()
        if any(self._accumulated) and not self._weights.carries:
            raise OptionError("gradients were accumulated without a weight; weigh every pass, or none")

    def _has_accumulated(self, slot: int) -> bool:
        grad = self.parameters[slot].grad
        return bool(self._accumulated[slot] and grad is not None and grad.any())

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
        )
        learned, self.ledger = self.ledger, Ledger(plan, len(self.slots))
        self.ledger.expect_as(learned)
        self._outside = self.planner.outside()
        self._unwatched = set(self.planner.order)
        self._watch()

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


def _weakly(reducer: Reducer) -> Callable[[], None]:
    """The reducer's look at arrivals; not kept alive by it, because parameters' hooks hold it."""
    alive = weakref.ref(reducer)

    def look() -> None:
        if (here := alive()) is not None:
            here._look()

    return look
