"""Post-local SGD: after a while ranks step by themselves, and average their parameters from time to time."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.errors import HookError, OptionError
from paceline.hooks.grad_bucket import GradBucket
from paceline.hooks.hook import Hook, Reduction, as_real, averaged
from paceline.tensors.dtensor import local_of


def post_local_sgd(*, start_step: int, period: int, process_group: Any = None) -> "PostLocalSGD":
    """Averages gradients for ``start_step`` steps, then parameters every ``period`` steps.

    In a training loop::

        hook = paceline.hooks.post_local_sgd(start_step=100, period=8)
        ddp.register_comm_hook(None, hook)
        for batch in batches:
            ...
            optimizer.step()
            hook.average_parameters(ddp.parameters())
        hook.average_now(ddp.parameters())

    Bytes sent per rank and step for a parameter of n elements at world size W: those of ``average`` up to
    ``start_step``; from then on a ``period``-th of them (and those of ``average`` within ``process_group``).
    Error: the gradients are those of the rank (or of ``process_group``), unbiased if ranks see samples of the
    same data, but taken at parameters that drift apart for up to ``period`` steps. The optimizer's state is
    not averaged. Under ``weigh`` a rank's gradients count by its share of the weights, so that the average of
    the parameters moves by the mean over all samples.

    Args:
        start_step: the number of steps that average gradients.
        period: the number of steps from one average of the parameters to the next.
        process_group: the ranks to average gradients with after that, such as those of the same host; None
            for none.
    """
    return PostLocalSGD(start_step, period, process_group)


class PostLocalSGD(Hook):
    """See ``post_local_sgd``."""

    joins = False  # ranks without inputs run no optimizer step after which they could average parameters

    def __init__(self, start_step: int, period: int, process_group: Any) -> None:
        if start_step < 0 or period < 1:
            raise OptionError(
                "start_step must not be negative, and period must be positive "
                f"(start_step: {start_step}, period: {period})"
            )
        self._subgroup = None if process_group is None else Group(process_group)
        self._group: Group | None = None
        self._start_step = start_step
        self._period = period
        self._step = 0
        self._alone = 0  # steps since the parameters were the same on all ranks

    @property
    def signature(self) -> str:
        """Its arguments; of the process group only whether there is one, because ranks may be in several."""
        within = "" if self._subgroup is None else ", within a process group"
        return f"post_local_sgd(start_step={self._start_step}, period={self._period}{within})"

    def meet(self, group: Group) -> None:
        """The hook runs among these ranks from now on."""
        self._group = group

    def reduce(self, bucket: GradBucket, group: Group) -> Reduction:
        """Average with all ranks, with some, or with none."""
        if self._step < self._start_step:
            return (yield from averaged(bucket.buffer(), group))
        if self._alone >= self._period:
            raise HookError(
                "parameters were not averaged: call average_parameters after each step of the optimizer "
                f"(steps: {self._alone}, period: {self._period})"
            )
        if self._subgroup is None or self._subgroup.size == 1:
            return bucket.buffer()
        return (yield from averaged(bucket.buffer(), self._subgroup))

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:  # noqa: ARG002
        """Count the step."""
        if self._step >= self._start_step and self._group is not None and self._group.size > 1:
            self._alone += 1
        self._step += 1

    def average_parameters(self, parameters: Iterable[Tensor]) -> bool:
        """Average parameters over all ranks if ``period`` steps have passed; returns whether it did.

        Call it after each optimizer step, on every rank.
        """
        if self._alone < self._period:
            return False
        self.average_now(parameters)
        return True

    @torch.no_grad()
    def average_now(self, parameters: Iterable[Tensor]) -> None:
        """Average parameters over all ranks, as at the end of training."""
        if self._group is None:  # it is not registered
            return
        kinds = groupby(sorted(map(local_of, parameters), key=_kind), key=_kind)
        for tensors in [[*members] for _, members in kinds]:
            self._average(tensors, self._group)
        self._alone = 0

    def _average(self, tensors: Sequence[Tensor], group: Group) -> None:
        flat = torch.cat([as_real(tensor.detach()).reshape(-1) for tensor in tensors])
        if not flat.numel():
            return
        group.all_reduce(flat.div_(group.size)).wait(_ignore)
        into = [as_real(tensor.detach()) for tensor in tensors]
        parts = flat.split([tensor.numel() for tensor in into])
        for tensor, part in zip(into, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.device}"


def _ignore() -> None:
    """A slow wait outside a step is not reported."""
