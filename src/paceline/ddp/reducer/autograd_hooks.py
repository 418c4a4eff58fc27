"""What autograd tells: a gradient is ready, a backward begins, a backward has ended or was lost.

Note [The end of backward]. The end is an event, not a count. It is queued on the backward that runs when it
is asked for. Inside a re-entrant checkpoint that is only an inner backward, which ends too early; therefore
outputs are marked, and their mark runs first of all, in the outermost backward. Where there is no mark,
because a method other than forward was called, the first gradient asks for the end.

Private parts of torch that are used here, tried with torch 2.13: ``queue_callback`` of the engine,
``_will_engine_execute_node``, ``_current_graph_task_id``.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from paceline.tensors.dtensor import Trained
from paceline.tracing import traced_as, untraced_with_calls


class Arrivals:
    """Notes each gradient that was added to a parameter's ``.grad``, and has someone look at the notes.

    A note costs far less than a look. The first arrival of a backward is looked at at once, then every so
    many, and those of eager parameters always.

    Args:
        look: looks at ``noted``; must not keep the parameters alive.
        every: how many arrivals there are at most between two looks.
        in_graph: what compiled autograd traces in the place of a note.

    Attributes:
        noted: parameters in the order in which their gradients arrived, until cleared.
    """

    def __init__(self, look: Callable[[], None], every: int, in_graph: Callable[[Tensor], None]) -> None:
        self.noted: list[Trained] = []
        self._hooks: dict[int, _Hook] = {}
        self._hooks_a_parameter: list[dict[int, object]] = []
        noted, append = self.noted, self.noted.append

        @traced_as(in_graph)
        @untraced_with_calls
        def note(parameter: Trained) -> None:
            append(parameter)
            count = len(noted)
            if count == 1 or not count % every:
                look()

        @traced_as(in_graph)
        @untraced_with_calls
        def note_eagerly(parameter: Trained) -> None:
            append(parameter)
            look()

        self._note, self._note_eagerly = note, note_eagerly

    def watch(self, parameters: Mapping[int, Trained], *, eager: Container[int]) -> None:
        """Note the gradients of these slots' parameters from now on."""
        for slot, parameter in parameters.items():
            note = self._note_eagerly if slot in eager else self._note
            known = self._hooks.get(slot)
            if known is not None and known.note is not note:
                known.handle.remove()
            if known is None or known.note is not note:
                self._hooks[slot] = _Hook(parameter, note)
        self._hooks_a_parameter = [hook.all_of_parameter for hook in self._hooks.values()]

    def stay_last(self) -> bool:
        """Move behind hooks that users have put on parameters since; returns whether none comes after."""
        if self.are_not_last():
            for hook in self._hooks.values():
                hook.move_to_end()
            return not self.are_not_last()
        return True

    def are_not_last(self) -> bool:
        """Whether some parameter has a hook that would run after ours."""
        if max(map(len, self._hooks_a_parameter), default=0) < 2:
            return False
        return any(not hook.is_last() for hook in self._hooks.values())

    def clear(self) -> None:
        """Forget what was noted."""
        self.noted.clear()

    def remove(self) -> None:
        """Note nothing more."""
        for hook in self._hooks.values():
            hook.handle.remove()
        self._hooks.clear()
        self._hooks_a_parameter = []


class _Hook:
    def __init__(self, parameter: Trained, note: Callable[[Trained], None]) -> None:
        self.parameter = parameter
        self.note = note
        self.handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(note)
        self.all_of_parameter: dict[int, object] = parameter._post_accumulate_grad_hooks

    def is_last(self) -> bool:
        return next(reversed(self.all_of_parameter)) == self.handle.id

    def move_to_end(self) -> None:
        if self.parameter.requires_grad and not self.is_last():
            self.handle.remove()
            self.handle = self.parameter.register_post_accumulate_grad_hook(self.note)


def mark(outputs: Iterable[Any], begins: Callable[[], object], *, but: Iterable[Any]) -> None:
    """Call back when a backward that accumulates gradients reaches one of the output tensors.

    Args:
        outputs: what a module returned.
        begins: called.
        but: what the module was given; where an output comes from there, no parameter is behind it.
    """
    seen = {given.grad_fn for given in but if isinstance(given, Tensor)}
    for output in outputs:
        node = output.grad_fn if isinstance(output, Tensor) else None
        if node is not None and node not in seen:
            seen.add(node)
            node.register_prehook(_Mark(node, begins))


def during_backward(outputs: Iterable[Any], enter: Callable[[], bool], leave: Callable[[], None]) -> None:
    """Call ``enter`` when any backward reaches one of the outputs, and ``leave`` when that one has ended.

    Args:
        outputs: what a module returned.
        enter: called; returns whether ``leave`` is to follow.
        leave: called, whether that backward succeeds or not.
    """

    def reached(_grads: object) -> None:
        if enter():
            at_end_of_backward(leave, leave)

    for node in {output.grad_fn for output in outputs if isinstance(output, Tensor)}:
        if node is not None:
            node.register_prehook(reached)


def at_end_of_backward(finish: Callable[[], None], lose: Callable[[], None]) -> None:
    """Have ``finish`` called when the running backward has ended, or ``lose`` when it was given up."""
    Variable._execution_engine.queue_callback(_End(finish, lose))


def current_backward() -> int:
    """The number of the backward that this thread is running; -1 if it is running none."""
    return torch._C._current_graph_task_id()


def is_ordinary(leaf: Node) -> bool:
    """Whether the running backward adds the leaf's gradient to ``.grad``; distributed autograd's does not."""
    return _will_run(leaf)


class _Mark:
    def __init__(self, node: Node, begins: Callable[[], object]) -> None:
        self._nexts = [next_ for next_, _ in node.next_functions]
        self._begins = begins

    @traced_as(lambda _mark, _grads: None)  # there gradients are reduced in the graph, and nothing begins
    @untraced_with_calls
    def __call__(self, _grads: object) -> None:
        if _accumulates(self._nexts):
            self._begins()


class _End:
    """A callback that knows whether it was called before the engine let go of it."""

    def __init__(self, finish: Callable[[], None], lose: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._lose = lose

    @untraced_with_calls
    def __call__(self) -> None:
        finish, self._finish = self._finish, None
        assert finish is not None
        finish()

    @untraced_with_calls
    def __del__(self) -> None:
        if self._finish is not None:
            self._lose()


def _accumulates(nodes: Iterable[Node | None]) -> bool:
    """Whether the running backward goes everywhere, or only to chosen inputs as autograd.grad's does.

    In a backward that goes everywhere each node below one that runs will run. So one path down to a leaf
    tells, with what lies beside it. A restricted backward that does add gradients (``backward(inputs=...)``)
    is left to its first gradient.
    """
    while present := [node for node in nodes if node is not None]:
        if not all(map(_will_run, present)):
            return False
        # A leaf if there is one, to keep the path short.
        nearest = next((node for node in present if not node.next_functions), present[0])
        nodes = [next_ for next_, _ in nearest.next_functions]
    return True


def _will_run(node: Node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that autograd.grad was asked for
        return False
