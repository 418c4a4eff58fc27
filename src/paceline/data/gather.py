"""What ranks made of their samples, put together in the order of the dataset."""

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.comm.group import Group, choose
from paceline.errors import OptionError, SamplesError
from paceline.tensors.tree import Path, map_leaves, open_node, show

# One value a sample: the rows of a tensor, or the entries of a list.
Column = Tensor | list[Any]
_SHOWN = 5


def gather_in_order(
    values: Any,
    indices: Tensor | Iterable[int],
    *,
    group: Any = None,
    to: int | None = None,
    count: int | None = None,
    duplicates: Literal["error", "drop"] = "error",
) -> Any:
    """Every rank's values in the order of the dataset, each sample once. Every rank of the group calls it.

    Ranks may have different numbers of samples. What is wrong on one of them is raised on all.

    Args:
        values: what this rank made of its samples: a tensor with a row for each, a list with an entry for
            each (numbers, strings, anything that can be pickled), or a structure of those: dicts, tuples,
            namedtuples, dataclasses. A rank without samples may give None.
        indices: which samples of the dataset they are, in the same order. With a ``ShardedSampler`` and a
            loader that keeps the order, the sampler itself will do.
        group: a group of torch.distributed; the default group if None.
        to: the rank of the group that gets the result, None on the others; every rank if None.
        count: how many samples are expected. If None, they must be those from 0 to the largest that came,
            without a gap; if given, they may be any, but as many.
        duplicates: "error" refuses samples that came more than once, "drop" takes the first that came, in
            the order of the ranks.

    Returns:
        ``values`` for all samples; tensors are on the device where this rank had its own.
    """
    ours = Group(choose(group, None))
    if duplicates not in ("error", "drop"):
        raise OptionError(f'duplicates must be "error" or "drop" (duplicates: {duplicates!r})')
    if to is not None and not 0 <= to < ours.size:
        raise OptionError(f"there is no such rank to gather to (to: {to}, ranks: {ours.size})")
    parcel = _pack(values, indices)
    everyone: list[Label] = ours.gather_objects(parcel.label)
    order = _agree(everyone, count=count, drop=duplicates == "drop")
    packed = (
        ours.gather_objects(parcel.packed) if to is None else ours.gather_objects_to(parcel.packed, to=to)
    )
    return None if packed is None else _unpack(packed, everyone, order, values)


@dataclass(frozen=True)
class Label:
    """What every rank is told of a rank's parcel before it is sent.

    Attributes:
        indices: which samples it has.
        columns: what it has of each, by path.
        mistake: why there is nothing in it; None if all is well.
    """

    indices: Tensor
    columns: dict[str, str]
    mistake: str | None = None


@dataclass(frozen=True)
class Parcel:
    """A rank's values: the structure with paths for its columns, and the columns by path, pickled."""

    label: Label
    packed: bytes


def _pack(values: Any, indices: Tensor | Iterable[int]) -> Parcel:
    # A mistake is sent, not raised: the other ranks are about to gather, and would wait.
    try:
        numbers = _numbers(indices)
        columns: dict[str, Column] = {}
        empty = values is None and not len(numbers)
        skeleton = None if empty else _open(values, None, columns)
        _check_lengths(columns, len(numbers))
        packed = pickle.dumps((skeleton, {path: _portable(column) for path, column in columns.items()}))
    except Exception as error:
        return Parcel(Label(torch.empty(0, device="cpu"), {}, f"{type(error).__name__}: {error}"), b"")
    return Parcel(Label(numbers, {path: _kind(column) for path, column in columns.items()}), packed)


def _numbers(indices: Tensor | Iterable[int]) -> Tensor:
    listed = indices.tolist() if isinstance(indices, Tensor) else indices
    numbers = torch.tensor([index(each) for each in listed], dtype=torch.int64, device="cpu")
    if len(numbers) and int(numbers.min()) < 0:
        raise SamplesError(f"a sample's index must not be negative (index: {int(numbers.min())})")
    return numbers


