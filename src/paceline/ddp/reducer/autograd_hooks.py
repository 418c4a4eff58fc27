"""What autograd tells: a gradient is ready, a backward begins, a backward has ended or was lost.

Note [Hooks without Python code]. Autograd calls the hook of each parameter in each step. For most parameters
the hook is a list whose call is ``list.append``, so that the call ends in C. Only where there is something to
do, Python code runs. Every parameter has a hook all the same: a backward that did not begin at the wrapper's
outputs is seen only by the gradients that it brings.

Note [The end of backward]. The end is an event, not a count. It is queued on the backward that runs when it
is asked for. Inside a re-entrant checkpoint that is only an inner backward, which ends too early. Therefore
outputs have a hook that runs first of all, in the outermost backward, and asks for the end. If there is no
such hook, because a method other than forward was called, the first gradient asks for it.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from operator import is_
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from paceline.tensors.dtensor import Trained
from paceline.torch_private import current_graph_task_id, grad_hooks_of, queue_callback, will_execute_node
from paceline.tracing import traced_as, untraced_with_calls


class _Arrived(list[Trained]):
    """Parameters whose gradients have arrived, in order. Autograd calls it with each of them.

    The first call of a backward runs ``on_grads``. From then on it is a _Noting, until it is cleared.
    """

    def __init__(self, on_grads: Callable[[], None], in_graph: Callable[[Tensor], None]):
        super().__init__()
        # A WeakMethod would make the method anew for each call.
        self.owner, self.on_grads = weakref.ref(on_grads.__self__), on_grads.__func__  # type: ignore[attr-defined]
        self.in_graph = in_graph

    @traced_as(lambda self, parameter: self.in_graph(parameter))
    @untraced_with_calls
    def __call__(self, parameter: Trained) -> None:
        self.append(parameter)
        self.__class__ = _Noting
        if (owner := self.owner()) is not None:
            self.on_grads(owner)


class _Noting(_Arrived):
    """Only notes parameters: no Python code runs when autograd calls it, only ``list.append``."""

    __call__ = list.append  # type: ignore[assignment]


class GradHooks:
    """Hooks on parameters that run when a gradient was added to ``.grad``.

    Most only note the parameter, see Note [Hooks without Python code]. ``on_grads`` is called for the first
    gradient of a backward that has not been expected, and for chosen parameters.

    Args:
        parameters: every parameter, by slot.
        on_grads: called when there are gradients to look at; held weakly, because parameters hold the hooks.
        in_graph: what compiled autograd traces instead of these hooks.

    Attributes:
        nested: whether another wrapper averages the same gradients; it finds them in ``.grad`` until the end
            of backward.
        removed: whether the hooks were taken off for good.
    """

    def __init__(
        self,
        parameters: Sequence[Trained],
        on_grads: Callable[[], None],
        in_graph: Callable[[Tensor], None],
    ) -> None:
        self._parameters = parameters
        self._slot_of = {id(parameter): slot for slot, parameter in enumerate(parameters)}
        self._hooks: dict[int, _GradHook] = {}
        self._waiting: set[int] = set()
        self._chosen: Container[int] = ()
        self._changed: list[_GradHook] = []
        self._hooks_per_parameter: list[dict[int, object]] = []
        self.nested = False
        self.removed = False
        self._arrived = _Arrived(on_grads, in_graph)
        self._seen = 0
        self._last: list[Trained] = []  # what arrived in the last backward
        self._last_slots: list[int] = []
        self._on_chosen = self._make_hook(in_graph)

    def _make_hook(self, in_graph: Callable[[Tensor], None]) -> "Callable[[Trained], None]":
        arrived = self._arrived
        append, weak_owner, on_grads = arrived.append, arrived.owner, arrived.on_grads

        @traced_as(in_graph)
        @untraced_with_calls
        def on_grad(parameter: Trained) -> None:
            append(parameter)
            if (owner := weak_owner()) is not None:
                on_grads(owner)

        return on_grad

    def follow(self, slots: Iterable[int], *, chosen: Container[int]) -> None:
        """Have hooks on these parameters; after ``settle``, those of the chosen ones call ``on_grads``."""
        self._chosen = chosen
        slots = [*slots]
        self._waiting = {slot for slot in slots if slot not in self._hooks}
        self._changed = [
            hook
            for slot in slots
            if (hook := self._hooks.get(slot)) is not None and hook.call is not self._hook(slot)
        ]
        self.attach()

    def settle(self) -> None:
        """Replace hooks of parameters that were chosen since, or are no longer; not while one may run."""
        for hook in self._changed:
            hook.replace(self._hook(hook.slot))
        self._changed = []

    def attach(self) -> None:
        """Put hooks on parameters that have none yet; on a frozen one as soon as it requires a gradient."""
        found = {slot for slot in self._waiting if self._parameters[slot].requires_grad}
        if not found or self.removed:
            return
        self._waiting -= found
        for slot in found:
            self._hooks[slot] = _GradHook(slot, self._parameters[slot], self._hook(slot))
        self._hooks_per_parameter = [hook.all_of_parameter for hook in self._hooks.values()]

    def _hook(self, slot: int) -> Callable[[Trained], None]:
        return self._on_chosen if slot in self._chosen else self._arrived

    def expect(self) -> None:
        """A backward has begun: its first gradient need not be looked at."""
        self._arrived.__class__ = _Noting

    def new(self) -> list[int]:
        """Slots whose gradients have arrived since the last call, in order."""
        first, new = self._seen, self._arrived[self._seen :]
        self._seen += len(new)  # there may be more by now: several devices have several threads
        before = self._last[first : self._seen]
        if len(before) == len(new) and all(
            map(is_, new, before)
        ):  # as usual, and faster than looking them up
            return self._last_slots[first : self._seen]
        return [self._slot_of[id(parameter)] for parameter in new]

    def add(self, slots: Iterable[int]) -> None:
        """Note gradients that came another way."""
        self._arrived.extend(self._parameters[slot] for slot in slots)

    def clear(self) -> None:
        """Forget what has arrived, because a backward is over."""
        if len(self._arrived) != len(self._last) or not all(map(is_, self._arrived, self._last)):
            self._last = [*self._arrived]
            self._last_slots = [self._slot_of[id(parameter)] for parameter in self._last]
        self._arrived.clear()
        self._arrived.__class__ = _Arrived
        self._seen = 0

    def move_to_end(self) -> None:
        """Run after hooks that users have put on parameters since."""
        if not self.run_last():
            for hook in self._hooks.values():
                hook.move_to_end()

    def run_last(self) -> bool:
        """Whether no parameter has a hook that would run after ours."""
        if max(map(len, self._hooks_per_parameter), default=0) < 2:
            return True
        return all(hook.is_last() for hook in self._hooks.values())

    def remove(self) -> None:
        """Take all hooks off the parameters."""
        self.removed = True
        for hook in self._hooks.values():
            hook.handle.remove()
        self._hooks.clear()
        self._changed = []
        self._hooks_per_parameter = []


class _GradHook:
    def __init__(self, slot: int, parameter: Trained, call: Callable[[Trained], None]) -> None:
        self.slot = slot
        self.parameter = parameter
        self.call = call
        self.handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(call)
        self.all_of_parameter: dict[int, object] = grad_hooks_of(parameter)

    def is_last(self) -> bool:
        return next(reversed(self.all_of_parameter)) == self.handle.id

    def move_to_end(self) -> None:
        if self.parameter.requires_grad and not self.is_last():
            self.replace(self.call)

    def replace(self, call: Callable[[Trained], None]) -> None:
        if self.parameter.requires_grad:
            self.call = call
            self.handle.remove()
            self.handle = self.parameter.register_post_accumulate_grad_hook(call)


def at_start_of_backward(
    outputs: Iterable[Any], begins: Callable[..., object], *, synced: bool, but: Iterable[Any]
) -> None:
    """Call ``begins`` when a backward that accumulates gradients reaches one of the output tensors.

    Args:
        outputs: what a module returned.
        begins: a method that is called, perhaps more than once; held weakly, because a module that keeps its
            output would otherwise keep, through it, the wrapper that keeps the module.
        synced: passed on.
        but: what the module was given; an output that comes from there has no parameter behind it.
    """
    seen = {given.grad_fn for given in but if isinstance(given, Tensor)}
    for output in outputs:
        node = output.grad_fn if isinstance(output, Tensor) else None
        if node is not None and node not in seen:
            seen.add(node)
            node.register_prehook(_StartOfBackward(node, weakref.WeakMethod(begins), synced=synced))


def during_backward(outputs: Iterable[Any], enter: Callable[[], bool], leave: Callable[[], None]) -> None:
    """Call ``enter`` when any backward reaches one of the outputs, and ``leave`` when that one has ended.

    Args:
        outputs: what a module returned.
        enter: returns whether ``leave`` is to follow.
        leave: called whether that backward succeeds or not.
    """

    def reached(_grads: object) -> None:
        if enter():
            at_end_of_backward(leave, leave)

    for node in {output.grad_fn for output in outputs if isinstance(output, Tensor)}:
        if node is not None:
            node.register_prehook(reached)


def at_end_of_backward(finish: Callable[[], None], lose: Callable[[], None]) -> None:
    """Call ``finish`` when the running backward has ended, or ``lose`` when it raised."""
    queue_callback(_EndOfBackward(finish, lose))


def current_backward() -> int:
    """The number of the backward that this thread is running; -1 if it is running none."""
    return current_graph_task_id()


def accumulates_into_grad(leaf: Node) -> bool:
    """Whether the running backward adds the leaf's gradient to ``.grad``; distributed autograd's does not."""
    return _will_run(leaf)


class _StartOfBackward:
    def __init__(
        self, node: Node, begins: "weakref.WeakMethod[Callable[..., object]]", *, synced: bool
    ) -> None:
        self._nexts = [next_ for next_, _ in node.next_functions]
        self._begins = begins
        self._synced = synced

    @traced_as(lambda _self, _grads: None)  # there gradients are reduced in the graph, and nothing begins
    @untraced_with_calls
    def __call__(self, _grads: object) -> None:
        begins = self._begins()
        if begins is not None and _accumulates(self._nexts):
            begins(synced=self._synced)


class _EndOfBackward:
    """A callback that knows whether it was called before the engine deletes it."""

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

    In a backward that goes everywhere each node below one that runs will run. So it is enough to look at one
    path down to a leaf, and at what is beside it. A restricted backward that does add gradients
    (``backward(inputs=...)``) is left to its first gradient.
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
        return will_execute_node(node)
    except RuntimeError:  # a leaf that autograd.grad was asked for
        return False
