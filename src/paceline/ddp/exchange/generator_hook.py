"""Runs the hooks of paceline.hooks, which are generators of collectives: see Note [Hooks are generators]."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import OnSlow, Pending
from paceline.ddp.buckets.bucket_set import Bucket
from paceline.ddp.buckets.dense import DenseBucket
from paceline.ddp.exchange.between_hosts import BetweenHosts
from paceline.ddp.exchange.comm_hook import check_result
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.exchange.hook_run import HookRun
from paceline.errors import OptionError, UnsupportedError
from paceline.hooks.grad_bucket import GradBucket
from paceline.hooks.hook import Hook, averaged


class GeneratorHookExchange(Exchange):
    """Averages buckets by a hook that is a generator of collectives.

    The hook gets gradients that are not divided; averaging is up to the hook. The step report travels in a
    reduction of its own. If ranks share memory, a hook that is meant for traffic between hosts sees nothing
    else: see Note [Hooks between hosts].

    Args:
        group: the ranks.
        hook: the hook.
    """

    def __init__(self, group: Group, hook: Hook) -> None:
        super().__init__(group)
        hook.claim(self)
        self._hook = hook
        self.supports_join = hook.joins
        self._correction = 1.0  # the wanted average, divided by the average over all ranks
        self._between: BetweenHosts | None = None
        shared = group.shared if hook.between_hosts else None
        self._is_on_one_host = shared is not None and shared.hosts == 1
        if shared is None or shared.hosts == 1:
            hook.meet(group)
        else:
            self._between = BetweenHosts(group, shared, hook)

    @property
    def name(self) -> str:  # type: ignore[override]  # "auto" changes its own
        """The hook's name."""
        return self._hook.name

    @property
    def description(self) -> str:
        """The hook's description."""
        return self._hook.description

    @property
    def signature(self) -> str:
        """The hook's signature."""
        return self._hook.signature

    def for_group(self, group: Group) -> "GeneratorHookExchange":
        """The same hook among other ranks; what the hook remembers stays."""
        self._hook.release()
        return GeneratorHookExchange(group, self._hook)

    def begin(self, weight: float | None, ranks: int) -> None:
        """Tell the hook that a step begins."""
        self._correction = self._group.size / ranks
        self.sum_per_result = float(ranks)
        (self._between or self._hook).begin(weight)

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """Tell the hook that the step has ended well."""
        (self._between or self._hook).finish(parameters, used, total)

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:
        """Run the hook up to its first collective."""
        if self._group.size == 1:  # nothing to send, so nothing to lose by compressing it
            return _Finished(bucket.gradients)
        if self._between is not None and isinstance(bucket, DenseBucket):
            return self._between.launch(bucket, number, is_last=is_last)
        if self._between is not None or self._is_on_one_host:
            return HookRun(averaged(bucket.gradients, self._group), self.name)
        given = GradBucket(bucket, number, is_last=is_last)
        return HookRun(self._hook.reduce(given, self._group), self.name)

    def wait(self, bucket: Bucket, number: int, pending: Pending, on_slow: OnSlow) -> None:
        """Run the hook to its end."""
        result = pending.wait(on_slow)
        check_result(result, bucket, number, self.name)
        bucket.receive(result)
        if self._correction != 1:
            bucket.scale(self._correction)


class _Finished:
    """A result that needs no wait."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def wait(self, on_slow: OnSlow) -> Any:  # noqa: ARG002  # as every pending's
        return self._result

    def done(self) -> bool:
        return True


def check_state(state: object, hook: Hook) -> None:
    """Raise if a hook of paceline's own was registered with a state."""
    if state is not None:
        raise OptionError(
            f"this hook keeps its own state: register it with None (hook: {hook.name}, "
            f"state: {type(state).__name__})"
        )


def exchange_for_hook(group: Group, state: object, hook: Hook) -> GeneratorHookExchange:
    """The exchange for a hook that a user registered with ``register_comm_hook(None, hook)``."""
    check_state(state, hook)
    if group.may_change:
        raise UnsupportedError(
            "paceline's hooks need ranks that stay the same; in a process group whose ranks may change, use "
            f"torch's hooks (hook: {hook.name})"
        )
    return GeneratorHookExchange(group, hook)
