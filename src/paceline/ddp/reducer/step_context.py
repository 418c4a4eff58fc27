"""What a step works with; the parts that depend on the bucket plan are made anew with each plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from paceline.comm.group import Group
from paceline.ddp.audit.audit import Audit
from paceline.ddp.buckets.bucket_set import BucketOptions, BucketSet
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.reducer.nonfinite import NonFiniteGradients
from paceline.ddp.reducer.pairing import Pairing
from paceline.ddp.reducer.planner import Planner
from paceline.ddp.reducer.readiness import Readiness
from paceline.ddp.reducer.shard_sums import ShardSums
from paceline.ddp.reducer.step_report import ReportLayout
from paceline.ddp.reducer.weights import Weights
from paceline.ddp.state.buffers import ModuleBuffers
from paceline.ddp.state.parameters import ReducedParameters
from paceline.recording.recorder import Recorder


@dataclass(frozen=True)
class StepContext:
    """What a step works with, as it is when the step begins.

    Attributes:
        parameters: of all slots.
        bucket_set: the plan's buckets.
        layout: of the step report.
        readiness: which slots are ready.
        outside: slots that the plan does not cover.
        exchange: how buckets are averaged.
        group: the ranks.
        weights: what contributions count.
        pairing: compares what the user does on each rank.
        non_finite: looks for gradients that are not finite.
        buffers: the module's buffers; the report says whether they have changed.
        recorder: records what happens when.
        skip_unused: whether to skip buckets that this rank did not use, as torch does when asked.
        audit: compares replicas across ranks, unless it is switched off.
        shard_sums: sums of this rank's earlier shards, if a step's batch is in shards.
    """

    parameters: ReducedParameters
    bucket_set: BucketSet
    layout: ReportLayout
    readiness: Readiness
    outside: Sequence[int]
    exchange: Exchange
    group: Group
    weights: Weights
    pairing: Pairing
    non_finite: NonFiniteGradients
    buffers: ModuleBuffers
    recorder: Recorder
    skip_unused: bool
    audit: Audit | None = None
    shard_sums: ShardSums | None = None

    @property
    def earlier_shards(self) -> ShardSums | None:
        """The sums of this rank's earlier shards in this step, if there are any."""
        return self.shard_sums if self.shard_sums is not None and self.shard_sums.has_earlier else None

    def begin_buffer_watch(self) -> None:
        """From now on module buffers should not change."""
        if self.audit is not None:
            self.audit.watch.begin()

    def end_buffer_watch(self) -> None:
        """From now on module buffers may change."""
        if self.audit is not None:
            self.audit.watch.end()


class PlanParts(TypedDict):
    """The parts of a StepContext that depend on the plan."""

    layout: ReportLayout
    bucket_set: BucketSet
    readiness: Readiness
    outside: Sequence[int]


def lay_out(
    planner: Planner,
    parameters: ReducedParameters,
    group: Group,
    exchange: Exchange,
    options: BucketOptions,
    *,
    with_digests: bool,
) -> PlanParts:
    """What the plan in force needs; the buckets' storage comes when it is first needed."""
    plan = planner.plan
    layout = ReportLayout(
        slots=len(parameters.slots),
        buckets=len(plan.buckets),
        world=0 if group.may_change else group.size,
        with_order=planner.learns_order,
        with_digests=with_digests,
    )
    # See Note [Reports on the host].
    on_accelerator = any(parameter.device.type != "cpu" for parameter in parameters.local)
    report_on_host = on_accelerator and group.may_tell_on_host
    bucket_set = BucketSet(
        plan,
        parameters.slots,
        parameters.local,
        report_numel=layout.numel,
        report_in_bucket=exchange.carries_report and not report_on_host,
        report_on_host=report_on_host,
        options=options,
        empty=group.empty,
    )
    return PlanParts(
        layout=layout,
        bucket_set=bucket_set,
        readiness=Readiness(plan, len(parameters.slots)),
        outside=planner.outside(),
    )