def _open(values: Any, path: Path, columns: dict[str, Column]) -> Any:
    """The structure with each column's path in its place; columns are entered by path."""
    if isinstance(values, list) or (isinstance(values, Tensor) and values.ndim):
        name = show(path, "values")
        columns[name] = values
        return name
    node = open_node(values)
    if node is None:
        raise SamplesError(
            f"{show(path, 'values')} must be a tensor with a row a sample, or a list with an entry a sample "
            f"(found: {type(values).__name__})"
        )
    children = zip(node.keys, node.children, strict=True)
    return node.rebuild([_open(child, (path, key), columns) for key, child in children])


def _check_lengths(columns: dict[str, Column], count: int) -> None:
    for path, column in columns.items():
        if len(column) != count:
            raise SamplesError(
                f"{path} must have a row or an entry for each index (it has: {len(column)}, indices: {count})"
            )


def _portable(column: Column) -> Column:
    # Cloned, because a view is pickled with all the memory that it is a view of.
    return column.detach().cpu().clone() if isinstance(column, Tensor) else column


def _kind(column: Column) -> str:
    return f"{column.dtype}, rows {tuple(column.shape[1:])}" if isinstance(column, Tensor) else "a list"


def _agree(everyone: Sequence[Label], *, count: int | None, drop: bool) -> Tensor:
    """Where each sample is in what the ranks have, one rank after the other; raises the same on all."""
    for rank, label in enumerate(everyone):
        if label.mistake is not None:
            raise SamplesError(f"the values of rank {rank} cannot be gathered: {label.mistake}")
    _check_columns({rank: label.columns for rank, label in enumerate(everyone) if len(label.indices)})
    found = torch.cat([label.indices for label in everyone])
    order = found.argsort(stable=True)
    samples = found[order]
    first = torch.ones_like(samples, dtype=torch.bool)
    first[1:] = samples[1:] != samples[:-1]
    if not drop:
        _check_unique(samples[~first])
    _check_complete(samples[first], count)
    return order[first]


def _check_columns(by_rank: dict[int, dict[str, str]]) -> None:
    first, wanted = next(iter(by_rank.items()), (0, {}))
    for rank, columns in by_rank.items():
        for path in wanted | columns:
            ours, theirs = wanted.get(path, "nothing"), columns.get(path, "nothing")
            if ours != theirs:
                raise SamplesError(
                    f"{path} differs between ranks (rank {first}: {ours}; rank {rank}: {theirs})"
                )


def _check_unique(again: Tensor) -> None:
    if len(again):
        samples = again.unique()
        raise SamplesError(
            f"samples came more than once (how many: {len(samples)}, times too often: {len(again)}, the "
            f"first of them: {samples[:_SHOWN].tolist()}); a sampler that pads does this; "
            'duplicates="drop" takes the first of each'
        )


def _check_complete(samples: Tensor, count: int | None) -> None:
    if count is not None and count != len(samples):
        raise SamplesError(f"not as many samples came as expected (came: {len(samples)}, expected: {count})")
    if count is None and len(samples) and len(samples) <= (last := int(samples[-1])):
        absent = torch.ones(last, dtype=torch.bool, device="cpu")
        absent[samples[:-1]] = False
        raise SamplesError(
            f"samples did not come (how many: {last + 1 - len(samples)}, the first of them: "
            f"{absent.nonzero().flatten()[:_SHOWN].tolist()}); give a count if not all were to"
        )


def _unpack(packed: Sequence[bytes], everyone: Sequence[Label], order: Tensor, own: Any) -> Any:
    full = [data for data, label in zip(packed, everyone, strict=True) if len(label.indices)]
    if not full:
        return own
    # The ranks of a group trust each other, as in torch's own collectives of objects.
    parts = [pickle.loads(data) for data in full]  # noqa: S301
    devices = _devices(own)
    skeleton, columns = parts[0]
    joined = {
        path: _join([part[1][path] for part in parts], order, devices.get(path, torch.device("cpu")))
        for path in columns
    }
    return map_leaves(joined.__getitem__, skeleton)


def _devices(own: Any) -> dict[str, torch.device]:
    columns: dict[str, Column] = {}
    if own is not None:
        _open(own, None, columns)
    return {path: column.device for path, column in columns.items() if isinstance(column, Tensor)}


def _join(columns: Sequence[Any], order: Tensor, device: torch.device) -> Column:
    if isinstance(columns[0], Tensor):
        return torch.cat([*columns])[order].to(device)
    entries = [*chain.from_iterable(columns)]
    return [entries[place] for place in order.tolist()]
