"""What each call of torch's process groups takes: which collectives, on what memory, and what follows them.

Collectives work on flat, contiguous memory; a tensor that is not contiguous is copied for the call.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.comm.backend.reductions import Reduction, operand
from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import Collective
from paceline.comm.shm.collectives import (
    AllToAll,
    Barrier,
    BroadcastBytes,
    Gather,
    OneShotReduce,
    ReduceScatter,
    Scatter,
    UnevenAllToAll,
    as_bytes,
    prefers_one_shot,
)
from paceline.comm.shm.in_place import TwoShotAllReduce
from paceline.errors import ShapeError


class BackendCall:
    """One call of a process group.

    Args:
        outputs: the tensors that will hold the result.

    Attributes:
        collectives: the collectives that it takes, in order.
    """

    def __init__(self, outputs: Sequence[Tensor] = ()) -> None:
        self.outputs = list(outputs)
        self.collectives: list[Collective] = []
        self._divisions: list[Callable[[], object]] = []
        self._copies: list[Callable[[], object]] = []

    def finish(self) -> None:
        """All collectives are over: write the results into the outputs."""
        for act in (*self._divisions, *self._copies):
            act()
        self._divisions, self._copies = [], []
        self.collectives = []  # lets go of their tensors

    def target(self, tensor: Tensor) -> Tensor:
        """The tensor if it is contiguous; else a copy, which is copied back in the end."""
        if tensor.is_contiguous():
            return tensor
        copy = tensor.contiguous()
        self._copies.append(partial(tensor.copy_, copy))
        return copy

    def split_into_outputs(self, flat: Tensor) -> None:
        """Copy the parts of a flat tensor into the outputs in the end."""
        self._copies.append(partial(_split_into, flat, self.outputs))

    def divide(self, total: Tensor, divisor: int) -> None:
        """Divide a total in the end."""
        self._divisions.append(partial(total.div_, divisor))


def all_reduce(channel: Channel, tensors: Sequence[Tensor], reduction: Reduction) -> BackendCall:
    """Combine tensors over the ranks, in place; several of one type are combined as one."""
    call = BackendCall(tensors)
    if len(tensors) == 1:
        flat = operand(call.target(tensors[0]))
    else:
        flat = operand(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        call.split_into_outputs(flat)
    reduction.prepare(flat)
    call.collectives = [_reduced(channel, flat, reduction)]
    if reduction.averages:
        call.divide(flat, channel.size)
    return call


def reduce(channel: Channel, tensor: Tensor, reduction: Reduction, *, root: int) -> BackendCall:
    """Combine a tensor over the ranks, for one of them."""
    call = BackendCall([tensor])
    is_root = channel.rank == root
    flat = operand(call.target(tensor) if is_root else tensor.contiguous())
    if not is_root and reduction.factor is not None:
        flat = flat.clone()
    reduction.prepare(flat)
    call.collectives = [OneShotReduce(channel, flat, reduction.op, reduction.name, root=root)]
    if reduction.averages and is_root:
        call.divide(flat, channel.size)
    return call


def broadcast(channel: Channel, tensors: Sequence[Tensor], *, root: int) -> BackendCall:
    """Give all ranks one rank's tensors."""
    call = BackendCall(tensors)
    call.collectives = [
        BroadcastBytes(channel, as_bytes(call.target(tensor)), root=root) for tensor in tensors
    ]
    return call


def all_gather(channel: Channel, outputs: Sequence[Tensor], own: Tensor) -> BackendCall:
    """Give all ranks every rank's tensor."""
    call = BackendCall(outputs)
    call.collectives = [_gathered(channel, call, outputs, own)]
    return call


def all_gather_many(
    channel: Channel, outputs: Sequence[Sequence[Tensor]], own: Sequence[Tensor]
) -> BackendCall:
    """As ``all_gather``, for several tensors that have their own outputs."""
    call = BackendCall([output for each in outputs for output in each])
    call.collectives = [
        _gathered(channel, call, each, tensor) for each, tensor in zip(outputs, own, strict=True)
    ]
    return call


def all_gather_flat(channel: Channel, outputs: Sequence[Tensor], own: Sequence[Tensor]) -> BackendCall:
    """As ``all_gather``, for several tensors, each with one output for all ranks behind each other."""
    call = BackendCall(outputs)
    for output, tensor in zip(outputs, own, strict=True):
        rows = _rows(call.target(output), channel.size, tensor, "output")
        call.collectives.append(Gather(channel, as_bytes(tensor.contiguous()), rows))
    return call


def gather(channel: Channel, outputs: Sequence[Tensor], own: Tensor, *, root: int) -> BackendCall:
    """Give one rank every rank's tensor."""
    call = BackendCall(outputs)
    _check_same(channel.size if channel.rank == root else 0, outputs, own, "output")
    everyone = [as_bytes(call.target(output)) for output in outputs]
    call.collectives = [Gather(channel, as_bytes(own.contiguous()), everyone, root=root)]
    return call


def scatter(channel: Channel, own: Tensor, inputs: Sequence[Tensor], *, root: int) -> BackendCall:
    """Give each rank one of one rank's tensors."""
    call = BackendCall([own])
    _check_same(channel.size if channel.rank == root else 0, inputs, own, "input")
    everyone = [as_bytes(tensor.contiguous()) for tensor in inputs]
    call.collectives = [Scatter(channel, as_bytes(call.target(own)), everyone, root=root)]
    return call


