"""What a call of torch's means: which collectives, on what memory, and what is left to do afterwards.

Collectives work on flat, contiguous memory; a tensor that is not gets a copy for the time of the call.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.comm.backend.reductions import Reduction, operand
from paceline.comm.backend.uneven import UnevenAllToAll
from paceline.comm.shm.channel import Channel
from paceline.comm.shm.collective import Collective
from paceline.comm.shm.collectives import (
    AllToAll,
    Barrier,
    Broadcast,
    Gather,
    ReduceAlone,
    ReduceInPlace,
    ReduceScatter,
    Scatter,
    adds_up_alone,
    as_bytes,
)
from paceline.errors import ShapeError


class Request:
    """One call.

    Args:
        outputs: the tensors that will hold the result.

    Attributes:
        collectives: what it takes, in order.
    """

    def __init__(self, outputs: Sequence[Tensor] = ()) -> None:
        self.outputs = list(outputs)
        self.collectives: list[Collective] = []
        self._sums: list[Callable[[], object]] = []
        self._copies: list[Callable[[], object]] = []

    def finish(self) -> None:
        """Every collective is over: bring results to where they were asked for."""
        for act in (*self._sums, *self._copies):
            act()
        self._sums, self._copies = [], []
        self.collectives = []  # with what they hold

    def target(self, tensor: Tensor) -> Tensor:
        """Contiguous memory whose contents will be the tensor's in the end."""
        if tensor.is_contiguous():
            return tensor
        copy = tensor.contiguous()
        self._copies.append(partial(tensor.copy_, copy))
        return copy

    def hand_out(self, flat: Tensor) -> None:
        """The outputs will be the parts of a flat tensor."""
        self._copies.append(partial(_hand_out, flat, self.outputs))

    def divide(self, total: Tensor, divisor: int) -> None:
        """A total is to become an average."""
        self._sums.append(partial(total.div_, divisor))


