"""What a communication hook of paceline's own is: a generator of collectives.

Note [Rounds]. A hook that needs several collectives a bucket cannot chain them in the callbacks of futures:
which bucket's callback runs first differs from rank to rank, so ranks would issue different collectives and
wait for each other for ever. Here a hook hands over what it has in flight and is resumed when that is done:
every bucket's first collective leaves when the bucket is full, the later ones when all buckets have left, one
bucket after the other. So each rank issues the same collectives in the same order, without any threads.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.errors import OptionError
from paceline.hooks.grad_bucket import GradBucket

# Yields each collective once it is in flight, is resumed with its result, and returns the averages.
Reduction: TypeAlias = Generator[Pending, Any, Tensor]


class Hook(ABC):
    """Reduces buckets in rounds; hand one to ``register_comm_hook(None, hook)``.

    It may remember things from step to step, so each wrapper needs one of its own.

    Attributes:
        joins: whether it works under join, where some ranks have no inputs left.
        between_hosts: whether it is for what crosses hosts only. Then ranks that share memory first average
            there, and it runs among the hosts, each rank of a host with a part of the parameters; on one host
            it has nothing to do. Else it runs among all ranks, wherever they are.
    """

    _user: "weakref.ref[object] | None" = None
    joins = True
    between_hosts = False

    @property
    def name(self) -> str:
        """What it is called in errors and logs."""
        return type(self).__name__

    @abstractmethod
    def reduce(self, bucket: GradBucket, group: Group) -> Reduction:
        """Average a bucket's gradients over the group's ranks, of which there are two or more.

        The buffer holds this rank's gradients, undivided, and may be written to. How many collectives there
        are, and of which sizes, must be the same on every rank.
        """

    def meet(self, group: Group) -> None:  # noqa: B027  # a hook need not care
        """These are the ranks from now on."""

    def begin(self, weight: float | None) -> None:  # noqa: B027  # a hook need not care
        """A step begins; ``weight`` is what this rank's gradients have been multiplied by, if anything."""

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:  # noqa: B027  # as begin
        """A step has ended well on every rank; ``used`` says by how many ranks each parameter was used.

        ``total`` is the sum of the ranks' weights, if there were any.
        """

    def claim(self, user: object) -> None:
        """Belong to one user until that is gone."""
        if self._user is not None and self._user() is not None:
            raise OptionError(f"a hook serves one wrapper: make another for this one (hook: {self.name})")
        self._user = weakref.ref(user)

    def release(self) -> None:
        """Belong to nobody."""
        self._user = None
