"""The arguments of calls of torch's process groups, each of which has several signatures."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided CPU memory without a tensor subclass that acts on operations."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def memory_ranges(args: Any) -> Iterator[range]:
    """The addresses of all tensors with elements in nested lists."""
    if isinstance(args, Tensor):
        if args.numel():
            last = sum((size - 1) * stride for size, stride in zip(args.shape, args.stride(), strict=True))
            yield range(args.data_ptr(), args.data_ptr() + (last + 1) * args.itemsize)
    elif isinstance(args, (list, tuple)):
        for each in args:
            yield from memory_ranges(each)


def as_list(tensors: Any) -> list[Tensor]:
    """A list of tensors; a single tensor becomes a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def as_nested_list(tensors: Any) -> list[list[Tensor]]:
    """A list of lists of tensors; a single list becomes a list of one."""
    return [tensors] if tensors and isinstance(tensors[0], Tensor) else tensors


def options_of(kind: Any, given: Any, **fields: Any) -> Any:
    """The options object of a call; its fields may have been given one by one."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None:
        # The third argument of the shorter signatures: an operator, a rank, or a timeout.
        [name] = [name for name in ("rootRank", "reduceOp", "timeout") if _can_be(given, name, fields)][:1]
        fields[name] = given
    for name, value in fields.items():
        if value is not None:
            setattr(options, name, value)
    return options


def _can_be(value: Any, name: str, fields: dict[str, Any]) -> bool:
    if name not in fields:
        return False
    if name == "rootRank":
        return isinstance(value, int)
    return isinstance(value, timedelta) == (name == "timeout")
