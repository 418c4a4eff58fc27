"""The bucket plan that steps follow, with what is made anew when there is another plan."""

import dataclasses

from paceline.comm.group import Group
from paceline.ddp.buckets.bucket_set import BucketOptions
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.reducer.autograd_hooks import GradHooks
from paceline.ddp.reducer.planner import Planner, PlanStage
from paceline.ddp.reducer.step import MOST_SMALL
from paceline.ddp.reducer.step_context import StepContext, lay_out
from paceline.ddp.reducer.step_report import StepSummary
from paceline.ddp.state.parameters import ReducedParameters
from paceline.recording.writer import PlanDescription


class PlanInForce:
    """Has buckets, parameters' hooks and the recorder follow the planner's plan.

    Args:
        planner: makes the plans.
        context: what steps work with, for the first plan.
        options: how buckets are made.
        grad_hooks: the hooks of the parameters.
        acts_on_all: whether the reducer looks at every single gradient.

    Attributes:
        context: what steps work with.
    """

    def __init__(
        self,
        planner: Planner,
        context: StepContext,
        options: BucketOptions,
        grad_hooks: GradHooks,
        *,
        acts_on_all: bool,
    ) -> None:
        self._planner = planner
        self.context = context
        self._options = options
        self._grad_hooks = grad_hooks
        self._acts_on_all = acts_on_all
        self._follow()

    @property
    def is_latest(self) -> bool:
        """Whether the planner has no newer one."""
        return self.context.bucket_set.plan is self._planner.plan

    @property
    def is_rebuilt(self) -> bool:
        """Whether it was learned from the first backward."""
        return self._planner.stage is PlanStage.LEARNED and self.is_latest

    def use_parts(self, parameters: ReducedParameters) -> None:
        """Have averages go to parts of the parameters, beginning with the next plan that is adopted."""
        self.context = dataclasses.replace(self.context, parameters=parameters)
        # A part of a bucket is of no use to whoever keeps it.
        self._options = dataclasses.replace(self._options, as_views=True)

    def adopt(self, group: Group, exchange: Exchange) -> None:
        """Follow the planner's plan from now on, with this group and this exchange."""
        learned = self.context.readiness
        self.context = dataclasses.replace(
            self.context,
            group=group,
            exchange=exchange,
            **lay_out(
                self._planner,
                self.context.parameters,
                group,
                exchange,
                self._options,
                with_digests=self.context.audit is not None,
            ),
        )
        self.context.readiness.expect_as(learned)
        self._follow()

    def learn(self, summary: StepSummary) -> bool:
        """Learn from a step that has ended; whether it brought other gradients than the one before."""
        context = self.context
        if summary.unfrozen:
            self._planner.add([slot for slot in context.outside if summary.used[slot]])
        is_new = context.readiness.learn()
        if is_new:
            context.bucket_set.forget_batches()
            self._choose_hooks()
        self._grad_hooks.settle()
        self._planner.learn(summary.order)
        return is_new

    def describe(self) -> None:
        """Tell the recorder which plan and which exchange the next steps have."""
        context = self.context
        description = PlanDescription(context.bucket_set.plan.buckets, context.exchange.description)
        context.recorder.follow(description, context.group)

    def _follow(self) -> None:
        self.describe()
        self._choose_hooks()

    def _choose_hooks(self) -> None:
        """Choose the gradients at whose arrival there is something to copy or to launch."""
        slots, context = self._planner.order, self.context
        if self._acts_on_all:
            self._grad_hooks.follow(slots, chosen={*slots})
        else:
            on_cpu = any(parameter.device.type == "cpu" for parameter in context.parameters.local)
            most = MOST_SMALL if on_cpu else len(slots)
            is_large = context.bucket_set.is_large
            self._grad_hooks.follow(slots, chosen=context.readiness.slots_to_act_on(is_large, most))
