"""One synced step: from the first gradient to everyone's averages.

Note [One step]. Every synced backward issues the same collectives on every rank. With plain averaging that
is one per bucket of the plan, in plan order, the last with the step report; with a hook, the hook's own, then
one for the report. What arrives after its bucket was launched is told in the report, and those buckets are
reduced once more, on every rank alike. A rank that raises sends the rest of its step as zeros and reports it,
so that the others raise too, and the next step finds all ranks at the same point.

Note [Unused parameters]. A parameter without a gradient counts as zeros in its bucket, which remembers the
old ``.grad`` (``fill``). The step report counts the ranks that used each parameter. When the counts are
known, a parameter that this rank did not use gets the average if another rank used it, and otherwise its old
``.grad`` back (``set_unused_grads``).
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from paceline.ddp.buckets.bucket_set import Bucket
from paceline.ddp.buckets.dense import CopyBatch, DenseBucket
from paceline.ddp.buckets.plan import BucketCaps, make_plan
from paceline.ddp.reducer.in_flight import InFlight
from paceline.ddp.reducer.pairing import StepCounts
from paceline.ddp.reducer.readiness import LaunchOrder
from paceline.ddp.reducer.report_checks import check_counts, check_hooks, check_reports, number_of_hook
from paceline.ddp.reducer.step_context import StepContext
from paceline.ddp.reducer.step_report import RankReport, StepOutcome, StepSummary
from paceline.watch.rank_page import Activity

# The largest number of small gradients that are copied together: enough to share the cost, few enough for
# the cache.
MOST_SMALL = 64
_UNCAPPED = BucketCaps((2**63,))
_AS_IT_IS = contextlib.nullcontext()


class Step:
    """Copies gradients into buckets, launches the buckets, and makes the averages ``.grad``.

    Args:
        context: what it works with.
        number: its number, for errors.
        ranks: the number of ranks that the sum is divided by.
        accumulated: a 1 for each slot that has a gradient from accumulation.
        counts: what the user has done since the last step.
        launch_late: launch no bucket before the end of backward.
        copy_late: copy no gradient before then either, because others look at ``.grad`` until the end.

    Attributes:
        in_flight: what has been launched.
        is_lost: whether the step was given up, here or on another rank.
    """

    is_lost = False

    def __init__(
        self,
        context: StepContext,
        *,
        number: int,
        ranks: int,
        accumulated: bytearray,
        counts: StepCounts,
        launch_late: bool,
        copy_late: bool,
    ) -> None:
        self._context = context
        self._number = number
        self._accumulated = accumulated
        self._counts = counts
        self._copy_late = copy_late
        self._is_weighted = context.weights.now is not None
        self._earlier_shards = context.earlier_shards
        self._factor = 1.0 if self._is_weighted else context.exchange.factor(ranks)
        self._order = LaunchOrder(len(context.bucket_set.buckets), launch_late=launch_late)
        self.in_flight = InFlight(
            context.bucket_set, context.layout, context.exchange, context.group, number, context.recorder
        )
        self._ranks = ranks
        # Once backward has ended: buckets of gradients that came late, and a report that travels by itself.
        self._late: dict[int, Bucket] | None = None
        self._own_report: RankReport | None = None

    def begin(self) -> None:
        """Get ready for the first gradient."""
        context = self._context
        context.recorder.backward_began(self._number)
        context.group.watch.mark(Activity.BACKWARD, self._number)
        context.readiness.begin(self._accumulated)
        context.non_finite.begin(self._number)
        for bucket in context.bucket_set.buckets:
            bucket.begin()
        self.in_flight.begin(context.weights.total, self._ranks)

    def add(self, slots: Sequence[int]) -> None:
        """Gradients of these slots have arrived: copy them, and launch the buckets that are full."""
        context = self._context
        full = context.readiness.mark(slots)
        if not self._copy_late and self._earlier_shards is None:
            with _without_grad():
                for bucket, batch in self._to_copy(slots):
                    bucket.copy_in(batch, self._factor)
        for number in full:
            context.recorder.ready(number, context.readiness.last_slot[number])
            self._order.mark_full(number)
        if full or context.exchange.one_at_a_time:
            while self.in_flight.has_room and (next_ := self._order.pop()) is not None:
                self._launch(next_)
        context.group.make_progress()

    def contribute_nothing(self, outcome: StepOutcome) -> None:
        """This rank has no inputs: contribute zeros, and report why."""
        for bucket in self._context.bucket_set.buckets:
            bucket.zero()
        self.in_flight.outcome = outcome

    def launch_rest(self) -> None:
        """Backward has ended, and ``finish`` comes later: launch the buckets that are left."""
        for number in self._end_backward():
            self._launch(number)
        if self._is_weighted:
            self._context.weights.leave_in_flight()

    def finish(self) -> StepSummary:
        """Backward has ended: launch the rest, make the averages ``.grad``; returns the ranks' reports."""
        for number in self._end_backward():
            self._launch(number)
        for bucket in self.in_flight.finished():
            if not self._is_weighted:
                bucket.set_grads()
        summary = self.in_flight.read_report(self._own_report)
        if self.in_flight.mistake is not None:
            raise self.in_flight.mistake
        self._check(summary)
        self._compare_replicas()
        self._set_remaining_grads(summary)
        self._reduce_again(summary)
        if self._context.group.may_change:
            self._drop_what_did_not_count(summary)
        if self._is_weighted:
            self._context.weights.finish()
        self._context.bucket_set.end_step()
        return summary

    def _check(self, summary: StepSummary) -> None:
        context = self._context
        check_reports(summary, context.group, self._number)
        if not context.group.may_change:
            if not context.exchange.carries_report:
                hooks = context.layout.read_hooks(context.bucket_set.report)
                check_hooks(hooks, context.exchange.signature, context.group)
            counts = context.layout.read_counts(context.bucket_set.report)
            check_counts(counts, context.pairing, summary, context.group, self._number)

    def _end_backward(self) -> Iterator[int]:
        """Gives the buckets that are left to launch, then takes what came late; nothing the second time."""
        context = self._context
        if self._late is not None:
            return
        context.recorder.backward_ended()
        for number in self._order.pop_remaining():
            if not self._skips(number):
                self.in_flight.wait_for_room()
                yield number
        self._late = {number: self._late_bucket(number) for number in context.readiness.late}
        if not context.bucket_set.report_in_bucket:
            self._own_report = self._report()

    def _to_copy(self, slots: Sequence[int]) -> list[tuple[Bucket, CopyBatch]]:
        """Those of the new gradients that can be copied now."""
        context, readiness = self._context, self._context.readiness
        if not self._is_weighted:
            is_like_last = readiness.is_like_last
            ready = slots if is_like_last else readiness.ready(slots)
            return context.bucket_set.batches(ready, again=is_like_last)
        # Small ones wait for the launch, because each is multiplied by itself.
        large = [slot for slot in readiness.ready(slots) if context.bucket_set.is_large[slot]]
        for slot in large:
            context.weights.apply(slot)
        return context.bucket_set.batches(large, again=False)

    def _launch(self, number: int) -> None:
        context = self._context
        context.readiness.mark_launched(number)
        bucket = context.bucket_set.buckets[number]
        if context.weights.now == 0:  # this pass counts nothing, earlier ones may
            context.readiness.set_used_as(self._accumulated, bucket.slots)
        with _without_grad():
            self._apply_weights(bucket)
            self._add_earlier_shards(bucket)
            complete = context.readiness.is_complete(number) and not self._is_weighted
            missing = bucket.fill(self._factor, None if complete else context.readiness.used)
            context.readiness.set_used(missing, used=False)
            if not context.group.may_change:  # its ranks cannot be told apart
                context.non_finite.look(bucket)
            report = None
            if number == context.bucket_set.plan.report_bucket:
                self._look_outside_plan()
                report = self._report() if context.bucket_set.report_in_bucket else None
            self.in_flight.launch(number, report)

    def _skips(self, number: int) -> bool:
        context = self._context
        plan = context.bucket_set.plan
        if not context.skip_unused or number == plan.report_bucket or self._has_no_inputs:
            return False
        return not any(context.readiness.used[slot] for slot in plan.buckets[number])

    @property
    def _has_no_inputs(self) -> bool:
        return self.in_flight.outcome in (StepOutcome.NO_INPUTS, StepOutcome.SKIPPED)

    def _apply_weights(self, bucket: Bucket) -> None:
        if self._is_weighted:
            for slot in bucket.slots:
                self._context.weights.apply(slot.index)

    def _add_earlier_shards(self, bucket: Bucket) -> None:
        """Add the sums of this rank's earlier shards, or have them reduced beside the last one's."""
        if isinstance(bucket, DenseBucket):
            if self._earlier_shards is not None:
                for gradients in self._earlier_shards.add_to_last([slot.index for slot in bucket.slots]):
                    bucket.keep_apart(gradients)
        elif (sums := self._context.shard_sums) is not None:
            sums.add_to_last([slot.index for slot in bucket.slots], all_nodes=True)

    def _look_outside_plan(self) -> None:
        """Find gradients of slots that the plan does not cover: parameters that were unfrozen."""
        context = self._context
        for slot in context.outside:
            if self._is_weighted:
                context.weights.apply(slot)
            parameter = context.parameters.local[slot]
            is_earlier = self._earlier_shards is not None and bool(self._accumulated[slot])
            has_gradient = parameter.grad is not None or is_earlier
            context.readiness.set_used([slot], used=parameter.requires_grad and has_gradient)

    def _report(self) -> RankReport:
        context, readiness = self._context, self._context.readiness
        buffers_changed = context.buffers.changed()
        if context.non_finite.is_found:
            names = [slot.name for slot in context.parameters.slots]
            context.non_finite.note(context.group, names, readiness.order)
        return RankReport(
            used=readiness.used,
            late=readiness.late,
            unfrozen=any(readiness.used[slot] for slot in context.outside),
            buffers_changed=buffers_changed,
            weight=self._total_weight(),
            order=readiness.order,
            counts=self._counts,
            digest=self._digest(buffers_changed=buffers_changed),
            non_finite=context.non_finite.is_found,
            hook=number_of_hook(context.exchange.signature),
        )

    def _total_weight(self) -> float | None:
        total = self._context.weights.total
        if total is None or self._earlier_shards is None:
            return total
        return total + self._earlier_shards.weight

    def _digest(self, *, buffers_changed: bool) -> int:
        """The digest of this rank's replica; 0 if replicas may differ, so that nobody compares."""
        context = self._context
        if context.audit is None or self._has_no_inputs or not context.exchange.supports_join:
            return 0
        return context.audit.digest(self._number, buffers_changed=buffers_changed)

    def _compare_replicas(self) -> None:
        context = self._context
        if context.audit is not None:
            digests = context.layout.read_digests(context.bucket_set.report)
            context.audit.compare(digests, context.group, self._number)

    def _set_remaining_grads(self, summary: StepSummary) -> None:
        """Set what had to wait for the reports: weighted averages, and parameters unused on this rank."""
        for bucket in self._context.bucket_set.buckets:
            if self._divide_by_what_counts(bucket, summary) or self._is_weighted:
                bucket.set_grads()
            bucket.set_unused_grads(summary.used)

    def _drop_what_did_not_count(self, summary: StepSummary) -> None:
        """Take off gradients that only this rank has, if the group sent zeros instead, also for its report.

        A group whose ranks change does so while a rank has not got the others' parameters yet. They have no
        gradient either, and optimizers would tell zeros from none.
        """
        context = self._context
        context.parameters.clear_grads(
            [slot for slot, used in enumerate(context.readiness.used) if used and not summary.used[slot]]
        )

    def _divide_by_what_counts(self, bucket: Bucket, summary: StepSummary) -> bool:
        """Divide by the total weight, or by the ranks that count, if only now these are known."""
        total, skipped = summary.total_weight, len(summary.skipped)
        if total is not None:
            bucket.scale(self._context.exchange.sum_per_result / total if total else 0.0)
        elif skipped:  # the gradients were divided by the number of all ranks
            bucket.scale(self._ranks / (self._ranks - skipped) if skipped < self._ranks else 0.0)
        return total is not None or bool(skipped)

    def _reduce_again(self, summary: StepSummary) -> None:
        """Reduce what came after its bucket was launched, and what the plan has no bucket for."""
        bucket_set = self._context.bucket_set
        for number in summary.late:
            more = (self._late or {}).get(number) or self._late_bucket(number, empty=True)
            self._average(more, number, summary)
            bucket_set.buckets[number].add_to_grads(more)  # type: ignore[arg-type]  # of the same kind
        if summary.unfrozen:
            self._average_outside_plan(summary)
        if summary.late or summary.unfrozen:
            self.in_flight.confirm()

    def _late_bucket(self, number: int, *, empty: bool = False) -> Bucket:
        """A second bucket of the same slots, with the gradients that came late."""
        bucket = self._context.bucket_set.another(number)
        if empty:
            bucket.zero()
        else:
            self._apply_weights(bucket)
            bucket.fill(self._factor, self._context.readiness.used)
        return bucket

    def _average_outside_plan(self, summary: StepSummary) -> None:
        context = self._context
        found = [slot for slot in context.outside if summary.used[slot]]
        for members in make_plan(context.parameters.slots, found, _UNCAPPED).buckets:
            if members:
                bucket = context.bucket_set.for_slots(members)
                self._add_earlier_shards(bucket)
                bucket.fill(self._factor, context.readiness.used)
                self._average(bucket, len(context.bucket_set.buckets), summary)
                bucket.set_grads()
                bucket.set_unused_grads(summary.used)

    def _average(self, bucket: Bucket, number: int, summary: StepSummary) -> None:
        self.in_flight.average(bucket, number)
        self._divide_by_what_counts(bucket, summary)


def _without_grad() -> contextlib.AbstractContextManager[None]:
    """No grad mode. It is off already in most backward passes, and ``torch.no_grad`` takes microseconds."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS
