"""Runs the hooks of Note [Rounds] in the place of the plain average."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from paceline.buckets.grad_bucket import GradBucket
from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.errors import BrokenHookError, HookError, OptionError
from paceline.hooks.comm_hook import check_result
from paceline.hooks.exchange import Bucket, Exchange, Unusual
from paceline.hooks.hook import Hook, Reduction


class Rounds(Exchange):
    """Averages buckets by a hook that is a generator of collectives.

    Gradients reach the hook undivided; averaging is the hook's. The waybill travels beside them.

    Args:
        group: whom to average with.
        hook: the hook.
    """

    def __init__(self, group: Group, hook: Hook) -> None:
        super().__init__(group)
        hook.claim(self)
        hook.meet(group)
        self._hook = hook
        self.joins = hook.joins
        self.name = hook.name
        self._share = 1.0  # the average that is wanted, divided by that over all ranks

    def on(self, group: Group) -> "Rounds":
        """The same among other ranks; what the hook remembers stays."""
        self._hook.release()
        return Rounds(group, self._hook)

    def begin(self, weight: float | None, ranks: int) -> None:
        """Tell the hook of a new step."""
        self._share = self._group.size / ranks
        self.gain = float(ranks)
        self._hook.begin(weight)

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """Tell the hook that the step has ended well."""
        self._hook.finish(parameters, used, total)

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:
        """Run the hook up to its first collective."""
        if self._group.size == 1:  # nothing to send, so nothing to lose by compressing it
            return Done(bucket.gradients)
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


class Round:
    """A bucket between two of its hook's collectives.

    It may be waited for again, when a step is lost after its buckets have landed.
    """

    def __init__(self, reduction: Reduction, name: str) -> None:
        self._reduction = reduction
        self._name = name
        self._in_flight: Pending | None = None
        self._result: Any = None
        self._resume(None)

    def wait(self, unusual: Unusual) -> Any:
        """Wait for one collective after the other; returns what the hook returned."""
        while self._in_flight is not None:
            value = self._in_flight.wait(unusual)
            try:
                self._resume(value)
            except Exception as error:  # its own, not that of a collective
                raise BrokenHookError(f"a hook raised {error!r} (hook: {self._name})") from error
        return self._result

    def done(self) -> bool:
        """Whether the hook has returned."""
        return self._in_flight is None

    def _resume(self, value: Any) -> None:
        self._in_flight = None
        try:
            pending: object = self._reduction.send(value)
        except StopIteration as stop:
            self._result = stop.value
            return
        if not isinstance(pending, Pending):
            self._reduction.close()
            raise HookError(f"a hook yields what is in flight (hook: {self._name}, got: {pending!r})")
        self._in_flight = pending


def rounds_of(group: Group, state: object, hook: Hook) -> Rounds:
    """What runs a hook that a user registered."""
    if state is not None:
        raise OptionError(
            f"this hook keeps its own state: register it with None (hook: {hook.name}, "
            f"state: {type(state).__name__})"
        )
    return Rounds(group, hook)
