"""Steps in one process: what a step works with, and other ranks whose gradients a test chooses."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.ddp.buckets.bucket_set import BucketOptions, BucketSet
from paceline.ddp.buckets.plan import BucketPlan, Slot
from paceline.ddp.exchange.average import Average
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.recorder_setup import make_recorder
from paceline.ddp.reducer.nonfinite import NonFiniteGradients
from paceline.ddp.reducer.pairing import Pairing, StepCounts
from paceline.ddp.reducer.readiness import Readiness
from paceline.ddp.reducer.step import Step
from paceline.ddp.reducer.step_context import StepContext
from paceline.ddp.reducer.step_report import RankReport, ReportLayout, StepSummary
from paceline.ddp.reducer.weights import Weights
from paceline.ddp.state.buffers import ModuleBuffers
from paceline.ddp.state.parameters import ReducedParameters, Slots
from paceline.recording.writer import PlanDescription
from paceline.testing import ScriptedCall, ScriptedGroup

CPU = torch.device("cpu")
GradsBySlot = Mapping[int, Tensor]


def random_parameters(*shapes: Any, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """One parameter of random values per shape; an int stands for that many elements."""
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def random_grads(parameters: Sequence[nn.Parameter], *slots: int) -> dict[int, Tensor]:
    """A random gradient for each of these slots, by default for all."""
    return {slot: torch.randn_like(parameters[slot]).detach() for slot in slots or range(len(parameters))}


def slots_of(parameters: Sequence[nn.Parameter], *, sparse: Collection[int] = ()) -> list[Slot]:
    """The slots of parameters that are called p0, p1 and so on."""
    return [
        Slot(at, f"p{at}", each.numel(), each.nbytes, f"{each.dtype} {each.device}", at in sparse)
        for at, each in enumerate(parameters)
    ]


def step_context(
    parameters: Sequence[nn.Parameter],
    group: ScriptedGroup,
    *plan: tuple[int, ...],
    exchange: Callable[[Any], Exchange] = Average,
    weights: Weights | None = None,
    sparse: Collection[int] = (),
    skip_unused: bool = False,
    bucket_options: BucketOptions | None = None,
) -> StepContext:
    """What a step of these parameters works with; ``plan`` has the slots of each bucket."""
    slots = slots_of(parameters, sparse=sparse)
    planned = BucketPlan(plan)
    inside = sorted(slot for members in plan for slot in members)
    layout = ReportLayout(slots=len(slots), buckets=len(plan), world=group.size, with_order=False)
    how: Exchange = exchange(group)
    recorder = make_recorder(nn.Module(), slots, parameters, caps=[1], device=CPU)
    recorder.follow(PlanDescription(plan, how.name), group)
    return StepContext(
        parameters=ReducedParameters(Slots(slots, [*parameters], inside)),
        bucket_set=BucketSet(
            planned,
            slots,
            parameters,
            report_numel=layout.numel,
            report_in_bucket=how.carries_report,
            options=bucket_options or BucketOptions(),
            empty=group.empty,
        ),
        layout=layout,
        readiness=Readiness(planned, len(slots)),
        outside=[slot.index for slot in slots if slot.index not in inside],
        exchange=how,
        group=group,  # type: ignore[arg-type]  # stands in for a group
        weights=weights or Weights(parameters),
        pairing=Pairing(),
        non_finite=NonFiniteGradients(),
        buffers=ModuleBuffers(nn.Module(), ()),
        recorder=recorder,
        skip_unused=skip_unused,
    )


@dataclass(frozen=True)
class OtherRank:
    """What another rank does in a step.

    Attributes:
        grads: its gradients by slot, or under weights their weighted sums; a slot without one is unused.
        again: what it gives to each reduction that follows those of the plan's buckets, not divided.
        report: what it reports besides the slots that it uses; its user does what this rank's does.
    """

    grads: GradsBySlot = field(default_factory=dict)
    again: Sequence[Tensor] = ()
    report: RankReport = field(default_factory=RankReport)

    def contribution(self, context: StepContext, rank: int, number: int, given: Tensor) -> Tensor:
        """What it gives to the reduction of that number, counted from the step's first.

        ``given`` is what this rank gives.
        """
        plan, in_bucket = context.bucket_set.plan, context.exchange.carries_report
        count = len(plan.buckets)
        factor = 1.0 if self.report.weight is not None else 1 / context.group.size
        if number == count and not in_bucket:
            return self.written_report(context, rank, given)
        if number >= count:
            return self.again[number - count - (not in_bucket)] * factor
        parameters = context.parameters.local
        parts = [
            self.grads.get(slot, torch.zeros_like(parameters[slot].detach())) * factor
            for slot in plan.buckets[number]
        ]
        if parts and context.parameters.slots[plan.buckets[number][0]].sparse:
            return parts[0].to_sparse(1)
        flat = torch.cat([part.flatten() for part in parts])
        if number == plan.report_bucket and in_bucket:
            return torch.cat([flat, self.written_report(context, rank, given).to(flat.dtype)])
        return flat

    def written_report(self, context: StepContext, rank: int, given: Tensor) -> Tensor:
        """Its report as it travels."""
        used = bytes(slot in self.grads for slot in range(len(context.parameters.slots)))
        report = replace(self.report, used=used)
        if not context.group.may_change:
            own = context.layout.read_counts(given[-context.layout.numel :])
            report = replace(report, counts=own[context.group.rank])
        written = torch.empty(context.layout.numel)
        context.layout.write(written, rank, report)
        return written


class OtherRanks:
    """The script of a group whose ranks all average by one all-reduce per bucket, in plan order.

    Attributes:
        context: what the current step works with; set once the group is in use.
    """

    context: Callable[[], StepContext]

    def __init__(self, *ranks: OtherRank) -> None:
        self._ranks = ranks
        self._first = 0
        self._seen = 0

    def in_next_step(self, *ranks: OtherRank) -> None:
        """What they do in the step that begins with the next call."""
        self._ranks = ranks
        self._first = self._seen

    def __call__(self, call: ScriptedCall) -> list[Tensor]:
        context = self.context()
        self._seen = call.number + 1
        numbers = [rank for rank in range(context.group.size) if rank != context.group.rank]
        return [
            other.contribution(context, rank, call.number - self._first, call.given)
            for rank, other in zip(numbers, self._ranks, strict=True)
        ]


def scripted_context(
    parameters: Sequence[nn.Parameter],
    *plan: tuple[int, ...],
    others: Sequence[OtherRank],
    rank: int = 0,
    **more: Any,
) -> tuple[StepContext, ScriptedGroup, OtherRanks]:
    """What a step works with, the group, and its script."""
    script = OtherRanks(*others)
    group = ScriptedGroup(rank, len(others) + 1, script)
    context = step_context(parameters, group, *plan, **more)
    script.context = lambda: context
    return context, group, script


def begun_step(
    context: StepContext,
    *,
    number: int = 0,
    ranks: int | None = None,
    accumulated: Collection[int] = (),
    launch_late: bool = False,
    copy_late: bool = False,
) -> Step:
    """A step that has begun."""
    step = Step(
        context,
        number=number,
        ranks=context.group.size if ranks is None else ranks,
        counts=StepCounts(),
        accumulated=bytearray(slot in accumulated for slot in range(len(context.parameters.slots))),
        launch_late=launch_late,
        copy_late=copy_late,
    )
    step.begin()
    return step


def arrive(context: StepContext, step: Step, grads: GradsBySlot) -> None:
    """Add gradients to ``.grad`` and tell the step, one slot after the other."""
    for slot, grad in grads.items():
        parameter = context.parameters.local[slot]
        parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
        step.add([slot])


def finish(step: Step) -> StepSummary:
    """End a step as a reducer does."""
    with torch.no_grad():
        return step.finish()


def run_step(context: StepContext, grads: GradsBySlot, **options: Any) -> StepSummary:
    """A whole step with these gradients on this rank."""
    step = begun_step(context, **options)
    arrive(context, step, grads)
    return finish(step)


def sent_report(context: StepContext, call: ScriptedCall) -> StepSummary:
    """The report of this rank alone, as it was sent behind a bucket or by itself."""
    return context.layout.read(call.given[-context.layout.numel :])


def sent_numels(group: ScriptedGroup) -> list[int]:
    """The number of elements of each all-reduce."""
    return [call.given.numel() for call in group.calls if call.kind == "all_reduce"]


def mean(*each: Tensor) -> Tensor:
    """The average in double precision."""
    return torch.stack([grad.double() for grad in each]).mean(0)


def assert_grads(parameters: Sequence[nn.Parameter], expected: GradsBySlot) -> None:
    """Each parameter's gradient is as expected; a parameter that is not mentioned has none."""
    assert [slot for slot, each in enumerate(parameters) if each.grad is not None] == sorted(expected)
    for slot, wanted in expected.items():
        grad = parameters[slot].grad
        assert grad is not None
        torch.testing.assert_close(grad, wanted.to(grad.dtype), msg=f"slot {slot}: {grad}, not {wanted}")
