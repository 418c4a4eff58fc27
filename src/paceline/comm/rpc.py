"""Remote references in outputs, and the contexts of distributed autograd."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, distributed

from paceline.tensors import tree
from paceline.torch_private import autograd_context_id, is_rpc_open


def current_context() -> int | None:
    """The context of distributed autograd in which this thread works; None if there is none."""
    if not is_rpc_open():
        return None
    try:
        return autograd_context_id()
    except RuntimeError:
        return None


if distributed.rpc.is_available():
    from torch.distributed.rpc import RRef

    _autograd: Any = distributed.autograd  # not declared in torch's own list of names

    def gradients(context: int) -> dict[Tensor, Tensor]:
        """The gradients that a context holds, by parameter."""
        held: dict[Tensor, Tensor] = _autograd.get_gradients(context)
        return held

    def leaves(obj: Any) -> Iterator[Any]:
        """Every leaf of a structure, in order; what a remote reference of our own refers to is part of it."""
        for leaf in tree.leaves(obj):
            if isinstance(leaf, RRef) and leaf.is_owner():
                yield from leaves(leaf.local_value())
            else:
                yield leaf

    def map_leaves(change: Callable[[Any], Any], obj: Any) -> Any:
        """The same structure with every such leaf changed; a reference to what has changed is a new one."""

        def change_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, RRef) or not leaf.is_owner():
                return change(leaf)
            before = leaf.local_value()
            after = map_leaves(change, before)
            return leaf if after is before else RRef(after)

        return tree.map_leaves(change_leaf, obj)

else:

    def gradients(context: int) -> dict[Tensor, Tensor]:
        """Never called: there are no contexts."""
        raise AssertionError(f"a context without distributed autograd (context: {context})")

    leaves = tree.leaves
    map_leaves = tree.map_leaves