def all_reduce(channel: Channel, tensors: Sequence[Tensor], reduction: Reduction) -> Request:
    """Combine tensors over the ranks, in place; several of one type travel as one."""
    request = Request(tensors)
    if len(tensors) == 1:
        flat = operand(request.target(tensors[0]))
    else:
        flat = operand(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        request.hand_out(flat)
    reduction.prepare(flat)
    request.collectives = [_reduced(channel, flat, reduction)]
    if reduction.averages:
        request.divide(flat, channel.size)
    return request


def reduce(channel: Channel, tensor: Tensor, reduction: Reduction, *, root: int) -> Request:
    """Combine a tensor over the ranks, for one of them."""
    request = Request([tensor])
    is_root = channel.rank == root
    flat = operand(request.target(tensor) if is_root else tensor.contiguous())
    if not is_root and reduction.factor is not None:
        flat = flat.clone()
    reduction.prepare(flat)
    request.collectives = [ReduceAlone(channel, flat, reduction.op, reduction.name, root=root)]
    if reduction.averages and is_root:
        request.divide(flat, channel.size)
    return request


def broadcast(channel: Channel, tensors: Sequence[Tensor], *, root: int) -> Request:
    """Give everyone one rank's tensors."""
    request = Request(tensors)
    request.collectives = [
        Broadcast(channel, as_bytes(request.target(tensor)), root=root) for tensor in tensors
    ]
    return request


def all_gather(channel: Channel, outputs: Sequence[Tensor], own: Tensor) -> Request:
    """Give everyone every rank's tensor."""
    request = Request(outputs)
    request.collectives = [_gathered(channel, request, outputs, own)]
    return request


def all_gather_many(channel: Channel, outputs: Sequence[Sequence[Tensor]], own: Sequence[Tensor]) -> Request:
    """The same for several tensors, each with its own outputs."""
    request = Request([output for each in outputs for output in each])
    request.collectives = [
        _gathered(channel, request, each, tensor) for each, tensor in zip(outputs, own, strict=True)
    ]
    return request


def all_gather_flat(channel: Channel, outputs: Sequence[Tensor], own: Sequence[Tensor]) -> Request:
    """Give everyone every rank's tensors, those of all ranks behind each other in one output each."""
    request = Request(outputs)
    for output, tensor in zip(outputs, own, strict=True):
        rows = _rows(request.target(output), channel.size, tensor, "output")
        request.collectives.append(Gather(channel, as_bytes(tensor.contiguous()), rows))
    return request


def gather(channel: Channel, outputs: Sequence[Tensor], own: Tensor, *, root: int) -> Request:
    """Give one rank every rank's tensor."""
    request = Request(outputs)
    _check_same(channel.size if channel.rank == root else 0, outputs, own, "output")
    everyone = [as_bytes(request.target(output)) for output in outputs]
    request.collectives = [Gather(channel, as_bytes(own.contiguous()), everyone, root=root)]
    return request


def scatter(channel: Channel, own: Tensor, inputs: Sequence[Tensor], *, root: int) -> Request:
    """Give each rank one of one rank's tensors."""
    request = Request([own])
    _check_same(channel.size if channel.rank == root else 0, inputs, own, "input")
    everyone = [as_bytes(tensor.contiguous()) for tensor in inputs]
    request.collectives = [Scatter(channel, as_bytes(request.target(own)), everyone, root=root)]
    return request


def reduce_scatter(
    channel: Channel, output: Tensor, inputs: Sequence[Tensor], reduction: Reduction
) -> Request:
    """Combine every rank's tensors; each rank gets one."""
    request = Request([output])
    _check_same(channel.size, inputs, output, "input")
    own = [operand(tensor.contiguous()) for tensor in inputs]
    _reduce_scattered(channel, request, output, own, reduction)
    return request


def reduce_scatter_flat(
    channel: Channel, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduction: Reduction
) -> Request:
    """The same for several, those for all ranks behind each other in one input each."""
    request = Request(outputs)
    for output, tensor in zip(outputs, inputs, strict=True):
        if tensor.numel() != output.numel() * channel.size or tensor.dtype != output.dtype:
            raise ShapeError(
                f"an input must hold {channel.size} times the output "
                f"(input: {_described(tensor)}, output: {_described(output)})"
            )
        own = list(operand(tensor.contiguous()).chunk(channel.size)) if tensor.numel() else []
        _reduce_scattered(channel, request, output, own, reduction)
    return request


def all_to_all(channel: Channel, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Request:
    """Give rank i the i-th tensor; they may be of any length."""
    request = Request(outputs)
    for name, tensors in (("output", outputs), ("input", inputs)):
        if len(tensors) != channel.size:
            raise ShapeError(f"there must be an {name} for every rank ({name}s: {len(tensors)})")
    received = [as_bytes(request.target(output)) for output in outputs]
    sent = [as_bytes(tensor.contiguous()) for tensor in inputs]
    request.collectives = [UnevenAllToAll(channel, received, sent)]
    return request


def all_to_all_flat(
    channel: Channel,
    output: Tensor,
    own: Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
) -> Request:
    """Give rank i the i-th share of the rows, as many as are said, or as many as all others."""
    request = Request([output])
    received = _shares(request.target(output), output_rows, channel.size, "output")
    sent = _shares(own.contiguous(), input_rows, channel.size, "input")
    if output_rows or input_rows:
        request.collectives = [UnevenAllToAll(channel, received, sent)]
        return request
    if output.nbytes != own.nbytes:
        raise ShapeError(
            f"output and input must be of one size (output: {_described(output)}, input: {_described(own)})"
        )
    request.collectives = [AllToAll(channel, received, sent, own.nbytes // channel.size)]
    return request


def barrier(channel: Channel) -> Request:
    """Wait for everyone."""
    request = Request()
    request.collectives = [Barrier(channel)]
    return request


def _reduced(channel: Channel, flat: Tensor, reduction: Reduction) -> Collective:
    # Among two, to read the other's part and to be given half of it cost the same, and reading is one word
    # less.
    alone = channel.size == 2 or adds_up_alone(channel, flat.nbytes)
    kind: Any = ReduceAlone if alone else ReduceInPlace
    collective: Collective = kind(channel, flat, reduction.op, reduction.name)
    return collective


def _hand_out(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = flat.view(torch.uint8).split([tensor.nbytes for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _gathered(channel: Channel, request: Request, outputs: Sequence[Tensor], own: Tensor) -> Collective:
    _check_same(channel.size, outputs, own, "output")
    everyone = [as_bytes(request.target(output)) for output in outputs]
    return Gather(channel, as_bytes(own.contiguous()), everyone)


def _reduce_scattered(
    channel: Channel, request: Request, output: Tensor, own: list[Tensor], reduction: Reduction
) -> None:
    if reduction.factor is not None:
        own = [tensor * reduction.factor for tensor in own]
    flat = operand(request.target(output))
    own = own or [flat] * channel.size
    request.collectives.append(ReduceScatter(channel, flat, own, reduction.op, reduction.name))
    if reduction.averages:
        request.divide(flat, channel.size)


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
            raise ShapeError(f"the {name}'s rows cannot be shared equally ({name}: {_described(tensor)})")
        rows = [count // size] * size
    if len(rows) != size or sum(rows) != count:
        raise ShapeError(
            f"the {name}'s split sizes must be as many as there are ranks, and add up to its rows "
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
        raise ShapeError(f"there must be an {name} for every rank ({name}s: {len(tensors)}, wanted: {count})")
    for index, tensor in enumerate(tensors):
        if tensor.shape != model.shape or tensor.dtype != model.dtype:
            raise ShapeError(
                f"invalid tensor size or type: {name} {index} is not like the tensor of this rank "
                f"({name} {index}: {_described(tensor)}, this rank's: {_described(model)})"
            )


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"
