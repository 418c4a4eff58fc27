"""Run the backward of several CPU replicas at the same time.

torch's autograd engine runs all CPU nodes of one backward in the thread that called it. So replicas whose
forward ran side by side would run backward one after the other. Here one autograd node stands in front of the
graphs of all replicas; when the engine reaches it, ``torch.autograd.grad`` runs each replica's graph in a
thread of its own.

Note [Inputs of a replica's graph]
``torch.autograd.grad`` needs the graph's inputs: the replica's copies of the parameters, and the tensors
among its arguments. Any other leaf that the graph reaches (a tensor from a closure, for example) would lose
its gradient. So the graph is walked first. If it leads to anything but the known inputs, the outputs are
returned unchanged and the engine does everything: slower, but right. The same holds for re-entrant
checkpointing, which does not work under ``torch.autograd.grad``.

Note [Inputs belong to the node alone]
torch runs a tensor's hooks in each backward that reaches it, so hooks on an input would run twice; an input
that is changed in place, or from which another input is computed, would be counted twice. So a replica never
gets an input itself, but a clone of it. Cloning the parameters' copies would cost too much: they are checked
after forward instead.

Note [Double backward]
The engine must not enter a replica's graph by itself, because it would free tensors that a thread needs
later. So what the threads compute under ``create_graph`` gets such a node too, with the gradients that were
passed in among its inputs; from then on the replicas' graphs are retained. They are also retained if the
engine will enter them after the node, from a tensor that forward left outside its outputs (an auxiliary loss,
for example). To find out, the engine is asked about the nodes just before the inputs.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, increment_version

from paceline.data_parallel.threads import run_in_threads
from paceline.tensors import tree
from paceline.torch_private import (
    CHECKPOINT_TEST,
    backward_hooks_of,
    forward_ad_level,
    function_of,
    keeps_graph,
    version_of,
    will_execute_node,
)


def is_supported() -> bool:
    """Whether backward can run in threads for what is computed now."""
    # Forward-mode derivatives would not pass through the node.
    return torch.is_grad_enabled() and forward_ad_level() < 0


@dataclass(frozen=True)
class ReplicaArguments:
    """The arguments of one replica. See Note [Inputs belong to the node alone].

    Attributes:
        values: the arguments for the replica's forward.
        inputs: the tensors among the arguments at which its graph ends.
        aliases: each tensor that needs no gradient, with the tensor that the replica gets for it.
    """

    values: Any
    inputs: list[torch.Tensor]
    aliases: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, arguments: Any) -> "ReplicaArguments":
        """Give the replica tensors of its own."""
        inputs: list[torch.Tensor] = []
        aliases: list[tuple[torch.Tensor, torch.Tensor]] = []

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.requires_grad:
                inputs.append(leaf.view_as(leaf))
                return inputs[-1].clone()
            # Same memory, but not a view, and with its own version: replicas may write into their chunks.
            aliases.append((leaf, leaf.data))
            return aliases[-1][1]

        return cls(tree.map_leaves(own, arguments), inputs, aliases)

    def count_writes(self) -> None:
        """Increment the version of each of the caller's tensors whose memory forward has written to."""
        for leaf, alias in self.aliases:
            if version_of(alias):
                increment_version(leaf)


def with_threaded_backward(
    outputs: Sequence[Any], copies: Sequence[Sequence[torch.Tensor]], arguments: Sequence[ReplicaArguments]
) -> Sequence[Any]:
    """The replicas' outputs; their backward will run in one thread per replica, where that is possible.

    Args:
        outputs: the nested output of each replica.
        copies: for each replica, its differentiable copies of the module's tensors.
        arguments: the arguments of each replica.
    """
    graphs = [
        _Graph(_requiring_grad(tree.leaves(output)), inputs := [*own, *its.inputs], inputs)
        for output, own, its in zip(outputs, copies, arguments, strict=True)
    ]
    if not all(map(_can_be_inputs, copies)) or not all(graph.outputs for graph in graphs):
        return outputs
    if (replaced := _behind_one_node(graphs, _Retention())) is None:
        return outputs
    return [tree.map_leaves(lambda leaf: replaced.get(id(leaf), leaf), output) for output in outputs]


@dataclass
class _Retention:
    """Whether the graphs of one call's replicas are always retained. See Note [Double backward]."""

    always: bool = False


@dataclass(frozen=True)
class _Graph:
    """The autograd graph of one replica.

    Attributes:
        outputs: its outputs.
        inputs: its inputs, to which gradients are computed.
        sources: for each input, the tensor from which the engine goes on with its gradient.
    """

    outputs: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]

    def nodes_before_inputs(self) -> list[Node] | None:
        """The nodes just before the inputs, or None if the graph leads anywhere else.

        See Note [Inputs of a replica's graph].
        """
        inputs = {_edge(tensor) for tensor in self.inputs}
        input_nodes = {node for node, _ in inputs}
        edges = [_edge(output) for output in self.outputs]
        seen: set[Node] = set()
        found: list[Node] = []
        while edges:
            node, number = edges.pop()
            if node in input_nodes:
                if (node, number) not in inputs:
                    return None
            elif node not in seen:
                seen.add(node)
                following = [(after, n) for after, n in node.next_functions if after is not None]
                if not following or _forbids_autograd_grad(node):
                    return None
                edges += following
                if not input_nodes.isdisjoint([after for after, _ in following]):
                    found.append(node)
        return found


class _GraphEdges(NamedTuple):
    """What backward needs of a ``_Graph``: edges in the place of outputs, so that no output is kept alive."""

    outputs: Sequence[GradientEdge]
    inputs: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    nodes_before_inputs: Sequence[Node]


