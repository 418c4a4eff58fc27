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
The engine must not enter a replica's graph by itself, because it would free what a later thread needs.
So what the threads compute under ``create_graph`` gets such a node in its turn, with the gradients they were
given among its ends, and from then on the replicas' graphs are retained until they are dropped. They are
retained too if the engine will enter them after the node, from something that forward left outside its
outputs (an auxiliary loss, say): it tells so of the last nodes before the ends.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, increment_version

from paceline.data_parallel.threads import run_together
from paceline.tensors import tree


def is_possible() -> bool:
    """Whether there will be a backward for threads to run."""
    # torch 2.13: forward-mode derivatives would not pass the node.
    return torch.is_grad_enabled() and forward_ad._current_level < 0


@dataclass(frozen=True)
class Arguments:
    """What one replica is called with.

    Attributes:
        given: its arguments, with tensors of our own in the place of the tensors.
        ends: what its graph ends at among them.
        aliases: the tensors that need no gradient, each with the one in its place.
    """

    given: Any
    ends: list[torch.Tensor]
    aliases: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, given: Any) -> "Arguments":
        """The same arguments, made the replica's own. See Note [Nobody else has the ends]."""
        ends: list[torch.Tensor] = []
        aliases: list[tuple[torch.Tensor, torch.Tensor]] = []

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.requires_grad:
                ends.append(leaf.view_as(leaf))
                return ends[-1].clone()
            # The same memory, but no view, and a version of its own: replicas may write into their parts.
            aliases.append((leaf, leaf.data))
            return aliases[-1][1]

        return cls(tree.map_leaves(own, given), ends, aliases)

    def tell_of_writes(self) -> None:
        """Let torch know that the caller's memory changed where forward wrote into an alias of it."""
        for leaf, alias in self.aliases:
            if alias._version:
                increment_version(leaf)


def together(
    outputs: Sequence[Any], copies: Sequence[Sequence[torch.Tensor]], arguments: Sequence[Arguments]
) -> Sequence[Any]:
    """The replicas' outputs, such that their backward runs in a thread a replica where that is possible.

    Args:
        outputs: one nested output a replica.
        copies: for each replica, its differentiable copies of the module's tensors.
        arguments: for each replica, what it was called with.
    """
    shares = [
        _Share(_differentiable(tree.leaves(output)), ends := [*own, *its.ends], ends)
        for output, own, its in zip(outputs, copies, arguments, strict=True)
    ]
    if not all(map(_untouched, copies)) or not all(share.outputs for share in shares):
        return outputs
    if (joined := _join(shares, _Graphs())) is None:
        return outputs
    return [tree.map_leaves(lambda leaf: joined.get(id(leaf), leaf), output) for output in outputs]


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

    def last_nodes(self) -> list[Node] | None:
        """The nodes before the ends, or None if the graph leads anywhere else.

        See Note [Where a replica's graph ends].
        """
        ends = {_edge(end) for end in self.ends}
        walls = {node for node, _ in ends}
        edges = [_edge(output) for output in self.outputs]
        seen: set[Node] = set()
        last: list[Node] = []
        while edges:
            node, number = edges.pop()
            if node in walls:
                if (node, number) not in ends:
                    return None
            elif node not in seen:
                seen.add(node)
                following = [(after, n) for after, n in node.next_functions if after is not None]
                if not following or _forbids_ends(node):
                    return None
                edges += following
                if not walls.isdisjoint([after for after, _ in following]):
                    last.append(node)
        return last


class _Part(NamedTuple):
    """What backward needs of a share: no values of its outputs, so none are kept alive."""

    outputs: Sequence[GradientEdge]
    ends: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    last_nodes: Sequence[Node]


def _parts(shares: Sequence[_Share]) -> list[_Part] | None:
    parts = []
    for share in shares:
        if (last := share.last_nodes()) is None:
            return None
        parts.append(_Part([*map(get_gradient_edge, share.outputs)], share.ends, share.sources, last))
    return parts


def _edge(tensor: torch.Tensor) -> tuple[Node, int]:
    if tensor.grad_fn is not None:  # quicker than to ask torch
        return tensor.grad_fn, tensor.output_nr
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _forbids_ends(node: Node) -> bool:
    # Re-entrant checkpointing, torch's or another's, asks torch whether the backward has chosen ends.
    # torch 2.13: the class of a node that Python wrote names the Function that it belongs to.
    function = getattr(type(node), "_forward_cls", None)
    if function is None:
        return False
    code = getattr(inspect.unwrap(function.backward), "__code__", None)
    return code is None or "_is_checkpoint_valid" in code.co_names