def reduce_scatter(
    channel: Channel, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction
) -> BackendCall:
    """Combine every rank's tensors; each rank gets one."""
    call = BackendCall([output])
    _check_same(channel.size, inputs, output, "input")
    own = [operand(tensor.contiguous()) for tensor in inputs]
    _reduce_scattered(channel, call, output, own, reduction)
    return call


def reduce_scatter_flat(
    channel: Channel, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduction: Reduction
) -> BackendCall:
    """As ``reduce_scatter``, for several tensors, each input with those for all ranks behind each other."""
    call = BackendCall(outputs)
    for output, tensor in zip(outputs, inputs, strict=True):
        if tensor.numel() != output.numel() * channel.size or tensor.dtype != output.dtype:
            raise ShapeError(
                f"an input must hold {channel.size} times the output "
                f"(input: {_described(tensor)}, output: {_described(output)})"
            )
        own = list(operand(tensor.contiguous()).chunk(channel.size)) if tensor.numel() else []
        _reduce_scattered(channel, call, output, own, reduction)
    return call


def all_to_all(channel: Channel, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> BackendCall:
    """Give rank i the i-th tensor; they may be of any length."""
    call = BackendCall(outputs)
    for name, tensors in (("output", outputs), ("input", inputs)):
        if len(tensors) != channel.size:
            raise ShapeError(
                f"there must be one {name} per rank ({name}s: {len(tensors)}, ranks: {channel.size})"
            )
    received = [as_bytes(call.target(output)) for output in outputs]
    sent = [as_bytes(tensor.contiguous()) for tensor in inputs]
    call.collectives = [UnevenAllToAll(channel, received, sent)]
    return call


def all_to_all_flat(
    channel: Channel,
    output: Tensor,
    own: Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
) -> BackendCall:
    """Give rank i the i-th share of the rows: as many as the split sizes say, or as many as all others."""
    call = BackendCall([output])
    received = _shares(call.target(output), output_rows, channel.size, "output")
    sent = _shares(own.contiguous(), input_rows, channel.size, "input")
    if output_rows or input_rows:
        call.collectives = [UnevenAllToAll(channel, received, sent)]
        return call
    if output.nbytes != own.nbytes:
        raise ShapeError(
            "output and input must have the same size "
            f"(output: {_described(output)}, input: {_described(own)})"
        )
    call.collectives = [AllToAll(channel, received, sent, own.nbytes // channel.size)]
    return call


def barrier(channel: Channel) -> BackendCall:
    """Wait for all ranks."""
    call = BackendCall()
    call.collectives = [Barrier(channel)]
    return call


def _reduced(channel: Channel, flat: Tensor, reduction: Reduction) -> Collective:
    # With two ranks both ways read the same number of bytes, and one shot needs one signal less.
    one_shot = channel.size == 2 or prefers_one_shot(channel, flat.nbytes)
    kind: Any = OneShotReduce if one_shot else TwoShotAllReduce
    collective: Collective = kind(channel, flat, reduction.op, reduction.name)
    return collective


def _split_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = flat.view(torch.uint8).split([tensor.nbytes for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _gathered(channel: Channel, call: BackendCall, outputs: Sequence[Tensor], own: Tensor) -> Collective:
    _check_same(channel.size, outputs, own, "output")
    everyone = [as_bytes(call.target(output)) for output in outputs]
    return Gather(channel, as_bytes(own.contiguous()), everyone)


def _reduce_scattered(
    channel: Channel, call: BackendCall, output: Tensor, own: list[Tensor], reduction: Reduction
) -> None:
    if reduction.factor is not None:
        own = [tensor * reduction.factor for tensor in own]
    flat = operand(call.target(output))
    own = own or [flat] * channel.size
    call.collectives.append(ReduceScatter(channel, flat, own, reduction.op, reduction.name))
    if reduction.averages:
        call.divide(flat, channel.size)


def _rows(tensor: Tensor, size: int, row: Tensor, name: str) -> list[Tensor]:
    if tensor.nbytes != row.nbytes * size or tensor.dtype != row.dtype:
        raise ShapeError(
            f"the {name} must hold {size} tensors ({name}: {_described(tensor)}, each: {_described(row)})"
        )
    flat, step = as_bytes(tensor), row.nbytes
    return [flat[rank * step : (rank + 1) * step] for rank in range(size)]


def _shares(tensor: Tensor, rows: Sequence[int], size: int, name: str) -> list[Tensor]:
    count = tensor.shape[0] if tensor.dim() else 1
    if not rows:
        if count % size:
            raise ShapeError(
                f"the {name}'s rows must be a multiple of the number of ranks, or have split sizes "
                f"({name}: {_described(tensor)}, ranks: {size})"
            )
        rows = [count // size] * size
    if len(rows) != size or sum(rows) != count:
        raise ShapeError(
            f"the {name} must have one split size per rank, which add up to its rows "
            f"(split sizes: {list(rows)}, {name}: {_described(tensor)})"
        )
    width = tensor.nbytes // count if count else 0
    ends = [0]
    for number in rows:
        ends.append(ends[-1] + number * width)
    flat = as_bytes(tensor)
    return [flat[start:end] for start, end in pairwise(ends)]


def _check_same(count: int, tensors: Sequence[Tensor], model: Tensor, name: str) -> None:
    if len(tensors) != count:
        raise ShapeError(f"there must be one {name} per rank ({name}s: {len(tensors)}, ranks: {count})")
    for index, tensor in enumerate(tensors):
        if tensor.shape != model.shape or tensor.dtype != model.dtype:
            raise ShapeError(
                f"invalid tensor size or type: {name} {index} is not like the tensor of this rank "
                f"({name} {index}: {_described(tensor)}, this rank's: {_described(model)})"
            )


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