def _all_edges(graphs: Sequence[_Graph]) -> list[_GraphEdges] | None:
    edges = []
    for graph in graphs:
        if (nodes := graph.nodes_before_inputs()) is None:
            return None
        edges.append(
            _GraphEdges([*map(get_gradient_edge, graph.outputs)], graph.inputs, graph.sources, nodes)
        )
    return edges


def _edge(tensor: torch.Tensor) -> tuple[Node, int]:
    if tensor.grad_fn is not None:  # faster than get_gradient_edge
        return tensor.grad_fn, tensor.output_nr
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _forbids_autograd_grad(node: Node) -> bool:
    # Re-entrant checkpointing, torch's or another library's, asks torch whether backward was given inputs.
    function = function_of(node)
    if function is None:
        return False
    code = getattr(inspect.unwrap(function.backward), "__code__", None)
    return code is None or CHECKPOINT_TEST in code.co_names


def _can_be_inputs(copies: Sequence[torch.Tensor]) -> bool:
    """Whether forward left the copies as it found them. See Note [Inputs belong to the node alone]."""
    origin = copies[0].grad_fn if copies else None
    return all(
        copy.grad_fn is origin and backward_hooks_of(copy) is None and not copy.retains_grad
        for copy in copies
    )


def _requiring_grad(leaves: Iterable[object]) -> list[torch.Tensor]:
    """The tensors that require a gradient, each once."""
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    return [*found.values()]


def _behind_one_node(graphs: Sequence[_Graph], retention: _Retention) -> dict[int, torch.Tensor] | None:
    """For each output, by its id, the same values as output of one node; None if a graph leads elsewhere."""
    if (edges := _all_edges(graphs)) is None:
        return None
    outputs = [output for graph in graphs for output in graph.outputs]
    sources = [source for graph in graphs for source in graph.sources]
    values = [output.detach() for output in outputs]
    replaced = _ThreadedBackward.apply(retention, edges, values, *sources)  # type: ignore[no-untyped-call]
    return dict(zip(map(id, outputs), replaced, strict=True))


Gradients = Sequence[torch.Tensor | None]


class _ThreadedBackward(torch.autograd.Function):
    """One node in the place of all replicas' graphs."""

    @staticmethod
    def forward(
        ctx: Any,
        retention: _Retention,
        edges: Sequence[_GraphEdges],
        outputs: Sequence[torch.Tensor],
        *_sources: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.retention = retention
        ctx.edges = edges
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        remaining = iter(gradients)
        grad_outputs = [[next(remaining) for _ in graph.outputs] for graph in ctx.edges]
        nodes = (node for graph in ctx.edges for node in graph.nodes_before_inputs)
        if any(map(will_execute_node, nodes)):
            ctx.retention.always = True
        run = _run_differentiably if torch.is_grad_enabled() else _run
        found = run(ctx.edges, grad_outputs, ctx.retention)
        return (None, None, None, *(gradient for each in found for gradient in each))


def _run_differentiably(
    edges: Sequence[_GraphEdges], grad_outputs: Sequence[Gradients], retention: _Retention
) -> Sequence[Gradients]:
    """The inputs' gradients, behind a node of their own. See Note [Double backward]."""
    retention.always = True
    own = [[_as_input(gradient) for gradient in gradients] for gradients in grad_outputs]
    found = _run(edges, own, retention)
    graphs = [_gradient_graph(*each) for each in zip(found, edges, own, grad_outputs, strict=True)]
    if not any(graph.outputs for graph in graphs):
        return found
    if (replaced := _behind_one_node(graphs, retention)) is None:
        return _run(edges, grad_outputs, retention)
    return [[replaced.get(id(gradient), gradient) for gradient in mine] for mine in found]


def _as_input(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of our own in the place of a gradient that has a graph, which may lead to other inputs."""
    return gradient.detach().requires_grad_() if gradient is not None and gradient.requires_grad else gradient


def _gradient_graph(found: Gradients, edges: _GraphEdges, own: Gradients, grad_outputs: Gradients) -> _Graph:
    """The graph of one replica's gradients; the gradients that were passed in are among its inputs."""
    # Pair by pair: one gradient may have been passed for two outputs, and has a tensor of ours for each.
    pairs = [
        (mine, g) for mine, g in zip(own, grad_outputs, strict=True) if mine is not None and g is not None
    ]
    with_graph = [(mine, g) for mine, g in pairs if g.requires_grad]
    return _Graph(
        _requiring_grad(found),
        [*edges.inputs, *(mine for mine, _ in with_graph)],
        [*edges.sources, *(gradient for _, gradient in with_graph)],
    )


def _run(
    edges: Sequence[_GraphEdges], grad_outputs: Sequence[Gradients], retention: _Retention
) -> Sequence[Gradients]:
    calls = [
        _backward_call(graph, grads, retention) for graph, grads in zip(edges, grad_outputs, strict=True)
    ]
    return run_in_threads(calls, lambda i: f"in backward of replica {i} on device cpu")


def _backward_call(
    edges: _GraphEdges, grad_outputs: Gradients, retention: _Retention
) -> Callable[[], Gradients]:
    reached = [(edge, g) for edge, g in zip(edges.outputs, grad_outputs, strict=True) if g is not None]
    create_graph = torch.is_grad_enabled()
    retain_graph = retention.always or keeps_graph()

    def call() -> Gradients:
        if not reached or not edges.inputs:
            return [None] * len(edges.inputs)
        return torch.autograd.grad(
            [edge for edge, _ in reached],
            edges.inputs,
            [gradient for _, gradient in reached],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )

    return call
