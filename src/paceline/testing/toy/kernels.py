"""Queues torch's operations on CPU memory, and tells at once what their results will look like.

The operation runs twice: at once on torch's meta device, which knows shapes, strides and types of the
results, and later in the queue, which copies the results into memory that was allocated for them.
"""

from typing import Any

import torch

from paceline.testing.toy.queues import StreamQueue
from paceline.torch_private import tree_leaves, tree_map

_META = torch.device("meta")


def launch(func: Any, queue: StreamQueue, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Queue an operation; returns its results, which the queue will fill.

    What it changes in place is returned as it is. Wrong arguments raise here, wrong values in the queue.

    Raises:
        NotImplementedError: if the shapes of the results depend on values; nothing is queued.
    """
    results = _results(func, args, kwargs)
    if _only_draws(func):
        # At once, so that random numbers come in the order in which the host asks for them.
        drawn = func(*tree_map(_other_memory, args), **tree_map(_other_memory, kwargs))
        queue.put(str(func), lambda: _fill(results, drawn))
    else:
        queue.put(str(func), lambda: _fill(results, func(*args, **kwargs)))
    return results


def _only_draws(func: Any) -> bool:
    """Whether an operation draws random numbers, and does not read the values of its operand."""
    name = func.overloadpacket.__name__
    return torch.Tag.nondeterministic_seeded in func.tags and name.endswith(("_", "_like"))


def _other_memory(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _results(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Memory for the results; an operand where the operation returns one."""
    metas: dict[int, torch.Tensor] = {}
    operands: dict[int, torch.Tensor] = {}

    def on_meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return _META
        if isinstance(leaf, torch.Generator):
            return None
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in metas:
            meta = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=_META)
            metas[id(leaf)] = meta
            operands[id(meta)] = leaf
        return metas[id(leaf)]

    def allocate(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in operands:
            return operands.get(id(leaf), leaf)
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)

    found = func(*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
    for operand in operands.values():
        _check_size(func, metas[id(operand)], operand)
    return tree_map(allocate, found)


def _check_size(func: Any, meta: torch.Tensor, operand: torch.Tensor) -> None:
    # The queue cannot change the size that the host sees.
    if meta.shape != operand.shape:
        raise RuntimeError(
            f"{func} would change the size of an operand, which the toy device cannot do (size: "
            f"{tuple(operand.shape)}, wanted: {tuple(meta.shape)})"
        )


def _fill(results: Any, found: Any) -> None:
    for place, value in zip(tree_leaves(results), tree_leaves(found), strict=True):
        # The CPU leaves empty what it does not save for backward, as batch norm in eval mode.
        if not isinstance(place, torch.Tensor) or place is value or not value.numel():
            continue
        if place.shape != value.shape:
            raise RuntimeError(f"the CPU's result has the shape {value.shape}, and not {place.shape}")
        place.copy_(value)