def _untouched(copies: Sequence[torch.Tensor]) -> bool:
    """Whether forward left the copies as ends must be. See Note [Nobody else has the ends]."""
    origin = copies[0].grad_fn if copies else None
    return all(
        copy.grad_fn is origin and copy._backward_hooks is None and not copy.retains_grad for copy in copies
    )


def _differentiable(leaves: Iterable[object]) -> list[torch.Tensor]:
    """Those that require a gradient, each once."""
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    return [*found.values()]


def _join(shares: Sequence[_Share], graphs: _Graphs) -> dict[int, torch.Tensor] | None:
    """What stands behind one node in the place of each output, by its id; None if a graph leads elsewhere."""
    if (parts := _parts(shares)) is None:
        return None
    outputs = [output for share in shares for output in share.outputs]
    sources = [source for share in shares for source in share.sources]
    values = [output.detach() for output in outputs]
    joined = _Together.apply(graphs, parts, values, *sources)  # type: ignore[no-untyped-call]
    return dict(zip(map(id, outputs), joined, strict=True))


Gradients = Sequence[torch.Tensor | None]


class _Together(torch.autograd.Function):
    """One node in the place of all replicas' graphs."""

    @staticmethod
    def forward(
        ctx: Any,
        graphs: _Graphs,
        parts: Sequence[_Part],
        outputs: Sequence[torch.Tensor],
        *_sources: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graphs = graphs
        ctx.parts = parts
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        remaining = iter(gradients)
        given = [[next(remaining) for _ in part.outputs] for part in ctx.parts]
        # torch 2.13: whether the backward that is running will come to a node.
        if any(torch._C._will_engine_execute_node(node) for part in ctx.parts for node in part.last_nodes):
            ctx.graphs.lasting = True
        run = _run_differentiably if torch.is_grad_enabled() else _run
        found = run(ctx.parts, given, ctx.graphs)
        return (None, None, None, *(gradient for own in found for gradient in own))


def _run_differentiably(
    parts: Sequence[_Part], given: Sequence[Gradients], graphs: _Graphs
) -> Sequence[Gradients]:
    """The ends' gradients, behind a node of their own. See Note [Backward of a backward]."""
    graphs.lasting = True
    own = [[_own(gradient) for gradient in gradients] for gradients in given]
    found = _run(parts, own, graphs)
    shares = [_share_again(*one) for one in zip(found, parts, own, given, strict=True)]
    if not any(share.outputs for share in shares):
        return found
    if (joined := _join(shares, graphs)) is None:
        return _run(parts, given, graphs)
    return [[joined.get(id(gradient), gradient) for gradient in mine] for mine in found]


def _share_again(found: Gradients, part: _Part, own: Gradients, given: Gradients) -> _Share:
    # Pair by pair: one gradient may have been given to two outputs, and has an end of ours for each.
    pairs = [(end, g) for end, g in zip(own, given, strict=True) if end is not None and g is not None]
    leading_on = [(end, g) for end, g in pairs if g.requires_grad]
    return _Share(
        _differentiable(found),
        [*part.ends, *(end for end, _ in leading_on)],
        [*part.sources, *(gradient for _, gradient in leading_on)],
    )


def _own(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """An end of our own in the place of a gradient that leads on, perhaps to other ends."""
    return gradient.detach().requires_grad_() if gradient is not None and gradient.requires_grad else gradient


def _run(parts: Sequence[_Part], given: Sequence[Gradients], graphs: _Graphs) -> Sequence[Gradients]:
    calls = [_backward_call(part, gradients, graphs) for part, gradients in zip(parts, given, strict=True)]
    return run_together(calls, lambda i: f"in backward of replica {i} on device cpu")


def _backward_call(part: _Part, gradients: Gradients, graphs: _Graphs) -> Callable[[], Gradients]:
    reached = [(edge, g) for edge, g in zip(part.outputs, gradients, strict=True) if g is not None]
    create_graph = torch.is_grad_enabled()
    # torch 2.13: whether the backward that is running was asked to retain its graph.
    retain_graph = graphs.lasting or torch._C._autograd._get_current_graph_task_keep_graph()

    def call() -> Gradients:
        if not reached or not part.ends:
            return [None] * len(part.ends)
        return torch.autograd.grad(
            [edge for edge, _ in reached],
            part.ends,
            [gradient for _, gradient in reached],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )

    return call
