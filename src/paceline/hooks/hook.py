"""What a communication hook of paceline's own is: a generator of collectives. And the plainest one.

Note [Hooks are generators]. A hook that needs several collectives per bucket cannot chain them in the
callbacks of futures: which bucket's callback runs first differs from rank to rank, so ranks would issue
different collectives and wait for each other forever. Here a hook yields each collective that it has launched
and is resumed when that one is done. Every bucket's first collective is launched when the bucket is full; the
later ones when all buckets are launched, one bucket after the other. So each rank issues the same collectives
in the same order, without any threads.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.errors import OptionError
from paceline.hooks.grad_bucket import GradBucket

# Yields each collective that it has launched, is resumed with its result, and returns the averages.
Reduction: TypeAlias = Generator[Pending, Any, Tensor]


class Hook(ABC):
    """Reduces buckets by collectives that it yields; register one with ``register_comm_hook(None, hook)``.

    A hook may remember things from step to step, so each wrapper needs one of its own.

    Attributes:
        joins: whether it works under join, where some ranks have no inputs left.
        between_hosts: whether it is for traffic between hosts only. Then ranks that share memory first
            average there, and the hook runs between hosts, each rank of a host with a part of the parameters.
            On one host it has nothing to do. Otherwise it runs among all ranks, wherever they are.
    """

    _user: "weakref.ref[object] | None" = None
    joins = True
    between_hosts = False

    @property
    def name(self) -> str:
        """Its name in errors and logs."""
        return type(self).__name__

    @property
    def description(self) -> str:
        """What recordings and ``paceline report`` say of it."""
        return self.name

    @property
    def signature(self) -> str:
        """What must be the same on all ranks: the hook, and all that changes what it sends.

        Ranks compare the signatures of hooks that wrappers are given.
        """
        return type(self).__name__

    @abstractmethod
    def reduce(self, bucket: GradBucket, group: Group) -> Reduction:
        """Average a bucket's gradients over the group's ranks; there are two or more.

        The buffer holds this rank's gradients, not divided, and may be written to. The number of collectives
        and their sizes must be the same on every rank.
        """

    def meet(self, group: Group) -> None:  # noqa: B027  # a hook need not care
        """The hook runs among these ranks from now on."""

    def begin(self, weight: float | None) -> None:  # noqa: B027  # a hook need not care
        """A step begins; ``weight`` is this rank's sum of weights since the last average, under ``weigh``."""

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:  # noqa: B027  # as begin
        """A step has ended well on every rank.

        Args:
            parameters: all of them.
            used: for each parameter the number of ranks that used it.
            total: the sum of the ranks' weights, if there were any.
        """

    def add_left_out(self, bucket: GradBucket) -> None:  # noqa: B027  # a hook need not leave anything out
        """Add to a bucket what earlier steps left out, because this hook will not send it any more."""

    def claim(self, user: object) -> None:
        """Belong to one wrapper until that is gone."""
        if self._user is not None and self._user() is not None:
            raise OptionError(f"a hook serves one wrapper: make another for this one (hook: {self.name})")
        self._user = weakref.ref(user)

    def release(self) -> None:
        """Belong to no wrapper."""
        self._user = None


class PlainAverage(Hook):
    """See ``average``."""

    between_hosts = True

    def reduce(self, bucket: GradBucket, group: Group) -> Reduction:
        """One all-reduce."""
        return averaged(bucket.buffer(), group)


def average() -> Hook:
    """Averages without compression, for comparison with hooks that compress.

    Bytes sent per rank and step for a parameter of n elements at world size W: ``2 n (W-1)/W`` times the
    size of an element. Error: only that of summing in the gradients' own type.
    """
    return PlainAverage()


def averaged(buffer: Tensor, group: Group) -> Reduction:
    """A tensor's average by one all-reduce; a dense tensor is averaged in place."""
    if buffer.is_sparse:
        buffer = buffer / group.size
    else:
        buffer.div_(group.size)  # before the reduction, so that low precision does not overflow
    if not buffer.numel():
        return buffer
    yield group.all_reduce(as_real(buffer))
    return buffer


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as twice as many real elements; any other as it is."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def work_type(tensor: Tensor) -> torch.dtype:
    """The real type to calculate in: at least float32, so that small values are not rounded away."""
    return torch.promote_types(tensor.dtype.to_real(), torch.float32)
