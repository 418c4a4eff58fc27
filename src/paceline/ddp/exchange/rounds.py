"""Runs the hooks of Note [Rounds] in the place of the plain average."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.ddp.buckets.dense import DenseBucket
from paceline.ddp.exchange.between_hosts import BetweenHosts
from paceline.ddp.exchange.comm_hook import check_result
from paceline.ddp.exchange.exchange import Bucket, Exchange, Unusual
from paceline.ddp.exchange.round import Round
from paceline.errors import OptionError
from paceline.hooks.average import averaged
from paceline.hooks.grad_bucket import GradBucket
from paceline.hooks.hook import Hook


class Rounds(Exchange):
    """Averages buckets by a hook that is a generator of collectives.

    Gradients reach the hook undivided; averaging is the hook's. The waybill travels beside them. Where ranks
    share memory, a hook that is for what crosses hosts sees nothing else: see Note [Between hosts].

    Args:
        group: whom to average with.
        hook: the hook.
    """

    def __init__(self, group: Group, hook: Hook) -> None:
        super().__init__(group)
        hook.claim(self)
        self._hook = hook
        self.joins = hook.joins
        self.name = hook.name
        self._share = 1.0  # the average that is wanted, divided by that over all ranks
        self._between: BetweenHosts | None = None
        shared = group.shared if hook.between_hosts else None
        self._is_on_one_host = shared is not None and shared.hosts == 1
        if shared is None or shared.hosts == 1:
            hook.meet(group)
        else:
            self._between = BetweenHosts(group, shared, hook)

    def on(self, group: Group) -> "Rounds":
        """The same among other ranks; what the hook remembers stays."""
        self._hook.release()
        return Rounds(group, self._hook)

    def begin(self, weight: float | None, ranks: int) -> None:
        """Tell the hook of a new step."""
        self._share = self._group.size / ranks
        self.gain = float(ranks)
        (self._between or self._hook).begin(weight)

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """Tell the hook that the step has ended well."""
        (self._between or self._hook).finish(parameters, used, total)

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:
        """Run the hook up to its first collective."""
        if self._group.size == 1:  # nothing to send, so nothing to lose by compressing it
            return Done(bucket.gradients)
        if self._between is not None and isinstance(bucket, DenseBucket):
            return self._between.launch(bucket, number, is_last=is_last)
        if self._between is not None or self._is_on_one_host:
            return Round(averaged(bucket.gradients, self._group), self.name)
        return Round(self._hook.reduce(GradBucket(bucket, number, is_last=is_last), self._group), self.name)

    def land(self, bucket: Bucket, number: int, pending: Pending, unusual: Unusual) -> None:
        """Run the hook to its end."""
        result = pending.wait(unusual)
        check_result(result, bucket, number, self.name)
        bucket.receive(result)
        if self._share != 1:
            bucket.scale(self._share)


class Done:
    """A result that nothing had to be awaited for."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self, unusual: Unusual) -> Tensor:  # noqa: ARG002  # as every pending's
        """The result."""
        return self._result

    def done(self) -> bool:
        """It always is."""
        return True


def rounds_of(group: Group, state: object, hook: Hook) -> Rounds:
    """What runs a hook that a user registered."""
    if state is not None:
        raise OptionError(
            f"this hook keeps its own state: register it with None (hook: {hook.name}, "
            f"state: {type(state).__name__})"
        )
    return Rounds(group, hook)
