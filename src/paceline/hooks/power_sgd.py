"""PowerSGD: matrices of gradients as products of two thin ones, by one power iteration per step."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.errors import OptionError
from paceline.hooks.error_feedback import ParameterTensors, Residuals
from paceline.hooks.grad_bucket import GradBucket
from paceline.hooks.hook import Hook, Reduction, averaged, work_type

# As a reduction, of several lists of tensors.
Averages: TypeAlias = Generator[Pending, Tensor, list[list[Tensor]]]
_SEED = 0


def power_sgd(rank: int = 1, *, start_step: int = 10) -> Hook:
    """Averages matrices by their projection on the directions that mattered most, with error feedback.

    A parameter of two or more dimensions counts as the matrix of its first dimension by all others. Vectors,
    complex and sparse gradients, and matrices that would not become shorter are averaged as they are.

    Bytes sent per rank and step for an m by n matrix at world size W: ``2 rank (m+n) (W-1)/W`` times the
    size of an element, and for all else those of ``average``, where float16 and bfloat16 count as float32;
    until ``start_step`` those of ``average``.
    Error of one step: the part of the matrix (gradient plus residual) outside ``rank`` directions; it has no
    bound but the matrix itself, and is biased. It is added to the next gradients, so the mean over many steps
    is exact. A value that is not finite makes its whole matrix NaN on every rank. Results are the
    same to the bit on ranks with the same processor, number of threads and build of torch.

    Args:
        rank: the number of directions that are kept.
        start_step: the number of steps that are averaged plainly before.
    """
    return PowerSGD(rank, start_step)


@dataclass(frozen=True)
class Matrix:
    """A gradient that is compressed.

    Attributes:
        parameter: whose it is.
        view: where it is in the bucket.
        values: the matrix, plus the residual.
        directions: the thin matrix that it is multiplied by.
    """

    parameter: Parameter
    view: Tensor
    values: Tensor
    directions: Tensor


class PowerSGD(Hook):
    """See ``power_sgd``."""

    between_hosts = True

    def __init__(self, rank: int, start_step: int) -> None:
        if rank < 1 or start_step < 0:
            raise OptionError(
                "rank must be positive, and start_step must not be negative "
                f"(rank: {rank}, start_step: {start_step})"
            )
        self._rank = rank
        self._start_step = start_step
        self._step = 0
        self._residuals = Residuals()
        self._directions = ParameterTensors()

    @property
    def signature(self) -> str:
        """Its arguments."""
        return f"power_sgd({self._rank}, start_step={self._start_step})"

    def begin(self, weight: float | None) -> None:
        """Forget what a step that did not end well left."""
        self._residuals.begin(weight)
        self._directions.begin()

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """Keep the residuals and directions of this step."""
        self._step += 1
        self._residuals.finish(parameters, used, total)
        self._directions.finish(parameters, used)

    def reduce(self, bucket: GradBucket, group: Group) -> Reduction:
        """Two collectives: left factors with all that is not compressed, then right factors."""
        buffer = bucket.buffer()
        if self._step < self._start_step or buffer.is_sparse or buffer.is_complex():
            return (yield from averaged(buffer, group))
        pairs = [*zip(bucket.parameters(), bucket.gradients(), strict=True)]
        plain = [view for _, view in pairs if not self._is_worth_it(view)]
        matrices = [self._matrix(*pair) for pair in pairs if self._is_worth_it(pair[1])]
        lefts = [matrix.values @ matrix.directions for matrix in matrices]
        lefts, averages = yield from _averages([lefts, plain], group)
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        own = [(left.T @ matrix.values).T for matrix, left in zip(matrices, lefts, strict=True)]
        self._keep_residuals(matrices, lefts, own)
        (rights,) = yield from _averages([own], group)
        for view, average in zip(plain, averages, strict=True):
            view.copy_(average)
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            matrix.view.copy_((left @ right.T).view_as(matrix.view))
            self._keep_directions(matrix.parameter, right)
        return buffer

    def add_left_out(self, bucket: GradBucket) -> None:
        """Add what lies outside the directions that were sent so far."""
        if bucket.buffer().is_sparse or bucket.buffer().is_complex():
            return
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._is_worth_it(view):
                # In the order in which the residual is kept.
                values = view.to(work_type(view), copy=True, memory_format=torch.contiguous_format)
                self._residuals.hand_over([values.view(-1)], [parameter])
                view.copy_(values)

    def _is_worth_it(self, view: Tensor) -> bool:
        if view.dim() < 2 or not view.numel():
            return False
        rows, columns = view.shape[0], view.numel() // view.shape[0]
        return self._rank * (rows + columns) < view.numel()

    def _matrix(self, parameter: Parameter, view: Tensor) -> Matrix:
        # A copy, in the order in which the parameter's residual is kept.
        values = view.to(work_type(view), copy=True, memory_format=torch.contiguous_format).view(
            len(view), -1
        )
        self._residuals.add_to([values.view(-1)], [parameter])
        directions = self._directions.get(parameter)
        if directions is None or (directions.dtype, directions.device) != (values.dtype, values.device):
            directions = self._first_directions(values)
        return Matrix(parameter, view, values, directions)

    def _first_directions(self, values: Tensor) -> Tensor:
        """The same on every rank, and in every run."""
        generator = torch.Generator().manual_seed(_SEED)
        drawn = torch.randn((values.shape[1], self._rank), generator=generator, dtype=values.dtype)
        return drawn.to(values.device)

    def _keep_residuals(
        self, matrices: Sequence[Matrix], lefts: Sequence[Tensor], rights: Sequence[Tensor]
    ) -> None:
        """Keep the part of this rank's own matrices that is outside the common directions."""
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            residual = matrix.values.addmm_(
                left, right.T, alpha=-1
            )  # in place: the values are not needed again
            self._residuals.keep([residual.view(-1)], [matrix.parameter])

    def _keep_directions(self, parameter: Parameter, right: Tensor) -> None:
        # All ranks have the same to decide by. Others than finite ones would lead nowhere but to NaN.
        if right.isfinite().all():
            # Of length 1, or products with tiny gradients would vanish. Scaled first, because squares of tiny
            # values vanish too.
            largest = right.abs().amax(dim=0, keepdim=True)
            near = right / torch.where(largest > 0, largest, 1)
            self._directions.put(parameter, functional.normalize(near, dim=0))


def _averages(lists: Sequence[Sequence[Tensor]], group: Group) -> Averages:
    """The averages of lists of tensors, by one collective."""
    together = [tensor for tensors in lists for tensor in tensors]
    if not together:
        return [[] for _ in lists]
    flat = torch.cat([tensor.reshape(-1).to(work_type(tensor)) for tensor in together])
    flat = yield from averaged(flat, group)
    parts = zip(flat.split([tensor.numel() for tensor in together]), together, strict=True)
    averages = iter([part.view(tensor.shape) for part, tensor in parts])
    return [[next(averages) for _ in tensors] for tensors in lists]
