"""Averages gradients across ranks while backward still runs.

A Reducer lives as long as its wrapper. It knows which bucket plan is in force, what has been accumulated, and
whether a backward is running. Each synced backward is a Step of its own, see Note [One step].

Note [Linearity]. What is averaged is the whole ``.grad``. What is equal on all ranks already is its own
average, so averaging old plus new gives old plus the average of new: a second backward, or one that follows
accumulation, comes out right.

Note [Ranks that change]. A group may have other ranks in each step: one dies, another joins, as in torchft's
groups. Such a group drops failed collectives and tells its manager, and the step is repeated. So here a rank
that raises does not tell the others, which would raise too. Nothing that a new rank cannot know decides which
collectives there are: the plan follows the order of the parameters, and the report does not tell ranks apart.
"""

import contextlib
import dataclasses
import enum
import operator
import os
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.ddp.audit.audit import Audit
from paceline.ddp.buckets.bucket_set import BucketOptions
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.reducer.accumulation import Accumulation
from paceline.ddp.reducer.after_step import AfterStep
from paceline.ddp.reducer.auto_tuner import AutoTuner
from paceline.ddp.reducer.autograd_hooks import GradHooks, current_backward
from paceline.ddp.reducer.group_turns import turns_of
from paceline.ddp.reducer.nonfinite import NonFiniteGradients
from paceline.ddp.reducer.pairing import Pairing
from paceline.ddp.reducer.plan_in_force import PlanInForce
from paceline.ddp.reducer.planner import Planner, PlanStage
from paceline.ddp.reducer.raised_errors import tell_error_of_backward
from paceline.ddp.reducer.shard_sums import ShardSums
from paceline.ddp.reducer.step import Step
from paceline.ddp.reducer.step_context import StepContext, lay_out
from paceline.ddp.reducer.step_report import StepOutcome, StepSummary
from paceline.ddp.reducer.strict_checks import StrictChecks
from paceline.ddp.reducer.user_counts import UserCounts
from paceline.ddp.reducer.variants.compiled_graph import traced_reduction
from paceline.ddp.reducer.variants.distributed_autograd import DistributedAutograd
from paceline.ddp.state.buffers import BufferHookLocation, ModuleBuffers
from paceline.ddp.state.parameters import ReducedParameters
from paceline.ddp.state.part_parameters import PartParameters
from paceline.errors import OptionError, StepError, UnsupportedError
from paceline.recording.recorder import Recorder
from paceline.recording.rows import StepKind
from paceline.watch.rank_page import Activity

# See _in_forked_child.
_reducers: "weakref.WeakSet[Reducer]" = weakref.WeakSet()


def _in_forked_child() -> None:
    """A forked child is no rank: what it trains is its own."""
    for reducer in list(_reducers):
        reducer.grad_hooks.remove()


os.register_at_fork(after_in_child=_in_forked_child)


class Phase(enum.Enum):
    """What the reducer does with gradients: nothing has begun, only accumulate, or average.

    LAUNCHED: backward has ended, all buckets are launched, and the user will say when the step ends.
    """

    IDLE = enum.auto()
    ACCUMULATING = enum.auto()
    SYNCING = enum.auto()
    LAUNCHED = enum.auto()


