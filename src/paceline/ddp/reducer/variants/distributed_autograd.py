"""Gradients of distributed autograd, which are in a context of its own and not in ``.grad``.

Note [Gradients of a context]. The engine of distributed autograd adds gradients to a context and runs the
hooks of the leaves' autograd nodes, not those of parameters. So the nodes have hooks, from the first forward
in a context on. When such a backward has ended, its gradients are put into ``.grad`` for the time of a step,
and the averages are written back into the context, in place.

Note [Outputs lead to every parameter]. A context takes gradients from its own engine only. A parameter that
another rank used and this one did not has none there to write the average into; torch's reducer fails on it.
Therefore outputs are made to lead to it, with a gradient of zeros. The price: what no rank used has zeros in
the context, not nothing.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from paceline.comm import rpc
from paceline.ddp.reducer.autograd_hooks import accumulates_into_grad, current_backward
from paceline.ddp.state.parameters import ReducedParameters


class AveragesGradients(Protocol):
    """A reducer, as far as it is needed here; reducer.py imports this file."""

    syncs: bool

    def begin_distributed(self) -> None:
        """Begin a step in a backward of distributed autograd."""


class DistributedAutograd:
    """Watches the backward passes of distributed autograd for one reducer.

    Args:
        reducer: averages gradients; not kept alive.
        parameters: its parameters.
    """

    def __init__(self, reducer: AveragesGradients, parameters: ReducedParameters) -> None:
        self._reducer = weakref.ref(reducer)
        self._slots = parameters.slots
        self._parameters = parameters.whole
        # Autograd keeps the node of a leaf only as long as a graph leads to it.
        self._nodes: dict[int, Node] = {}
        self._context = -1
        self._backward = -1
        self.clear()

    def clear(self) -> None:
        """Forget the backward that has ended."""
        self._pending: int | None = None
        self._arrived: list[int] = []

    @property
    def is_pending(self) -> bool:
        """Whether a context's gradients are to be averaged."""
        return self._pending is not None

    def watch(self, context: int, output: Any, slots: Iterable[int]) -> Any:
        """A forward was called in a context; returns its output, leading to the parameters of these slots."""
        watched = [slot for slot in slots if self._parameters[slot].requires_grad]
        for slot in watched:
            if slot not in self._nodes:
                self._watch(slot)
        self._context = context
        output = self._lead_to(output, watched)
        for node in _nodes(output):
            node.register_prehook(_ContextReached(weakref.ref(self), context))
        return output

    def enter(self, context: int) -> None:
        """A backward has reached what was computed in this context."""
        self._context = context

    def _watch(self, slot: int) -> None:
        node = get_gradient_edge(self._parameters[slot]).node
        self._nodes[slot] = node
        node.register_hook(partial(_note, weakref.ref(self), slot))

    def note(self, slot: int) -> None:
        """A leaf's node has run."""
        reducer = self._reducer()
        # In an ordinary backward the parameter's own hook tells.
        if reducer is None or not reducer.syncs or accumulates_into_grad(self._nodes[slot]):
            return
        if self._backward != current_backward():
            self._backward = current_backward()
            reducer.begin_distributed()
            self._pending = self._context
        self._arrived.append(slot)

    @contextlib.contextmanager
    def in_grad(self) -> Iterator[list[int]]:
        """Have the context's gradients in ``.grad``; gives their slots. Nothing if none are pending."""
        if self._pending is None:
            yield []
            return
        held = rpc.gradients(self._pending)
        own = [parameter.grad for parameter in self._parameters]
        lent = [held.get(parameter) for parameter in self._parameters]
        try:
            for parameter, grad in zip(self._parameters, lent, strict=True):
                parameter.grad = grad
            yield self._arrived
            for parameter, grad in zip(self._parameters, lent, strict=True):
                if grad is not None and parameter.grad is not None and parameter.grad is not grad:
                    grad.copy_(parameter.grad)
        finally:
            for parameter, grad in zip(self._parameters, own, strict=True):
                parameter.grad = grad

    def _lead_to(self, output: Any, watched: Iterable[int]) -> Any:
        reached = {id(leaf) for leaf in _leaves(_nodes(output))}
        missing = [slot for slot in watched if id(self._parameters[slot]) not in reached]
        tensors = [
            leaf for leaf in rpc.leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        ]
        if not missing or not tensors:
            return output
        sparse = [self._slots[slot].sparse for slot in missing]
        leading = _LeadToParameters.apply(  # type: ignore[no-untyped-call]
            sparse, *tensors, *(self._parameters[slot] for slot in missing)
        )
        changed = {id(before): after for before, after in zip(tensors, leading, strict=True)}
        return rpc.map_leaves(lambda leaf: changed.get(id(leaf), leaf), output)


class _ContextReached:
    def __init__(self, remote: "weakref.ref[DistributedAutograd]", context: int) -> None:
        self._remote = remote
        self._context = context

    def __call__(self, _grads: object) -> None:
        if (remote := self._remote()) is not None:
            remote.enter(self._context)


class _LeadToParameters(torch.autograd.Function):
    """Outputs as they are; backward gives the parameters behind them zeros in distributed autograd."""

    @staticmethod
    def forward(ctx: Any, sparse: list[bool], *given: Tensor) -> tuple[Tensor, ...]:
        outputs, parameters = given[: -len(sparse)], given[-len(sparse) :]
        ctx.set_materialize_grads(False)
        ctx.likes = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        ctx.sparse = sparse
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        node = ctx.next_functions[-1][0]
        if node is None or accumulates_into_grad(node):
            return None, *grads, *(None for _ in ctx.likes)
        return None, *grads, *map(_zeros, ctx.likes, ctx.sparse)


def _zeros(like: tuple[torch.Size, torch.dtype, torch.device], is_sparse: bool) -> Tensor:  # noqa: FBT001
    shape, dtype, device = like
    layout = torch.sparse_coo if is_sparse else torch.strided
    return torch.zeros(shape, dtype=dtype, device=device, layout=layout)


def _note(remote: "weakref.ref[DistributedAutograd]", slot: int, *_grads: object) -> None:
    if (here := remote()) is not None:
        here.note(slot)


def _nodes(output: Any) -> list[Node]:
    tensors = (leaf for leaf in rpc.leaves(output) if isinstance(leaf, Tensor))
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def _leaves(nodes: list[Node]) -> Iterator[Tensor]:
    """Every leaf that a backward from these nodes reaches in this process."""
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
