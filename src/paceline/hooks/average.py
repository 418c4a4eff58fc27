"""The plain average as a hook, for comparison and for what cannot be compressed."""

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.hooks.grad_bucket import GradBucket
from paceline.hooks.hook import Hook, Reduction


class PlainAverage(Hook):
    """See ``average``."""

    between_hosts = True

    def reduce(self, bucket: GradBucket, group: Group) -> Reduction:
        """Add up shares of the gradients."""
        return averaged(bucket.buffer(), group)


def average() -> Hook:
    """Averages without compression.

    Bytes a rank sends each step for a parameter of n elements at world size W: ``2 n (W-1)/W`` times the
    size of an element. Error: only that of adding up in the gradients' own type.
    """
    return PlainAverage()


def averaged(buffer: Tensor, group: Group) -> Reduction:
    """A tensor's average by one all-reduce, in its place where it is dense."""
    if buffer.is_sparse:
        buffer = buffer / group.size
    else:
        buffer.div_(group.size)  # before it leaves, lest low precision overflows
    if not buffer.numel():
        return buffer
    yield group.all_reduce(as_real(buffer))
    return buffer


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as twice as many real elements; any other as it is."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def work_type(tensor: Tensor) -> torch.dtype:
    """The real type to calculate in: float32 for what is shorter, lest small parts are rounded away."""
    return torch.promote_types(tensor.dtype.to_real(), torch.float32)
