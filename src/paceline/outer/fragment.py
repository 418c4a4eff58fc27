"""One fragment of the parameters: the state that all hosts have in common, and this host's change of it.

Note [Changes that are sent]. Between two outer steps a host's parameters move away from the common ones. What
a host sends is the difference: common minus own, plus what compression left out last time. The mean of all
hosts' differences is to the outer step what a gradient is to an optimizer's step.

The host trains on while its change is under way. When the result is there, own parameters move by the new
common value minus what they were when the change was sent. So what the host has learned since then stays, and
is part of its next change. If the change did not count, they move by the new common value minus the old one:
then all that the host has learned stays, and is sent next time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.hooks.compressors import Compressor
from paceline.hooks.hook import as_real, work_type
from paceline.tensors.dtensor import local_of

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class OuterOptimizer:
    """SGD with Nesterov momentum, on the common parameters.

    Attributes:
        lr: the learning rate.
        momentum: the part of the last direction that stays.
    """

    lr: float
    momentum: float


@dataclass(frozen=True)
class SentChange:
    """A change that is under way.

    Attributes:
        number: its round.
        own: this host's parameters when it was made.
        message: what was sent.
        residual: what compression leaves out, if the change counts.
    """

    number: int
    own: Tensor
    message: bytes
    residual: Tensor


class FlatParameters:
    """Some parameters of this rank, as one flat tensor in host memory.

    Args:
        parameters: the parameters.

    Attributes:
        numel: the number of their elements; a complex one counts twice.
        dtype: the type in which they are read.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        tensors = self._tensors()
        self._sizes = [tensor.numel() for tensor in tensors]
        self.numel = sum(self._sizes)
        self.dtype = max((work_type(each) for each in tensors), key=lambda each: each.itemsize)

    @torch.no_grad()
    def read(self) -> Tensor:
        """A copy of the parameters as they are now."""
        return torch.cat([each.to(_CPU, self.dtype).reshape(-1) for each in self._tensors()])

    @torch.no_grad()
    def move(self, by: Tensor) -> None:
        """Move the parameters."""
        for tensor, part in zip(self._tensors(), by.split(self._sizes), strict=True):
            tensor.add_(part.view(tensor.shape).to(tensor.device))

    @torch.no_grad()
    def replace(self, value: Tensor) -> None:
        """Make the parameters equal to a value."""
        for tensor, part in zip(self._tensors(), value.split(self._sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _tensors(self) -> list[Tensor]:
        """The parameters as real tensors; made anew, because an optimizer may give them other memory."""
        return [as_real(local_of(parameter).detach()) for parameter in self._parameters]


class Fragment:
    """A fragment's state on the rank that talks to other hosts.

    Args:
        parameters: this host's parameters.
        compressor: what changes are sent as.
        optimizer: what makes an outer step of the mean change.

    Attributes:
        common: the value that all hosts have in common.
        momentum: the outer optimizer's.
        residual: what compression has left out of this host's last change.
        parameters: this host's parameters.
        sent: the change that is under way, if there is one.
    """

    def __init__(self, parameters: FlatParameters, compressor: Compressor, optimizer: OuterOptimizer) -> None:
        self._compressor = compressor
        self._optimizer = optimizer
        self.parameters = parameters
        self.common = parameters.read()
        self.momentum = torch.zeros_like(self.common)
        self.residual = torch.zeros_like(self.common)
        self.sent: SentChange | None = None

    def encode(self, number: int, own: Tensor) -> bytes:
        """This host's change, compressed; its own parameters are ``own``."""
        change = (self.common - own).add_(self.residual)
        message = self._compressor.encode(change.unsqueeze(0))
        # Not in place: a compressor that changes nothing returns the change itself.
        content = message.numpy().tobytes()
        self.sent = SentChange(number, own, content, change - self._decode(message))
        return content

    def step(self, number: int, changes: Mapping[int, bytes], host: int) -> Tensor | None:
        """Make an outer step of the hosts' changes.

        Returns:
            What this host's parameters move by; None if no host had a change.
        """
        sent, self.sent = self.sent, None
        if not changes:
            return None
        # What counts as this host's may be of an earlier process.
        if sent is not None and sent.number == number and changes.get(host) == sent.message:
            before, self.residual = sent.own, sent.residual
        else:
            before = self.common.clone()
        mean = torch.zeros_like(self.common)
        for _, change in sorted(changes.items()):
            mean.add_(self._decode(torch.frombuffer(bytearray(change), dtype=torch.uint8).view(1, -1)))
        mean.div_(len(changes))
        self.momentum.mul_(self._optimizer.momentum).add_(mean)
        direction = mean.add_(self.momentum, alpha=self._optimizer.momentum)
        self.common.sub_(direction, alpha=self._optimizer.lr)
        return self.common - before

    def take(self, common: Tensor, momentum: Tensor, *, joins: bool) -> Tensor:
        """Go on from another host's state.

        Args:
            common: its common parameters.
            momentum: its momentum.
            joins: whether this host's own parameters are replaced, so that nothing was left out of them.

        Returns:
            What this host's parameters move by.
        """
        move = common - self.common
        self.common.copy_(common)
        self.momentum.copy_(momentum)
        if joins or self.sent is not None:  # whether the change counted, and left out more, is not known
            self.residual.zero_()
        self.sent = None
        return move

    def _decode(self, message: Tensor) -> Tensor:
        return self._compressor.decode(message, self.common.numel(), self.common.dtype)[0]
