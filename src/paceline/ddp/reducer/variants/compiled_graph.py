"""Gradients averaged one by one, inside the graph that torch.compile makes of backward.

Compiled autograd traces the hooks of parameters. Ours note, launch and wait, which no graph can hold; in
their place it traces one functional all-reduce a gradient, which inductor joins into buckets. Then every
rank must use the same parameters in a step, as torch's wrapper asks too.
"""

from collections.abc import Callable
from typing import Protocol
from weakref import ref

from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.torch_distributed import traced_all_reduce
from paceline.ddp.exchange.comm_hook import CommHook
from paceline.ddp.exchange.exchange import Average, Exchange, LowPrecisionAverage
from paceline.errors import UnsupportedError


class Settings(Protocol):
    """What is known here of a reducer.

    Attributes:
        syncs: whether a backward is synced.
        group: whom to average with.
        exchange: how buckets are averaged otherwise; a user's hook gets ``(gradient, parameter)`` here.
    """

    syncs: bool
    group: Group
    exchange: Exchange

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
        if isinstance(here.exchange, CommHook) and not here.exchange.is_built_in:
            here.exchange.call((grad, parameter))
        elif not isinstance(here.exchange, Average | LowPrecisionAverage):
            raise UnsupportedError(
                f"{here.exchange.name} cannot be used in a compiled backward; run backward outside of it"
            )
        else:
            grad.copy_(traced_all_reduce(grad / here.group.size, here.group.process_group))

    return reduce
