"""The state of an optimizer that steps parts, put together to that of the plain optimizer, and cut again.

Note [State of all ranks]. Every rank can put the whole state together by itself, so that ``state_dict`` need
not be called on all ranks. So the state of a rank's parts is in memory that the other ranks of the host can
read. What an optimizer makes in its first step is moved there, and stays the same tensor from then on. Where
each tensor is, and what is no tensor, is written down in a list, which other ranks read after the step's end.
"""

import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.shm.local_ranks import HostMemory
from paceline.comm.shm.transport import SharedMemoryTransport
from paceline.errors import ShardError
from paceline.tensors.part_parameter import part_of

# Each tensor begins at a multiple of this many bytes.
_ALIGNED = 64
# Tensors share a block of memory until it has so many bytes.
_BLOCK_BYTES = 1 << 20
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


class _Unreadable(NamedTuple):
    """Stands for a value that cannot be told to other ranks."""

    why: str


class PartState:
    """The state of one rank's parts, where the other ranks of the host find it.

    Args:
        shared: the memory of the host.
        memory: in which each rank says where its list is.
        moves: whether the optimizer's own tensors are moved, so that they are read where they are. Otherwise
            they are copied after each step, because nobody knows who else holds them.
    """

    def __init__(self, shared: SharedMemoryTransport, memory: HostMemory, *, moves: bool) -> None:
        self._shared = shared
        self._memory = memory
        self._moves = moves
        self._places = [
            memory.tensor(number * PLACE_BYTES, PLACE_BYTES, torch.uint8)
            for number in range(len(shared.ranks))
        ]
        self._places[shared.rank].zero_()
        self._list: Tensor | None = None
        self._stored: dict[tuple[Any, str], tuple[Tensor, StoredTensor]] = {}

    def publish(self, state: Mapping[Any, Any], keys: Mapping[Any, PartKey]) -> None:
        """Move or copy tensors to memory that others can read, and write down where everything is."""
        entries: list[tuple[Any, str, Any]] = []
        stored: dict[tuple[Any, str], tuple[Tensor, StoredTensor]] = {}
        new: list[tuple[Any, str, dict[str, Any]]] = []
        for part, values in state.items():
            if part not in keys:  # what an optimizer keeps for all parameters
                entries.append((part, "", values))
                continue
            for name, value in values.items():
                if not isinstance(value, Tensor):
                    entries.append((keys[part], name, value))
                elif (known := self._known(keys[part], name, value)) is None:
                    new.append((keys[part], name, values))
                else:
                    stored[keys[part], name] = known
                    if known[0] is not value:
                        self._fill(known[0], name, values)
        is_same = not new and not entries and stored.keys() == self._stored.keys()
        self._stored = stored
        # Not all at once: while tensors are moved, there are two of each.
        for start, end in _groups([values[name].nbytes for _, name, values in new]):
            self._store(new[start:end])
        if not is_same or self._list is None:
            self._write([*entries, *((*key, place) for key, (_, place) in self._stored.items())])

    def forget(self) -> None:
        """The optimizer has other tensors from now on, and no rank reads the old ones."""
        self._stored = {}
        self._memory.kept.clear()
        self._list = None

    def read_all(self) -> dict[Any, Any]:
        """Copies of the state of all parts of this host, and of what optimizers keep for all parameters."""
        found: dict[Any, Any] = {}
        for place in self._places:
            address, nbytes = _PLACE.unpack(bytes(place.tolist()))
            if not nbytes:
                continue
            for key, name, value in pickle.loads(bytes(self._shared.read(address, nbytes).tolist())):  # noqa: S301  # our own ranks'
                if isinstance(value, _Unreadable):
                    raise ShardError(
                        f"a part of the optimizer's state cannot be read by other ranks: {value.why}"
                    )
                known = self._read(value) if isinstance(value, StoredTensor) else value
                if name:
                    found.setdefault(key, {})[name] = known
                else:
                    found.setdefault(key, known)
        return found

    def _known(self, key: PartKey, name: str, value: Tensor) -> tuple[Tensor, StoredTensor] | None:
        """Where a tensor was stored before, if it still fits there."""
        known = self._stored.get((key, name))
        if known is None or (known[0].shape, known[0].dtype) != (value.shape, value.dtype):
            return None
        return known

    def _fill(self, stored: Tensor, name: str, values: dict[str, Any]) -> None:
        stored.copy_(values[name])
        if self._moves:
            values[name] = stored

    def _read(self, stored: StoredTensor) -> Tensor:
        data = self._shared.read(stored.address, stored.nbytes).view(stored.dtype)
        return data.as_strided(stored.shape, stored.stride)

    def _store(self, new: Sequence[tuple[Any, str, dict[str, Any]]]) -> None:
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
            stored = flat.as_strided(value.shape, torch.empty_like(value, device="meta").stride())
            place = StoredTensor(
                address + offset, value.nbytes, tuple(value.shape), stored.stride(), value.dtype
            )
            self._fill(stored, name, values)
            self._stored[key, name] = stored, place

    def _write(self, entries: Sequence[tuple[Any, str, Any]]) -> None:
        data = _pickled(entries)
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


def _groups(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Which tensors share a block: first, and the one behind the last."""
    start = nbytes = 0
    for end, size in enumerate(sizes, start=1):
        nbytes += size
        if nbytes >= _BLOCK_BYTES or end == len(sizes):
            yield start, end
            start, nbytes = end, 0


def _pickled(entries: Sequence[tuple[Any, str, Any]]) -> bytes:
    try:
        return pickle.dumps(entries)
    except Exception:  # whatever the values raise
        return pickle.dumps([_readable(*entry) for entry in entries])


def _readable(key: Any, name: str, value: Any) -> tuple[Any, str, Any]:
    try:
        pickle.dumps((key, name, value))
    except Exception as error:  # whatever the value raises
        return repr(key), name, _Unreadable(f"{name or key}: {error}")
    return key, name, value


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
