"""Backward of several CPU replicas at the same time.

torch's engine runs every CPU node of one backward in the thread that called it, so replicas that ran
forward side by side would run backward one after the other. Here one autograd node stands before the graphs
of all replicas; when the engine reaches it, each replica's graph is run in a thread of its own.

Note [Where a replica's graph ends]
A replica's graph must end at tensors that the node knows: the replica's copies of the parameters, and its
inputs. Whatever else it reached (a tensor from a closure, say) would lose its gradient. So the graph is
walked; if it leads anywhere else, the outputs stay as they are and the engine does it all, slower and just
as right. The same goes for re-entrant checkpointing, which allows no backward to chosen ends.

Note [Nobody else has the ends]
torch runs a tensor's hooks in each backward that reaches it, and would run those of an end twice; an end
that is changed in place, or leads to another end, would count twice. So what a replica works on is never an
end itself, but a clone of it; the parameters' copies, which would be dear to clone, are looked at afterwards.

Note [Backward of a backward]
The engine must never enter a replica's graph by itself, because it would free what a later thread needs.
So what the threads compute under ``create_graph`` gets such a node in its turn, with the gradients they were
given among its ends, and from then on the replicas' graphs are retained until they are dropped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from paceline.replicas.threads import run_together
from paceline.tensors import tree


def is_possible() -> bool:
    """Whether there will be a backward for threads to run."""
    # torch 2.13: forward-mode derivatives would not pass the node.
    return torch.is_grad_enabled() and forward_ad._current_level < 0


def separate(given: Any) -> tuple[Any, list[torch.Tensor]]:
    """What to call a replica with in the place of its arguments, and the ends of its graph among them."""
    ends: list[torch.Tensor] = []

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.requires_grad:
            return leaf.data  # the same memory, but no view and a version of its own: it may be written into
        ends.append(leaf.view_as(leaf))
        return ends[-1].clone()

    return tree.map_leaves(own, given), ends


def together(
    outputs: Sequence[Any], copies: Sequence[Sequence[torch.Tensor]], inputs: Sequence[Sequence[torch.Tensor]]
) -> Sequence[Any]:
    """The replicas' outputs, such that their backward runs in a thread a replica where that is possible.

    Args:
        outputs: one nested output a replica.
        copies: for each replica, its differentiable copies of the module's tensors.
        inputs: for each replica, the ends among its inputs.
    """
    shares = [
        _Share(_differentiable(tree.leaves(output)), ends := [*own, *given], ends)
        for output, own, given in zip(outputs, copies, inputs, strict=True)
    ]
    if not all(map(_untouched, copies)) or not _can_join(shares):
        return outputs
    joined = iter(_join(shares, _Graphs()))
    return [
        tree.map_leaves(lambda leaf: next(joined) if _is_differentiable(leaf) else leaf, output)
        for output in outputs
    ]


@dataclass
class _Graphs:
    """The graphs of one call's replicas."""

    lasting: bool = False  # see Note [Backward of a backward]


@dataclass(frozen=True)
class _Share:
    """One replica's part of the graph: from its outputs down to its ends.

    Attributes:
        outputs: where it begins.
        ends: where it ends.
        sources: what the engine goes on from, with the gradients of the ends.
    """

    outputs: Sequence[torch.Tensor]
    ends: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]

    def is_closed(self) -> bool:
        """Whether the graph leads to nothing but the ends. See Note [Where a replica's graph ends]."""
        ends = {_edge(end) for end in self.ends}
        walls = {node for node, _ in ends}
        edges = [(output.grad_fn, output.output_nr) for output in self.outputs]
        seen: set[Node] = set()
        while edges:
            node, number = edges.pop()
            if node in walls:
                if (node, number) not in ends:
                    return False
            elif node is not None and node not in seen:
                if not node.next_functions or _forbids_ends(node):
                    return False
                seen.add(node)
                edges.extend(node.next_functions)
        return True


def _edge(end: torch.Tensor) -> tuple[Node | None, int]:
    if end.grad_fn is not None:
        return end.grad_fn, end.output_nr
    edge = get_gradient_edge(end)
    return edge.node, edge.output_nr


