"""The state of an optimizer that steps parts, put together to that of the plain optimizer, and cut again.

Note [State of all ranks]. Every rank can put the whole state together by itself, so that ``state_dict`` need
not be called on all ranks. So the state of a rank's parts is in memory that the other ranks of the host can
read. What an optimizer makes in its first step is moved there, and stays the same tensor from then on. Where
each tensor is, and what is no tensor, is written down in a list, which other ranks read after the step's end.
"""

import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.shm.local_ranks import HostMemory
from paceline.comm.shm.transport import SharedMemoryTransport
from paceline.errors import ShardError
from paceline.tensors.part_parameter import part_of

# Each tensor begins at a multiple of this many bytes.
_ALIGNED = 64
# Where a rank's list is: address and length.
_PLACE = struct.Struct("<qq")
PLACE_BYTES = _PLACE.size


class PartKey(NamedTuple):
    """Which part of which parameter: the parameter's number in a state dict, and the part's first element."""

    number: int
    start: int


class StoredTensor(NamedTuple):
    """Where other ranks of the host find a tensor."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class PartState:
    """The state of one rank's parts, where the other ranks of the host find it.

    Args:
        shared: the memory of the host.
        memory: in which each rank says where its list is.
    """

    def __init__(self, shared: SharedMemoryTransport, memory: HostMemory) -> None:
        self._shared = shared
        self._memory = memory
        self._places = [
            memory.tensor(number * PLACE_BYTES, PLACE_BYTES, torch.uint8)
            for number in range(len(shared.ranks))
        ]
        self._places[shared.rank].zero_()
        self._list: Tensor | None = None
        self._moved: dict[tuple[PartKey, str], tuple[Tensor, StoredTensor]] = {}

    def publish(self, state: Mapping[Tensor, dict[str, Any]], keys: Mapping[Tensor, PartKey]) -> None:
        """Move new tensors to memory that others can read, and write down where everything is."""
        entries: list[tuple[PartKey, str, Any]] = []
        new: list[tuple[PartKey, str, dict[str, Any]]] = []
        for part, values in state.items():
            key = keys[part]
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    entries.append((key, name, value))
                elif (moved := self._moved.get((key, name))) is None or moved[0] is not value:
                    new.append((key, name, values))
        if new:
            self._move(new)
        elif not entries and self._list is not None:
            return
        entries += [(key, name, stored) for (key, name), (_, stored) in self._moved.items()]
        self._write(entries)

    def forget(self) -> None:
        """The optimizer has other tensors from now on."""
        self._moved = {}
        self._memory.kept.clear()
        self._list = None

    def read_all(self) -> dict[PartKey, dict[str, Any]]:
        """Copies of the state of all parts of this host."""
        found: dict[PartKey, dict[str, Any]] = {}
        for place in self._places:
            address, nbytes = _PLACE.unpack(bytes(place.tolist()))
            if not nbytes:
                continue
            for key, name, value in pickle.loads(bytes(self._shared.read(address, nbytes).tolist())):  # noqa: S301  # our own ranks'
                found.setdefault(key, {})[name] = (
                    self._read(value) if isinstance(value, StoredTensor) else value
                )
        return found

    def _read(self, stored: StoredTensor) -> Tensor:
        data = self._shared.read(stored.address, stored.nbytes).view(stored.dtype)
        return data.as_strided(stored.shape, stored.stride)

    def _move(self, new: Sequence[tuple[PartKey, str, dict[str, Any]]]) -> None:
        offsets, end = [], 0
        for _, name, values in new:
            offsets.append(end)
            end += -(-values[name].nbytes // _ALIGNED) * _ALIGNED
        block = self._empty(end)
        address = self._shared.address_of(block)
        assert address is not None
        for (key, name, values), offset in zip(new, offsets, strict=True):
            value = values[name]
            flat = block[offset : offset + value.nbytes].view(value.dtype)
            moved = flat.as_strided(value.shape, torch.empty_like(value, device="meta").stride())
            values[name] = moved.copy_(value)
            stored = StoredTensor(
                address + offset, value.nbytes, tuple(value.shape), moved.stride(), value.dtype
            )
            self._moved[key, name] = moved, stored

    def _write(self, entries: Sequence[tuple[PartKey, str, Any]]) -> None:
        data = pickle.dumps(entries)
        if self._list is None or len(data) > self._list.numel():
            self._list = self._empty(2 * len(data))
        self._list[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        place = _PLACE.pack(self._shared.address_of(self._list) or 0, len(data))
        self._places[self._shared.rank].copy_(torch.frombuffer(bytearray(place), dtype=torch.uint8))

    def _empty(self, nbytes: int) -> Tensor:
        block = self._shared.empty(max(nbytes, 1), torch.uint8)
        if block is None:
            raise ShardError(f"there is no shared memory left for the optimizer's state (bytes: {nbytes})")
        # Others may read it when this rank has dropped the optimizer.
        self._memory.kept.append(block)
        return block


def joined(parameter: Tensor, parts: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """The state of one parameter, from that of its parts.

    Args:
        parameter: the parameter.
        parts: the state of each part, by the part's first element.
    """
    first = parts[min(parts)]
    if len(parts) == 1:
        return first
    return {
        name: _like(parameter, {start: values[name] for start, values in parts.items()})
        if isinstance(value, Tensor) and value.dim()
        else value
        for name, value in first.items()
    }


def cut(value: Any, parameter: Tensor, start: int, part: Tensor) -> Any:
    """What a part gets of one value of its parameter's state."""
    if part.shape == parameter.shape or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    laid_out = torch.empty_like(parameter.detach(), dtype=value.dtype, device=value.device).copy_(value)
    return part_of(laid_out, start, part).clone()


def _like(parameter: Tensor, parts: Mapping[int, Tensor]) -> Tensor:
    whole = torch.empty_like(parameter.detach(), dtype=next(iter(parts.values())).dtype)
    for start, part in parts.items():
        part_of(whole, start, part).copy_(part)
    return whole
