"""What torch's ``ReduceOp``s do to tensors, for every dtype that they are defined for."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from paceline.comm.shm.collectives import ReduceFunction

_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
    ReduceOp.PREMUL_SUM: "premul_sum",
}
# torch adds and compares these dtypes only when they are viewed as signed ones.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_SIGNED)
_LINEAR = ("sum", "avg", "premul_sum")
_BITWISE = ("band", "bor", "bxor")


def _add(into: Tensor, other: Tensor) -> None:
    into.add_(other)


def _multiply(into: Tensor, other: Tensor) -> None:
    into.mul_(other)


def _least(into: Tensor, other: Tensor) -> None:
    torch.minimum(into, other, out=into)


def _most(into: Tensor, other: Tensor) -> None:
    torch.maximum(into, other, out=into)


def _and(into: Tensor, other: Tensor) -> None:
    into.bitwise_and_(other)


def _or(into: Tensor, other: Tensor) -> None:
    into.bitwise_or_(other)


def _xor(into: Tensor, other: Tensor) -> None:
    into.bitwise_xor_(other)


def _of_unsigned(pick: Callable[[Tensor, Tensor], Tensor]) -> ReduceFunction:
    """Compares unsigned numbers in a signed view: with the first bit flipped they are in order."""

    def op(into: Tensor, other: Tensor) -> None:
        first_bit = torch.iinfo(into.dtype).min
        into.copy_(pick(into ^ first_bit, other ^ first_bit) ^ first_bit)

    return op


_OPS: dict[str, ReduceFunction] = {
    "sum": _add,
    "avg": _add,
    "premul_sum": _add,
    "product": _multiply,
    "min": _least,
    "max": _most,
    "band": _and,
    "bor": _or,
    "bxor": _xor,
}
_UNSIGNED_OPS: dict[str, ReduceFunction] = {
    "min": _of_unsigned(torch.minimum),
    "max": _of_unsigned(torch.maximum),
}


@dataclass(frozen=True)
class Reduction:
    """A ``ReduceOp`` for one dtype.

    Attributes:
        name: its name.
        op: combines the second tensor into the first.
        factor: what each rank multiplies its tensor by first.
    """

    name: str
    op: ReduceFunction
    factor: Any = None

    @classmethod
    def of(cls, reduce_op: Any, dtype: torch.dtype) -> "Reduction | None":
        """The reduction of a ``ReduceOp``; None if it is not defined for the dtype."""
        found = _reduction(reduce_op.op, dtype)
        if found is None or found.name != "premul_sum":
            return found
        # What it is pickled as: torch 2.10 has no other way to the factor.
        _, factor = reduce_op.__getstate__()
        return replace(found, factor=factor)

    @property
    def averages(self) -> bool:
        """Whether the sum is to be divided by the number of ranks."""
        return self.name == "avg"

    def prepare(self, own: Tensor) -> None:
        """Multiply a rank's tensor by the factor, before any tensors are combined."""
        if self.factor is not None:
            own.mul_(self.factor)


@functools.cache
def _reduction(kind: Any, dtype: torch.dtype) -> Reduction | None:
    name = _NAMES[kind]
    if not _is_defined(name, dtype):
        return None
    return Reduction(name, _UNSIGNED_OPS.get(name, _OPS[name]) if dtype in _SIGNED else _OPS[name])


def operand(tensor: Tensor) -> Tensor:
    """A flat view of a contiguous tensor, in a dtype that torch can calculate with."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if (signed := _SIGNED.get(tensor.dtype)) is not None:
        tensor = tensor.view(signed)
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _is_defined(name: str, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return name in _LINEAR
    if name in _BITWISE:
        return dtype in _INTEGERS
    if name in ("avg", "premul_sum"):
        return dtype in _FLOATS
    return dtype in _FLOATS or dtype in _INTEGERS