class Reducer:
    """Averages one module's gradients, step by step.

    Args:
        parameters: every parameter that may get a gradient, now or once it is unfrozen.
        group: the ranks to average with.
        exchange: how buckets are averaged.
        planner: makes the bucket plans.
        buffers: the module's buffers; in each step ranks tell each other whether theirs have changed.
        recorder: records what happens when.
        after_step: what follows a step that has ended well.
        bucket_options: how buckets are made.
        strict: raises where torch's reducer raises.
        audit: compares replicas across ranks, unless it is switched off.
        shard_sums: adds up the gradients of this rank's shards, if a step's batch is in shards.

    Attributes:
        syncs: whether backward passes are synced; ``no_sync`` switches it off.
        finalizes_manually: whether a step ends by ``finalize``, and not with its backward.
        ranks: what the next step's sum is divided by: the number of ranks, or of shards.
        step_number: the number of steps so far.
        ended_well: how many of them were not lost.
        counts: what the user has done since the last step.
        is_step_new: whether the last step brought other gradients than the one before.
        last_summary: what the ranks reported of the last step.
        last_error: the last error in words.
        unraised: what the last step ended with, if its user has not been told.
        accumulation: what passes that were not synced have left.
        turns: the reducers of the group, which take turns.
        distributed_autograd: watches backward passes of distributed autograd.
    """

    def __init__(
        self,
        parameters: ReducedParameters,
        group: Group,
        exchange: Exchange,
        planner: Planner,
        buffers: ModuleBuffers,
        recorder: Recorder,
        after_step: AfterStep,
        bucket_options: BucketOptions,
        *,
        strict: StrictChecks | None,
        audit: Audit | None = None,
        shard_sums: ShardSums | None = None,
    ) -> None:
        self.planner = planner
        self.after_step = after_step
        self.accumulation = Accumulation(parameters.local)
        self.strict = strict
        self.syncs = True
        self.finalizes_manually = False
        self._sync_next = False
        self.ranks = group.size if shard_sums is None else shard_sums.tree.shards
        self.step_number = self.ended_well = 0
        self.counts = UserCounts(recorder)
        self._may_abandon = True
        self.is_step_new = True
        self.last_summary: StepSummary | None = None
        self.last_error: str | None = None
        self.unraised: BaseException | None = None
        self._lock = threading.RLock()  # gradients on several devices arrive in several threads
        self._phase = Phase.IDLE
        self._step: Step | None = None
        # What the step that has ended well is to raise, once all that follows it is done.
        self._raised_at_end: BaseException | None = None
        self._launched = 0
        self.distributed_autograd = DistributedAutograd(self, parameters)
        self.grad_hooks = GradHooks(
            parameters.local,
            self._on_grads,
            in_graph=traced_reduction(self),
        )
        weakref.finalize(self, self.grad_hooks.remove)
        _reducers.add(self)
        self.turns = turns_of(group.process_group)
        self.turns.join(self)
        context = StepContext(
            parameters=parameters,
            group=group,
            exchange=exchange,
            weights=self.accumulation.weights,
            pairing=Pairing(),
            non_finite=NonFiniteGradients(),
            buffers=buffers,
            recorder=recorder,
            skip_unused=strict is not None and strict.skip_unused,
            audit=audit,
            shard_sums=shard_sums,
            **lay_out(planner, parameters, group, exchange, bucket_options, with_digests=audit is not None),
        )
        self._plan = PlanInForce(
            planner, context, bucket_options, self.grad_hooks, acts_on_all=strict is not None
        )
        self._refuse_weights()
        self._tuner: AutoTuner | None = None

    @property
    def context(self) -> StepContext:
        """What steps work with."""
        return self._plan.context

    @property
    def group(self) -> Group:
        """The ranks to average with."""
        return self.context.group

    @property
    def exchange(self) -> Exchange:
        """How buckets are averaged."""
        return self.context.exchange

    @property
    def recorder(self) -> Recorder:
        """Records what happens when."""
        return self.context.recorder

    @property
    def _all_ranks(self) -> int:
        sums = self.context.shard_sums
        return self.group.size if sums is None else sums.tree.shards

    @property
    def is_weighted(self) -> bool:
        """Whether contributions count by a weight."""
        return self.accumulation.is_weighted

    @property
    def is_syncing(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._phase is Phase.SYNCING

    @property
    def is_launched(self) -> bool:
        """Whether all buckets are launched, and the step ends by ``finalize``."""
        return self._phase is Phase.LAUNCHED

    @property
    def is_nested(self) -> bool:
        """Whether another wrapper averages the same gradients, inside or around this one."""
        return self.grad_hooks.nested

    @property
    def uses_rebuilt_plan(self) -> bool:
        """Whether the plan in force was learned from the first backward."""
        return self._plan.is_rebuilt

    @property
    def launched(self) -> int:
        """The number of buckets that were launched in the last step."""
        return self._launched if self._step is None else len(self._step.in_flight.launched)

    def prepare(self, *, nested: bool = False) -> None:
        """Get ready for a forward.

        Args:
            nested: whether another wrapper averages the same gradients, inside or around this one.
        """
        with self._lock:
            self.grad_hooks.nested = nested
            if self._phase is Phase.IDLE:
                self._get_ready()

    def before_forward(self, *, may_repeat: bool) -> None:
        """A synced forward is about to be called: see Note [Forwards without a backward].

        Args:
            may_repeat: whether a forward without a backward is nothing unusual.
        """
        usual = self.context.pairing.usual_forwards
        if usual is None or self.counts.forwards < usual or may_repeat or not self._may_abandon:
            return
        if self._phase is Phase.IDLE and current_backward() == -1 and self.group.group_notes.can_be_left:
            # Not twice in a row: this rank does something else than to leave out batches.
            self._may_abandon = self.turns.abandon_forward(self)

    def expect_backward(self, *, training: bool = True) -> None:
        """A forward was called whose backward will be synced."""
        self.counts.add_forward(training=training)
        self.turns.expect(self)

    def begin(self, *, synced: bool) -> None:
        """Start a step or an accumulating pass in the running backward, unless one has started.

        Args:
            synced: whether its forward was not under ``no_sync``.
        """
        if self.grad_hooks.removed:
            return
        synced = self.syncs and (synced or self._sync_next)
        with self._lock:
            self.check_finalized()
            if synced and self.context.shard_sums is not None and not self.is_syncing:
                self.context.shard_sums.check_synced(weighted=self.is_weighted)
            if self._phase is Phase.IDLE:
                if self.turns.is_at_work(self):
                    raise StepError(
                        "a gradient came after finalize_backward() had been called in the same backward; "
                        f"call it after backward ({self.where})"
                    )
                self.turns.begin(self)
                self.context.parameters.begin_backward()
                self.grad_hooks.expect()
                self._phase = Phase.ACCUMULATING
                if not synced:
                    self.recorder.accumulation_began()
                if self.is_weighted:
                    self.accumulation.weights.begin()
            if synced and self._phase is Phase.ACCUMULATING:
                self._start_step()
            self.accumulation.refuse_mixed()

    def begin_distributed(self) -> None:
        """A backward of distributed autograd has begun: see Note [Gradients of a context]."""
        if self.is_weighted or self.finalizes_manually:
            # Kept as well: distributed autograd loses the words of an error.
            what = (
                "contributions cannot be weighed"
                if self.is_weighted
                else "a step cannot be finalized manually"
            )
            self.last_error = f"{what} in distributed autograd"
            raise UnsupportedError(self.last_error)
        self.begin(synced=True)

    def sync_next_backward(self) -> None:
        """Sync the next backward, also that of a forward under ``no_sync``."""
        self._sync_next = True
        self.expect_backward()

    def watch_context(self, context: int, output: Any) -> Any:
        """A forward was called in a context of distributed autograd; returns the output to use instead."""
        return self.distributed_autograd.watch(context, output, self.planner.order)

    def run_empty_step(self, outcome: StepOutcome = StepOutcome.NO_INPUTS) -> None:
        """Take part in a step of the other ranks with zeros; parameters get the averages as theirs do."""
        with self._lock:
            self.accumulation.clear()
            self._start_step()
            self._current.contribute_nothing(outcome)
            self._finish_now()

    def skip(self) -> None:
        """Take part in a step of others with what was accumulated, or with zeros that do not count."""
        with self._lock:
            self.turns.expect_no_more(self)
            if self.accumulation.is_left():
                self._sync_accumulated()
                return
            self.accumulation.drop()
            parameters = self.context.parameters
            before = [parameter.grad for parameter in parameters.local]
            parameters.clear_grads()
            self.run_empty_step(StepOutcome.SKIPPED)
            assert self.last_summary is not None
            for slot, grad in enumerate(before):
                if not self.last_summary.used[slot]:
                    parameters.local[slot].grad = grad

    def _sync_accumulated(self) -> None:
        """Average what passes under ``no_sync`` have left, as if a forward and a backward had followed."""
        for _ in range(self.counts.forwards, self.context.pairing.usual_forwards or 1):
            self.counts.add_forward()
        earlier = self.context.earlier_shards
        with self.accumulation.adding_nothing(weighted=earlier is not None and earlier.is_weighted):
            self._start_step()
            self._finish_now()

    def _finish_now(self) -> None:
        self.finish()
        if self.is_launched:
            self.finalize()
        self.follow_up()

    def end_shared_backward(self) -> None:
        """A backward has ended that other reducers took part in; some of them may finish before this one."""
        if self.is_syncing:
            self.recorder.shared_backward_ended()

    def finish(self) -> None:
        """Backward has ended: average the gradients, or launch them; raise and drop them if it cannot."""
        with self._lock, torch.no_grad(), self._keeping_error():
            if self._phase is Phase.ACCUMULATING:
                self._on_grads()
                self._become_idle()
                self.recorder.accumulated()
            elif self.is_syncing:
                with self._dropping_if_lost(), self.distributed_autograd.in_grad() as arrived:
                    self.grad_hooks.add(arrived)
                    self._on_grads()
                    if self.finalizes_manually:
                        self._leave_launched()
                    else:
                        self._learn(self._current.finish())
                if not self.finalizes_manually:
                    self._tune()

    def missing(self) -> list[str]:
        """The names of the parameters of which the running step still expects a gradient."""
        with self._lock:
            self._on_grads()
            return [self.context.parameters.slots[slot].name for slot in self.context.readiness.unready()]

    def finalize(self) -> None:
        """End a step that ``finish`` has only launched: average the gradients, or raise and drop them."""
        with self._lock, torch.no_grad(), self._keeping_error():
            with self._dropping_if_lost():
                self._learn(self._current.finish())
            self._tune()

    def follow_up(self) -> None:
        """Do what follows a step that has ended well: what raises here does not lose the step."""
        assert self.last_summary is not None
        with self._keeping_error(), self._raising_at_end():
            self.after_step.run(self.exchange, self.last_summary)
            if self.last_summary.non_finite:
                self.context.non_finite.tell(self.group, self.last_summary.non_finite)

    def give_up(self, outcome: StepOutcome, reason: str | None) -> None:
        """Tell the other ranks, by the rest of this step's collectives, that the step is lost.

        Args:
            outcome: how it was lost.
            reason: why; None if the running backward is about to raise it.
        """
        with self._lock, torch.no_grad():
            if self.group.may_change:
                self.drop()
                return
            if self._phase is not Phase.SYNCING:
                self._start_step()
            try:
                in_flight = self._current.in_flight
                if in_flight.broken is None:
                    tell = partial(self.group.peer_notes.note_reason, self.step_number)
                    if reason is None:
                        tell_error_of_backward(tell)
                    else:
                        tell(reason)
                    in_flight.launch_zeros(outcome)
            finally:
                self.drop()

    def drop(self, *, counts: bool = False) -> None:
        """Forget a step that is lost, with all gradients: the same on every rank.

        Args:
            counts: whether it counts as a step though nothing of it was launched.
        """
        context = self.context
        # A step that was lost before has been counted.
        is_new = self._step is not None and not self._step.is_lost
        counts = counts or (is_new and self._current.in_flight.has_begun)
        # What is in flight still reads and writes the storage.
        if self._step is not None:
            self._step.is_lost = True
        context.group.finish_in_background()
        context.recorder.step_ended(StepKind.LOST)
        for bucket in context.bucket_set.buckets:
            bucket.reset()
        context.parameters.clear_grads(self.planner.order)
        context.buffers.is_synced = False
        self.accumulation.drop()
        if context.audit is not None:
            context.audit.forget_step()
        self.ranks = self._all_ranks
        self.turns.expect_no_more(self)
        self.counts.begin()
        self.step_number += counts
        self._become_idle()

    def is_awaited(self) -> bool:
        """Whether another rank waits for this step."""
        return self.group.peer_notes.is_awaited(self.step_number)

    def are_buffers_awaited(self) -> bool:
        """Whether another rank waits for module buffers that this one has not sent in this step."""
        return self._owes_buffers and self.group.watch.are_buffers_awaited()

    def send_buffers(self) -> None:
        """Take part in the others' broadcast of module buffers, if this rank has called no forward for it."""
        if self._owes_buffers:
            self.context.buffers.sync(self.group)

    @property
    def _owes_buffers(self) -> bool:
        buffers = self.context.buffers
        return buffers.will_sync(BufferHookLocation.PRE_FORWARD) and not buffers.is_synced

    def note_lost_backward(self) -> None:
        """An exception was raised in backward."""
        refused = None if self.strict is None else self.strict.error
        self.last_error = refused or f"an exception in backward of step {self.step_number}"
        if self._phase is Phase.ACCUMULATING:
            self._become_idle()
            self.recorder.accumulated()

    def weigh(self, weight: float) -> contextlib.AbstractContextManager[None]:
        """Count what backward adds inside by a weight."""
        self.check_finalized()
        if self.context.shard_sums is not None and float(weight) % 1:
            raise OptionError(
                "with shards, weights must be whole numbers, such as counts of tokens: their sum must not "
                f"depend on its order (weight: {weight})"
            )
        return self.accumulation.weigh(weight)

    def use(self, exchange: Exchange) -> None:
        """Average by another exchange from now on."""
        self.check_finalized()
        self._wait_for_lost_step()
        self._plan.adopt(self.group, exchange)

    def tune(self, tuner: AutoTuner) -> None:
        """Average by a tuner's hook from now on, as the tuner decides; every rank calls this at once."""
        self.use(tuner.exchange_in(self.group))
        self._tuner = tuner
        tuner.begin(self.context)
        self._plan.describe()

    def use_parts(self, parameters: PartParameters, exchange: Exchange) -> None:
        """Give each rank its part of the averages from now on; also if parts have changed."""
        self.check_finalized()
        self._wait_for_lost_step()
        self._tuner = None  # parts are averaged in one way
        self._plan.use_parts(parameters)
        self._plan.adopt(self.group, exchange)

    def move_to(
        self, group: Group, *, step: int = 0, audit: Audit | None = None, has_lost_ranks: bool = False
    ) -> None:
        """Go on with another group, as if training began anew.

        Args:
            group: the other group.
            step: the number of the next step.
            audit: what compares its replicas; None to keep what there is.
            has_lost_ranks: whether the group before may have lost some.
        """
        self.check_finalized()
        if self._step is not None and (has_lost_ranks or self._step.in_flight.broken is not None):
            self._step = None  # nothing of it will ever come
        try:
            self._wait_for_lost_step()
        except (RuntimeError, OSError):  # the old group fails again
            self._step = None
        self.turns.leave(self)
        self.turns = turns_of(group.process_group)
        self.turns.join(self)
        self.step_number = step
        self.counts.begin()
        self.planner.restart()
        self._plan.context = dataclasses.replace(
            self.context,
            pairing=Pairing(),
            non_finite=NonFiniteGradients(),
            audit=audit or self.context.audit,
        )
        self.context.buffers.forget()
        if self.context.audit is not None:
            self.context.audit.restart()
        # What the tuner decides by is the same on all ranks of the group, which may come from several.
        exchange = self.exchange.for_group(group) if self._tuner is None else self._tuner.exchange_in(group)
        self._plan.adopt(group, exchange)
        self.ranks = self._all_ranks
        self._refuse_weights()
        if self._tuner is not None:
            self._tuner.restart(self.planner)

    def check_finalized(self) -> None:
        """Raise if the user has to end a step first."""
        if self.turns.awaits_finalize(self):
            raise StepError(
                "Expected to have finalized the prior backward pass before starting a new one; call "
                f"finalize_backward() once after each synced backward ({self.where})"
            )

    def check_finished(self) -> None:
        """Raise if a backward has begun and not ended."""
        self.check_finalized()
        if self._phase is not Phase.IDLE:
            raise StepError(f"step {self.step_number} has not been finished (rank: {self.group.global_rank})")

    def _refuse_weights(self) -> None:
        if self.group.may_change:
            self.accumulation.no_weights = (
                "contributions cannot be weighed in a process group whose ranks may change"
            )

    def _on_grads(self) -> None:
        """Take in the gradients that have arrived since the last call."""
        with self._lock:
            slots = self.grad_hooks.new()
            if self._phase in (Phase.IDLE, Phase.LAUNCHED):  # a backward that did not begin at our outputs
                self.begin(synced=True)
            if self._phase is Phase.ACCUMULATING:
                self.accumulation.add(slots)
                return
            if self.strict is not None:
                for slot in slots:
                    self.strict.mark(slot)
            self._current.add(slots)

    def _start_step(self) -> None:
        self.turns.finish_launched()
        self._get_ready()
        copy_late = self.grad_hooks.nested or not self.grad_hooks.run_last()  # others read ``.grad`` after us
        if self.group.may_change:
            self.ranks = self.group.count_ranks()
        if self._phase is Phase.IDLE:
            self.context.parameters.begin_backward()
        self._phase = Phase.SYNCING
        self._step = Step(
            self.context,
            number=self.step_number,
            ranks=self.ranks,
            accumulated=self._accumulated(),
            counts=self.counts.now(),
            launch_late=self.planner.stage is PlanStage.GUESS or copy_late or self.turns.is_shared(self),
            copy_late=copy_late,
        )
        self._step.begin()

    def _accumulated(self) -> bytearray:
        """A 1 for each slot that has a gradient from before this backward."""
        earlier = self.context.earlier_shards
        if earlier is None:
            return self.accumulation.slots
        return bytearray(map(operator.or_, self.accumulation.slots, earlier.used()))

    def keep_shard(self) -> None:
        """Take off the gradients of a shard whose passes were not synced, because others follow."""
        sums = self.context.shard_sums
        assert sums is not None
        with self._lock, torch.no_grad():
            weights = self.accumulation.weights
            sums.keep(weights.earlier if weights.has_earlier else None)
            self.accumulation.drop()

    def sync_last_shard(self) -> None:
        """Take part in the step though the last shard had no synced backward."""
        with self._lock, torch.no_grad():
            self.turns.expect_no_more(self)
            self._sync_accumulated()

    @property
    def _current(self) -> Step:
        assert self._step is not None
        return self._step

    def _get_ready(self) -> None:
        """Adopt a new plan and put hooks in place."""
        self._wait_for_lost_step()
        if self.strict is not None:
            self.strict.begin()
        if not self.ended_well:
            self.after_step.find_optimizers()
        if self.exchange.settle() or not self._plan.is_latest:
            self._plan.adopt(self.group, self.exchange)
        self.grad_hooks.attach()
        self.context.parameters.keep_hooks()
        if current_backward() == -1:
            self.grad_hooks.settle()
            self.grad_hooks.move_to_end()

    def _learn(self, summary: StepSummary) -> None:
        context = self.context
        context.parameters.end_step()
        self.is_step_new = self._plan.learn(summary)
        context.buffers.learn(changed=summary.buffers_changed or context.group.may_change)
        self.last_summary = summary
        if not self.distributed_autograd.is_pending:
            self.accumulation.clear()
        self.ranks = self._all_ranks
        self.step_number += 1
        self.ended_well += 1
        self.counts.begin()
        self._may_abandon = True
        has_inputs = self._current.in_flight.outcome is StepOutcome.FINE
        self.recorder.step_ended(StepKind.ORDINARY if has_inputs else StepKind.NO_INPUTS)
        self._raised_at_end = self._current.in_flight.interrupt
        # What was in flight holds the buckets' storage.
        self._launched, self._step = self.launched, None
        self._become_idle()

    def _tune(self) -> None:
        """Let the hook "auto" decide after a step.

        What raises here is raised after what follows the step: the hook has yet to keep what it left out, and
        other wrappers have yet to end their steps.
        """
        if self._tuner is None:
            return
        before = self.exchange.description
        try:
            with self.group.watch.waiting(Activity.TUNING, self.step_number, then=Activity.OUTSIDE):
                self._tuner.after_step(self.context, self.planner)
        except BaseException as error:
            self._raised_at_end = self._raised_at_end or error
        if self.exchange.description != before:
            self._plan.describe()

    def _leave_launched(self) -> None:
        """Launch what is left, and have it reduced while the user does something else."""
        self._current.launch_rest()
        self._phase = Phase.LAUNCHED
        self.grad_hooks.clear()
        self.group.finish_in_background()

    @property
    def where(self) -> str:
        """The step's number and the rank, for errors."""
        return f"step: {self.step_number}, rank: {self.group.global_rank}"

    def _become_idle(self) -> None:
        self._phase = Phase.IDLE
        self.group.watch.mark(Activity.OUTSIDE, self.step_number)
        self._sync_next = False
        self.distributed_autograd.clear()
        self.grad_hooks.clear()

    @contextlib.contextmanager
    def _dropping_if_lost(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop()
            self.turns.drop_others(self)
            raise

    @contextlib.contextmanager
    def _raising_at_end(self) -> Iterator[None]:
        """Raise what the step that has ended is to raise, also if something else is raised before."""
        try:
            yield
        finally:
            if self._raised_at_end is not None:
                try:
                    raise self._raised_at_end
                finally:
                    self._raised_at_end = None

    @contextlib.contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.last_error = f"{type(error).__name__}: {error}"
            raise

    def _wait_for_lost_step(self) -> None:
        """Wait for what a lost step has in flight: it reads and writes the buckets' storage."""
        if self._step is not None and self._step.is_lost:
            self._step.in_flight.wait_for_remaining()
            self._step = None
            self.context.bucket_set.end_step()
