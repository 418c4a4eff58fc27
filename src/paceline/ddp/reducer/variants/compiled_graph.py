"""Gradients averaged one by one, inside the graph that torch.compile makes of backward.

Compiled autograd traces the hooks of parameters. Ours launch collectives and wait, which no graph can hold.
Instead it traces one functional all-reduce per gradient, which inductor fuses into buckets. Then every rank
must use the same parameters in a step, as torch's wrapper asks too.
"""

from collections.abc import Callable
from typing import Protocol
from weakref import ref

from torch import Tensor

from paceline.comm.group import Group
from paceline.ddp.exchange.average import Average, LowPrecisionAverage
from paceline.ddp.exchange.comm_hook import FutureHookExchange
from paceline.ddp.exchange.exchange import Exchange
from paceline.errors import UnsupportedError
from paceline.torch_private import traced_all_reduce


class ReductionSettings(Protocol):
    """A reducer, as far as it is needed here; reducer.py imports this file.

    Attributes:
        syncs: whether a backward is synced.
    """

    syncs: bool

    @property
    def group(self) -> Group:
        """The ranks to average with."""

    @property
    def exchange(self) -> Exchange:
        """How buckets are averaged; here a user's hook gets ``(gradient, parameter)``."""

    @property
    def is_weighted(self) -> bool:
        """Whether contributions count by a weight."""


def traced_reduction(reducer: ReductionSettings) -> Callable[[Tensor], None]:
    """A hook that averages the gradient of a parameter at once; it does not keep the reducer alive."""
    alive = ref(reducer)

    def reduce(parameter: Tensor) -> None:
        here, grad = alive(), parameter.grad
        if here is None or grad is None or not here.syncs:
            return
        if here.is_weighted:
            raise UnsupportedError("contributions cannot be weighed in a compiled backward")
        if isinstance(here.exchange, FutureHookExchange) and not here.exchange.is_built_in:
            here.exchange.call((grad, parameter))
        elif not isinstance(here.exchange, Average | LowPrecisionAverage):
            raise UnsupportedError(
                f"{here.exchange.name} cannot be used in a compiled backward; run backward outside of it"
            )
        else:
            grad.copy_(traced_all_reduce(grad / here.group.size, here.group.process_group))

    return reduce
