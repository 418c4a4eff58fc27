"""Gradients averaged one by one, inside the graph that torch.compile makes of backward.

Compiled autograd traces the hooks of parameters. Ours note, launch and wait, which no graph can hold; in
their place it traces one functional all-reduce a gradient, which inductor joins into buckets. Then every
rank must use the same parameters in a step, as torch's wrapper asks too.
"""

from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

from torch import Tensor

from paceline.comm.functional import all_reduced
from paceline.comm.group import Group
from paceline.errors import UnsupportedError
from paceline.hooks.exchange import Exchange
from paceline.hooks.rounds import Rounds


class Settings(Protocol):
    """What is known here of a reducer.

    Attributes:
        syncs: whether a backward is synced.
        group: whom to average with.
        exchange: how buckets are averaged otherwise.
        comm_hooks: pairs of a hook and its state, called with ``(gradient, parameter)`` if there are any.
    """

    syncs: bool
    group: Group
    exchange: Exchange
    comm_hooks: list[tuple[Callable[..., Any], Any]]

    @property
    def weighed(self) -> bool:
        """Whether contributions count by a weight."""


def traced_reduction(reducer: Settings) -> Callable[[Tensor], None]:
    """A hook that averages the gradient of a parameter at once; it does not keep the reducer alive."""
    alive = ref(reducer)

    def reduce(parameter: Tensor) -> None:
        here, grad = alive(), parameter.grad
        if here is None or grad is None or not here.syncs:
            return
        if here.weighed:
            raise UnsupportedError("contributions cannot be weighed in a compiled backward")
        if isinstance(here.exchange, Rounds):
            raise UnsupportedError(f"{here.exchange.name} cannot be used in a compiled backward")
        if here.comm_hooks:
            for hook, state in here.comm_hooks:
                hook(state, (grad, parameter))
        else:
            grad.copy_(all_reduced(grad / here.group.size, here.group.process_group))

    return reduce
