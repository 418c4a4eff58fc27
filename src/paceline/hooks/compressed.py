"""Averages of compressed gradients, with or without error feedback.

Compressed gradients cannot be summed by an all-reduce. Either every rank gets every rank's message, or rank s
gets part s of each, averages those, and sends the average to all, compressed again. The first way sends W-1
messages, the second 2 (W-1)/W: the same for two ranks, where the first needs one collective less and rounds
once less. Every rank reads the same bytes, its own included, and sums in the order of the ranks: so the
result is the same to the bit.
"""

from collections.abc import Generator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.errors import HookTypeError
from paceline.hooks.compressors import Cast, Compressor, Integers, TopK
from paceline.hooks.error_feedback import AverageResiduals, Residuals
from paceline.hooks.grad_bucket import GradBucket
from paceline.hooks.hook import Hook, Reduction, as_real, averaged, work_type

# As a reduction; returns the average and the residuals: of this rank's gradients, and of the average that
# this rank made.
Averaging: TypeAlias = Generator[Pending, Tensor, tuple[Tensor, list[Tensor]]]


class Compressed(Hook):
    """Sends compressed gradients. Sparse gradients are averaged as they are.

    Args:
        compressor: encodes and decodes.
        feedback: whether the residual, which compression leaves out, is remembered and sent later.
    """

    between_hosts = True

    def __init__(self, compressor: Compressor, *, feedback: bool = False) -> None:
        self.compressor = compressor
        # Of this rank's own gradients, and of the part of the average that this rank makes.
        self._residuals = (Residuals(), AverageResiduals()) if feedback else ()

    @property
    def name(self) -> str:
        """The compressor's name."""
        return self.compressor.name

    @property
    def signature(self) -> str:
        """The compressor, and whether there is error feedback."""
        return f"{self.name} with error feedback" if self._residuals else self.name

    def meet(self, group: Group) -> None:
        """The hook runs among these ranks from now on."""
        for residuals in self._residuals:
            residuals.meet(group.size)

    def begin(self, weight: float | None) -> None:
        """Forget what a step that did not end well left out."""
        for residuals in self._residuals:
            residuals.begin(weight)

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """Keep what this step left out."""
        for residuals in self._residuals:
            residuals.finish(parameters, used, total)

    def reduce(self, bucket: GradBucket, group: Group) -> Reduction:
        """Send messages instead of gradients."""
        buffer = bucket.buffer()
        if buffer.is_sparse or not buffer.numel():
            return (yield from averaged(buffer, group))
        values = as_real(buffer).to(work_type(buffer))
        width = 2 if buffer.is_complex() else 1
        parameters = bucket.parameters()
        sizes = [width * view.numel() for view in bucket.gradients()]
        in_parts = group.size > 2 and self.compressor.keeps_places
        kept = self._residuals if in_parts else self._residuals[:1]
        for residuals in kept:
            residuals.add_to(values.split(sizes), parameters)
        mean, new = yield from (self._by_parts if in_parts else self._whole)(values, group)
        for residuals, residual in zip(kept, new, strict=bool(kept)):
            residuals.keep(residual.split(sizes), parameters)
        as_real(buffer).copy_(mean)
        return buffer

    def add_left_out(self, bucket: GradBucket) -> None:
        """Add what compression has left out so far."""
        buffer = bucket.buffer()
        if buffer.is_sparse or not buffer.numel():
            return
        values = as_real(buffer).to(work_type(buffer))
        width = 2 if buffer.is_complex() else 1
        sizes = [width * view.numel() for view in bucket.gradients()]
        for residuals in self._residuals:
            residuals.hand_over(values.split(sizes), bucket.parameters())
        as_real(buffer).copy_(values)

    def _whole(self, values: Tensor, group: Group) -> Averaging:
        """Every rank gets every message."""
        message = self.compressor.encode(values.unsqueeze(0))
        residual = self._residual(values.unsqueeze(0), message)
        messages = yield group.all_gather(message)
        return self._mean(messages, values.numel(), values.dtype), [residual.view(-1)]

    def _by_parts(self, values: Tensor, group: Group) -> Averaging:
        """Rank s averages part s."""
        numel, dtype = values.numel(), values.dtype
        part = -(-numel // group.size)
        parts = functional.pad(values, (0, part * group.size - numel)).view(group.size, part)
        messages = self.compressor.encode(parts)
        residual = self._residual(parts, messages)
        received = yield group.all_to_all(messages)
        mean = self._mean(received, part, dtype)
        reply = self.compressor.encode(mean.unsqueeze(0))
        of_average = torch.zeros_like(residual)
        if self._residuals:
            of_average[group.rank] = (mean - self._decode(reply, part, dtype)[0]).mul_(group.size)
        replies = yield group.all_gather(reply)
        average = self._decode(replies, part, dtype).reshape(-1)[:numel]
        return average, [each.view(-1)[:numel] for each in (residual, of_average)]

    def _residual(self, rows: Tensor, messages: Tensor) -> Tensor:
        if not self._residuals:
            return rows  # nobody looks at it
        return rows - self._decode(messages, rows.shape[1], rows.dtype)

    def _mean(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        # Divided before the sum, so that the sum does not overflow where the mean would not.
        share = 1 / len(messages)
        first, *others = messages.split(1)
        mean = self._decode(first, numel, dtype)[0].mul_(share)
        for message in others:
            mean.add_(self._decode(message, numel, dtype)[0], alpha=share)
        return mean

    def _decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return self.compressor.decode(messages, numel, dtype)


def fp16() -> Hook:
    """Sends float16.

    Bytes sent per rank and step for a parameter of n elements at world size W: ``4 n (W-1)/W``. Error of each
    element of the average: at most 2^-11 of the mean of the ranks' magnitudes (or 2^-25 where they are below
    2^-14), and above two ranks as much once more; by rounding to nearest, the same way each time the same
    gradients come. A gradient beyond 65504 becomes infinite, on every rank.
    """
    return Compressed(Cast(torch.float16))


def bf16() -> Hook:
    """Sends bfloat16.

    Bytes sent per rank and step for a parameter of n elements at world size W: ``4 n (W-1)/W``. Error: as
    ``fp16``, with 2^-8 instead of 2^-11, and over the range of float32.
    """
    return Compressed(Cast(torch.bfloat16))


def int8() -> Hook:
    """Sends 8-bit integers with a scale for every 256 values, with error feedback.

    Bytes sent per rank and step for a parameter of n elements at world size W: ``2 n (W-1)/W``, and 1.6% for
    the scales (3.1% where gradients are float64). Error of one step, at W of 2: at most 1/254 of the largest
    value (of gradient plus residual) in the same 256 on any rank, and twice that at larger W;
    deterministic, so biased within a step. Later steps make up for it, so the mean over many steps is
    exact. A value that is not finite makes its chunk of 256 NaN on every rank.
    """
    return Compressed(Integers(8), feedback=True)


def int4() -> Hook:
    """Sends 4-bit integers, two per byte, with a scale for every 256 values, with error feedback.

    Bytes sent per rank and step for a parameter of n elements at world size W: ``n (W-1)/W``, and 3.1% for
    the scales (6.2% where gradients are float64). Error: as ``int8``, with 1/14 instead of 1/254.
    """
    return Compressed(Integers(4), feedback=True)


def top_k(fraction: float = 0.01) -> Hook:
    """Sends the largest values of each bucket and their indices, with error feedback.

    Bytes sent per rank and step for a parameter of n elements at world size W: ``8 fraction n (W-1)`` (12 for
    float64), so it pays up to a W of about ``1/fraction``. Error of one step: everything but the largest
    values, so the average is biased towards zero. What is left out is added to the next gradients, so the
    mean over many steps is exact. A value that is not finite makes its whole bucket NaN on every rank.

    Args:
        fraction: the part of a bucket's values that is sent.
    """
    return Compressed(TopK(fraction), feedback=True)


def with_error_feedback(compressor: Compressor | Hook) -> Hook:
    """Sends compressed gradients, and adds what compression leaves out to the next gradients.

    Works with ``fp16()``, ``bf16()``, or your own compressor, which decides on the bytes. A step has the
    compressor's error; the mean over many steps is exact, to the precision of float32 (or float64). What is
    remembered takes the memory of one set of gradients (in float32 or wider), twice that during a step, and
    is not saved with the model.
    """
    return Compressed(compressor_of(compressor), feedback=True)


def compressor_of(given: Compressor | Hook) -> Compressor:
    """A compressor, or that of a hook which has one."""
    if isinstance(given, Compressed):
        return given.compressor
    if isinstance(given, Hook) or not isinstance(given, Compressor):
        raise HookTypeError(
            "error feedback needs a compressor, which can encode and decode "
            f"(compressor: {type(given).__name__})"
        )
    return given
