"""Gather the results of all ranks in the order of the dataset."""

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
from paceline.tensors.tree import KeyPath, format_path, map_leaves, open_container

# One value per sample: the rows of a tensor, or the entries of a list.
Column = Tensor | list[Any]
_MAX_SHOWN = 5


def gather_in_order(
    values: Any,
    indices: Tensor | Iterable[int],
    *,
    group: Any = None,
    to: int | None = None,
    count: int | None = None,
    duplicates: Literal["error", "drop"] = "error",
) -> Any:
    """Gather the values of all ranks in the order of the dataset, each sample once. Every rank must call it.

    Ranks may have different numbers of samples. An error on one rank is raised on all.

    Args:
        values: the results for this rank's samples: a tensor with one row per sample, a list with one entry
            per sample (numbers, strings, anything that can be pickled), or a structure of those: dicts,
            tuples, namedtuples, dataclasses. A rank without samples may give None.
        indices: the samples' indices in the dataset, in the same order. With a ``ShardedSampler`` and a
            loader that keeps the order, the sampler itself can be given.
        group: a group of torch.distributed; the default group if None.
        to: the rank of the group that gets the result, the others get None; every rank gets it if None.
        count: how many samples are expected. If None, the samples must be those from 0 to the largest index,
            without a gap; if given, they may be any, but that many.
        duplicates: "error" refuses samples that came more than once, "drop" takes the first one, in the order
            of the ranks.

    Returns:
        ``values`` for all samples; tensors are on the device where this rank had its own.
    """
    ranks = Group(choose(group, None))
    if duplicates not in ("error", "drop"):
        raise OptionError(f'duplicates must be "error" or "drop" (duplicates: {duplicates!r})')
    if to is not None and not 0 <= to < ranks.size:
        raise OptionError(f"to must be a rank of the group (to: {to}, ranks: {ranks.size})")
    header, payload = _pack(values, indices)
    headers: list[RankHeader] = ranks.gather_objects(header)
    order = _check_and_order(headers, count=count, drop=duplicates == "drop")
    payloads = ranks.gather_objects(payload) if to is None else ranks.gather_objects_to(payload, to=to)
    return None if payloads is None else _unpack(payloads, headers, order, values)


@dataclass(frozen=True)
class RankHeader:
    """What a rank tells the others about its values before it sends them.

    Attributes:
        indices: the samples' indices.
        columns: the type of each column, by path.
        error: why the values cannot be gathered; None if they can.
    """

    indices: Tensor
    columns: dict[str, str]
    error: str | None = None


def _pack(values: Any, indices: Tensor | Iterable[int]) -> tuple[RankHeader, bytes]:
    """The header, and the values pickled: the structure with a path for each column, and the columns."""
    # An error is sent, not raised: the other ranks are about to gather, and would wait.
    try:
        numbers = _numbers(indices)
        columns: dict[str, Column] = {}
        empty = values is None and not len(numbers)
        skeleton = None if empty else _split_off_columns(values, None, columns)
        _check_lengths(columns, len(numbers))
        payload = pickle.dumps((skeleton, {path: _portable(column) for path, column in columns.items()}))
    except Exception as error:
        return RankHeader(torch.empty(0, device="cpu"), {}, f"{type(error).__name__}: {error}"), b""
    return RankHeader(numbers, {path: _describe_column(column) for path, column in columns.items()}), payload


def _numbers(indices: Tensor | Iterable[int]) -> Tensor:
    listed = indices.tolist() if isinstance(indices, Tensor) else indices
    numbers = torch.tensor([index(each) for each in listed], dtype=torch.int64, device="cpu")
    if len(numbers) and int(numbers.min()) < 0:
        raise SamplesError(f"a sample's index must not be negative (index: {int(numbers.min())})")
    return numbers


def _split_off_columns(values: Any, path: KeyPath, columns: dict[str, Column]) -> Any:
    """Replace each column of the structure by its path; ``columns`` gets the columns by path."""
    if isinstance(values, list) or (isinstance(values, Tensor) and values.ndim):
        name = format_path(path, "values")
        columns[name] = values
        return name
    container = open_container(values)
    if container is None:
        raise SamplesError(
            f"{format_path(path, 'values')} must be a tensor with one row per sample, or a list with one "
            f"entry per sample (found: {type(values).__name__})"
        )
    children = zip(container.keys, container.children, strict=True)
    return container.rebuild([_split_off_columns(child, (path, key), columns) for key, child in children])


def _check_lengths(columns: dict[str, Column], count: int) -> None:
    for path, column in columns.items():
        if len(column) != count:
            raise SamplesError(
                f"{path} must have one row or entry per index (rows: {len(column)}, indices: {count})"
            )


def _portable(column: Column) -> Column:
    # Cloned, because a view is pickled with all the memory that it is a view of.
    return column.detach().cpu().clone() if isinstance(column, Tensor) else column


def _describe_column(column: Column) -> str:
    return f"{column.dtype}, rows {tuple(column.shape[1:])}" if isinstance(column, Tensor) else "a list"


def _check_and_order(headers: Sequence[RankHeader], *, count: int | None, drop: bool) -> Tensor:
    """Where each sample is in the ranks' values, in rank order; an error is raised on all ranks."""
    for rank, header in enumerate(headers):
        if header.error is not None:
            raise SamplesError(f"the values of rank {rank} cannot be gathered: {header.error}")
    _check_columns({rank: header.columns for rank, header in enumerate(headers) if len(header.indices)})
    found = torch.cat([header.indices for header in headers])
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
            f"samples came more than once (samples: {len(samples)}, repetitions: {len(again)}, the first of "
            f"them: {samples[:_MAX_SHOWN].tolist()}); a sampler that pads does this: pass "
            'duplicates="drop" to take the first of each'
        )


def _check_complete(samples: Tensor, count: int | None) -> None:
    if count is not None and count != len(samples):
        raise SamplesError(
            f"the number of samples is not the expected one (found: {len(samples)}, expected: {count})"
        )
    if count is None and len(samples) and len(samples) <= (last := int(samples[-1])):
        absent = torch.ones(last, dtype=torch.bool, device="cpu")
        absent[samples[:-1]] = False
        raise SamplesError(
            f"samples are missing (samples: {last + 1 - len(samples)}, the first of them: "
            f"{absent.nonzero().flatten()[:_MAX_SHOWN].tolist()}); pass count if these are all"
        )


def _unpack(payloads: Sequence[bytes], headers: Sequence[RankHeader], order: Tensor, own: Any) -> Any:
    filled = [payload for payload, header in zip(payloads, headers, strict=True) if len(header.indices)]
    if not filled:
        return own
    # The ranks of a group trust each other, as in torch's own collectives of objects.
    unpacked = [pickle.loads(payload) for payload in filled]  # noqa: S301
    devices = _devices(own)
    skeleton, columns = unpacked[0]
    ordered = {
        path: _in_order(
            [theirs[path] for _, theirs in unpacked], order, devices.get(path, torch.device("cpu"))
        )
        for path in columns
    }
    return map_leaves(ordered.__getitem__, skeleton)


def _devices(own: Any) -> dict[str, torch.device]:
    columns: dict[str, Column] = {}
    if own is not None:
        _split_off_columns(own, None, columns)
    return {path: column.device for path, column in columns.items() if isinstance(column, Tensor)}


def _in_order(columns: Sequence[Any], order: Tensor, device: torch.device) -> Column:
    if isinstance(columns[0], Tensor):
        return torch.cat([*columns])[order].to(device)
    entries = [*chain.from_iterable(columns)]
    return [entries[position] for position in order.tolist()]
