"""One synced step: from the first gradient to everyone's averages.

Note [One step]. Every synced backward issues the same collectives on every rank: one a bucket of the plan,
in plan order, the last with the waybill. What a rank does not have counts as zeros, so no rank needs to
know beforehand what another uses. What arrives after its bucket has left is told in the waybill, and those
buckets are reduced once more, on every rank alike. A rank that raises sends the rest of its step as zeros
with word of it, so the others raise too, and the next step finds all ranks at the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from paceline.comm.group import Group
from paceline.ddp.exchange.exchange import Bucket, Exchange
from paceline.ddp.reducer import verdict
from paceline.ddp.reducer.bucket_set import Fleet
from paceline.ddp.reducer.in_flight import Flight
from paceline.ddp.reducer.readiness import Ledger, Schedule
from paceline.ddp.reducer.settlement import Settlement
from paceline.ddp.reducer.step_report import Report, Summary
from paceline.ddp.reducer.weights import Weights
from paceline.ddp.state.buffers import ModuleBuffers
from paceline.recording.recorder import Recorder
from paceline.tensors.dtensor import Trained

# So many small gradients are copied at once: enough to share the cost of a call, few enough for the cache.
BATCH = 64


@dataclass(frozen=True)
class Means:
    """What a step works with, as it stands when the step begins.

    Attributes:
        parameters: every slot's.
        fleet: the plan's buckets.
        ledger: which slots are ready.
        exchange: how buckets are averaged.
        group: among whom.
        weights: what contributions count.
        buffers: the module's buffers; a step tells the ranks whether anyone's have changed.
        recorder: stamps what happens.
        outside: slots that the plan does not cover.
        as_views: whether gradients are views of the buckets' storage.
        skips_unused: whether a bucket that this rank did not use is left out, as torch does when asked.
    """

    parameters: Sequence[Trained]
    fleet: Fleet
    ledger: Ledger
    exchange: Exchange
    group: Group
    weights: Weights
    buffers: ModuleBuffers
    recorder: Recorder
    outside: Sequence[int]
    as_views: bool
    skips_unused: bool


class Step:
    """Takes gradients in, sends buckets off, and hands averages out.

    Args:
        means: what it works with.
        number: which step it is, for errors.
        ranks: among how many ranks the sum is shared out.
        accumulated: a 1 for each slot that has a gradient from before.
        hold: let no bucket leave before the end of backward.
        patient: take no gradient before then, because users' hooks come after ours.

    Attributes:
        flight: what has been launched.
    """

    def __init__(
        self, means: Means, *, number: int, ranks: int, accumulated: bytearray, hold: bool, patient: bool
    ) -> None:
        self._means = means
        self._number = number
        self._ranks = ranks
        self._accumulated = accumulated
        self._patient = patient
        self._untaken: list[int] = []
        self._schedule = Schedule(len(means.fleet.buckets), hold=hold)
        self.flight = Flight(means.fleet, means.exchange, means.group, number, means.recorder)
        means.ledger.begin(accumulated)
        self._used = means.ledger.used

    def begin(self) -> None:
        """Get ready for the first gradient."""
        means = self._means
        means.recorder.backward_began(self._number)
        for bucket in means.fleet.buckets:
            bucket.begin()
        self.flight.begin(means.weights.total, self._ranks)

    def take_in(self, arrived: Sequence[int]) -> None:
        """Gradients of these slots have arrived."""
        prompt = [slot for slot in arrived if self._means.fleet.prompt[slot]]
        self._mark(arrived, prompt)
        self._untaken += arrived
        # With each large one too: small gradients in between would keep its memory from being used again.
        if prompt or len(self._untaken) >= BATCH:
            self._take_small(self._untaken)
            self._untaken = []
        self._means.group.make_progress()

    def shadow(self) -> None:
        """Have nothing to contribute, and say so."""
        for bucket in self._means.fleet.buckets:
            bucket.zero()  # in new storage: parameters may hold parts of the old
        self.flight.shadow()

    def finalise(self) -> Summary:
        """Backward has ended: send the rest, and average; returns what the ranks said of the step."""
        means = self._means
        means.recorder.backward_ended()
        self._send_rest()
        again = {number: self._second(number) for number in means.ledger.late}
        mistake = self.flight.land_all(hand_out=not self._weighed)
        summary = self.flight.read_waybill(self._report)
        if mistake is not None:
            raise mistake
        verdict.check(summary, self._number, means.group)
        settlement = Settlement(means.fleet, self.flight, summary, gain=means.exchange.gain)
        settlement.hand_out(late=self._weighed)
        for number in summary.late:
            settlement.add(number, again.get(number) or self._second(number, empty=True))
        if summary.thawed:
            # They were blended when they were reported.
            settlement.thaw(means.outside, self._factor, self._used, as_views=means.as_views)
        settlement.confirm()
        if self._weighed:
            means.weights.sync()
        return summary

    def _mark(self, arrived: Sequence[int], prompt: Sequence[int]) -> None:
        full = self._means.ledger.mark(arrived)
        self._take(prompt)
        for bucket in full:
            self._means.recorder.ready(bucket, self._means.ledger.closing[bucket])
            self._schedule.release(bucket)
        if full or self._means.exchange.serial:
            self._send_off()

    def _send_off(self) -> None:
        while self.flight.has_room and (number := self._schedule.pop()) is not None:
            self._launch(number)

    def _send_rest(self) -> None:
        for number in self._schedule.rest():
            if not self._skips(number):
                self.flight.make_room()
                self._launch(number)

    def _skips(self, number: int) -> bool:
        plan = self._means.fleet.plan
        may_skip = self._means.skips_unused and number != plan.carrier and not self.flight.is_shadow
        return may_skip and not any(self._used[slot] for slot in plan.buckets[number])

    def _take(self, slots: Sequence[int]) -> None:
        if self._patient or not slots:
            return
        means = self._means
        with torch.no_grad():
            for slot in means.ledger.ready(slots):
                if self._weighed:
                    means.weights.blend(slot)
                if means.parameters[slot].grad is not None:
                    means.fleet.bucket_of[slot].take(slot, self._factor)

    def _take_small(self, slots: Sequence[int]) -> None:
        if self._weighed or self._patient:  # each has to be blended, or its own hooks to run: at the end
            return
        ready = self._means.ledger.ready(slots)
        with torch.no_grad():
            for bucket, members in groupby(ready, key=self._means.fleet.bucket_of.get):
                # A slot that was thawed in another group may be watched and not planned.
                if bucket is not None:
                    bucket.take_small(members)

    def _launch(self, number: int) -> None:
        ledger = self._means.ledger
        ledger.mark_left(number)
        with torch.no_grad():
            bucket = self._means.fleet.buckets[number]
            self._fill(bucket, self._used, complete=ledger.is_as_expected(number))
            self.flight.launch(number, self._report)

    def _fill(self, bucket: Bucket, used: bytearray, *, complete: bool = False) -> None:
        if self._weighed:
            weights = self._means.weights
            for slot in bucket.slots:
                weights.blend(slot.index)
                if not weights.now:  # counts nothing
                    used[slot.index] = self._accumulated[slot.index]
        bucket.fill(self._factor, used, complete=complete and not self._weighed)

    def _second(self, number: int, *, empty: bool = False) -> Bucket:
        fleet = self._means.fleet
        bucket = fleet.bucket(fleet.plan.buckets[number], as_views=True)
        if empty:
            bucket.zero()
        else:
            self._fill(bucket, bytearray(len(self._used)))
        return bucket

    @property
    def _weighed(self) -> bool:
        return self._means.weights.now is not None

    @property
    def _factor(self) -> float:
        return 1.0 if self._weighed else self._means.exchange.factor(self._ranks)

    def _report(self) -> Report:
        means = self._means
        for slot in means.outside:
            parameter = means.parameters[slot]
            if self._weighed:
                means.weights.blend(slot)
            self._used[slot] = parameter.requires_grad and parameter.grad is not None
        return Report(
            used=self._used,
            late=means.ledger.late,
            thawed=any(self._used[slot] for slot in means.outside),
            buffers_changed=means.buffers.changed(),
            weight=means.weights.total,
            order=means.ledger.order,
        )
