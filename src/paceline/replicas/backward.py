"""Backward of several CPU replicas at the same time.

torch's engine runs every CPU node of one backward in the thread that called it, so replicas that ran
forward side by side would run backward one after the other. Here the outputs of all replicas get one
autograd node; when the engine reaches it, each replica's own graph is run in a thread of its own.

Note [Where a replica's graph ends]
A replica's graph must end at tensors that the node knows: the replica's copies of the parameters, and its
inputs. Whatever else it reached (a tensor from a closure, say) would lose its gradient. So the graph is
walked once; if it leads anywhere else, the outputs stay as they are and the engine does it all, slower and
just as right. The same goes for re-entrant checkpointing, which allows no backward to chosen inputs.

The copies stay connected to the module, so a backward of a backward needs nothing special: what the threads
compute under ``create_graph`` is differentiable by itself.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from paceline.replicas.threads import run_together
from paceline.tensors import tree


def together(
    outputs: Sequence[Any], copies: Sequence[Sequence[torch.Tensor]], inputs: Sequence[Any]
) -> Sequence[Any]:
    """The replicas' outputs, such that their backward runs in a thread a replica where that is possible.

    Args:
        outputs: one nested output a replica.
        copies: for each replica, its differentiable copies of the module's tensors.
        inputs: for each replica, what its module was called with.
    """
    shares = [
        _Share(_differentiable(output), [*own, *_differentiable(given)])
        for output, own, given in zip(outputs, copies, inputs, strict=True)
    ]
    if not all(share.outputs and share.is_closed() for share in shares):
        return outputs
    joined = iter(_join(shares))
    return [
        tree.map_leaves(lambda leaf: next(joined) if _differs(leaf) else leaf, output) for output in outputs
    ]


@dataclass(frozen=True)
class _Share:
    """One replica's part of the graph: from its outputs down to its ends."""

    outputs: Sequence[torch.Tensor]
    ends: Sequence[torch.Tensor]

    def is_closed(self) -> bool:
        """Whether the graph leads to nothing but the ends. See Note [Where a replica's graph ends]."""
        ends = {(end.grad_fn, end.output_nr) for end in self.ends}
        walls = {node for node, _ in ends}
        edges = [(output.grad_fn, output.output_nr) for output in self.outputs]
        seen: set[Node | None] = set()
        while edges:
            node, number = edges.pop()
            if node in walls:
                if (node, number) not in ends:
                    return False
            elif node is not None and node not in seen:
                if not node.next_functions or isinstance(node, _REENTRANT):
                    return False
                seen.add(node)
                edges.extend(node.next_functions)
        return None not in walls  # an end without a node is a leaf: its hooks would run twice


# torch 2.13: the class of the graph nodes that re-entrant checkpointing makes.
_REENTRANT = CheckpointFunction._backward_cls


def _differs(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _differentiable(structure: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree.leaves(structure) if _differs(leaf)]


def _join(shares: Sequence[_Share]) -> Sequence[torch.Tensor]:
    ends = [end for share in shares for end in share.ends]
    return cast("Sequence[torch.Tensor]", _Together.apply(shares, *ends))  # type: ignore[no-untyped-call]


class _Together(torch.autograd.Function):
    """One node in the place of all replicas' graphs."""

    @staticmethod
    def forward(ctx: Any, shares: Sequence[_Share], *_ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Edges instead of tensors: backward needs no values, so none are kept alive.
        ctx.edges = [(_edges(share.outputs), _edges(share.ends)) for share in shares]
        return tuple(output.detach() for share in shares for output in share.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        remaining = iter(gradients)
        calls = [
            _backward_call(outputs, [next(remaining) for _ in outputs], ends) for outputs, ends in ctx.edges
        ]
        found = run_together(calls, lambda i: f"in backward of replica {i} on device cpu")
        return (None, *(gradient for own in found for gradient in own))


def _edges(tensors: Iterable[torch.Tensor]) -> list[GradientEdge]:
    return [get_gradient_edge(tensor) for tensor in tensors]


def _backward_call(
    outputs: Sequence[GradientEdge], gradients: Sequence[torch.Tensor | None], ends: Sequence[GradientEdge]
) -> Callable[[], Sequence[torch.Tensor | None]]:
    reached = [
        (edge, gradient) for edge, gradient in zip(outputs, gradients, strict=True) if gradient is not None
    ]
    create_graph = torch.is_grad_enabled()
    # torch 2.13: whether the backward that is running was asked to retain its graph.
    retain_graph = create_graph or torch._C._autograd._get_current_graph_task_keep_graph()

    def call() -> Sequence[torch.Tensor | None]:
        if not reached or not ends:
            return [None] * len(ends)
        return torch.autograd.grad(
            [edge for edge, _ in reached],
            ends,
            [gradient for _, gradient in reached],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )

    return call