def _forbids_ends(node: Node) -> bool:
    # Re-entrant checkpointing, torch's or another's, asks torch whether the backward has chosen ends.
    function = getattr(type(node), "_forward_cls", None)
    return function is not None and "_is_checkpoint_valid" in function.backward.__code__.co_names


def _untouched(copies: Sequence[torch.Tensor]) -> bool:
    """Whether forward left the copies as ends must be. See Note [Nobody else has the ends]."""
    origin = copies[0].grad_fn if copies else None
    return all(
        copy.grad_fn is origin and copy._backward_hooks is None and not copy.retains_grad for copy in copies
    )


def _can_join(shares: Sequence[_Share]) -> bool:
    return all(share.outputs and share.is_closed() for share in shares)


def _is_differentiable(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _differentiable(leaves: Iterable[object]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _join(shares: Sequence[_Share], graphs: _Graphs) -> Sequence[torch.Tensor]:
    sources = [source for share in shares for source in share.sources]
    joined = _Together.apply(graphs, shares, *sources)  # type: ignore[no-untyped-call]
    return cast("Sequence[torch.Tensor]", joined)


Gradients = Sequence[torch.Tensor | None]


class _Together(torch.autograd.Function):
    """One node in the place of all replicas' graphs."""

    @staticmethod
    def forward(
        ctx: Any, graphs: _Graphs, shares: Sequence[_Share], *_sources: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graphs = graphs
        # Edges instead of the outputs: backward needs no values of theirs, so none are kept alive.
        ctx.parts = [(_edges(share.outputs), share.ends, share.sources) for share in shares]
        return tuple(output.detach() for share in shares for output in share.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        remaining = iter(gradients)
        given = [[next(remaining) for _ in outputs] for outputs, _, _ in ctx.parts]
        run = _run_differentiably if torch.is_grad_enabled() else _run
        return (None, None, *(gradient for own in run(ctx.parts, given, ctx.graphs) for gradient in own))


def _run_differentiably(
    parts: Sequence[Any], given: Sequence[Gradients], graphs: _Graphs
) -> Sequence[Gradients]:
    """The ends' gradients, behind a node of their own. See Note [Backward of a backward]."""
    graphs.lasting = True
    own = [[_own(gradient) for gradient in gradients] for gradients in given]
    found = _run(parts, own, graphs)
    shares = [
        _Share(
            _differentiable(mine),
            [*ends, *_differentiable(ours)],
            [*sources, *_differentiable(theirs)],
        )
        for mine, (_, ends, sources), ours, theirs in zip(found, parts, own, given, strict=True)
    ]
    if not any(share.outputs for share in shares):
        return found
    if not all(share.is_closed() for share in shares):
        return _run(parts, given, graphs)
    joined = iter(_join(shares, graphs))
    return [[next(joined) if _is_differentiable(g) else g for g in mine] for mine in found]


def _own(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """An end of our own in the place of a gradient that leads on, perhaps to other ends."""
    return gradient.detach().requires_grad_() if gradient is not None and gradient.requires_grad else gradient


def _run(parts: Sequence[Any], given: Sequence[Gradients], graphs: _Graphs) -> Sequence[Gradients]:
    calls = [
        _backward_call(outputs, gradients, ends, graphs)
        for (outputs, ends, _), gradients in zip(parts, given, strict=True)
    ]
    return run_together(calls, lambda i: f"in backward of replica {i} on device cpu")


def _edges(tensors: Iterable[torch.Tensor]) -> list[GradientEdge]:
    return [get_gradient_edge(tensor) for tensor in tensors]


def _backward_call(
    outputs: Sequence[GradientEdge], gradients: Gradients, ends: Sequence[torch.Tensor], graphs: _Graphs
) -> Callable[[], Gradients]:
    reached = [
        (edge, gradient) for edge, gradient in zip(outputs, gradients, strict=True) if gradient is not None
    ]
    create_graph = torch.is_grad_enabled()
    # torch 2.13: whether the backward that is running was asked to retain its graph.
    retain_graph = graphs.lasting or torch._C._autograd._get_current_graph_task_keep_graph()

    def call() -> Gradients:
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
