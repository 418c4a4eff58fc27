"""Averages as the hook "auto" has chosen: plainly, or by a hook."""

from collections.abc import Sequence

from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import OnSlow, Pending
from paceline.ddp.buckets.bucket_set import Bucket
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.exchange.generator_hook import GeneratorHookExchange
from paceline.hooks.auto import Auto


class ChosenExchange(Exchange):
    """Averages by the hook "auto", and plainly where that has chosen ``average``.

    Then the step report travels behind the last bucket, as without a hook.

    Args:
        group: the ranks.
        plain: the plain average.
        hook: the hook.
    """

    def __init__(self, group: Group, plain: Exchange, hook: Auto) -> None:
        super().__init__(group)
        self._hook = hook
        self._plain = plain.for_group(group)
        self._by_hook = GeneratorHookExchange(group, hook)
        self._now: Exchange = self._by_hook
        self.supports_join = self._by_hook.supports_join

    @property
    def name(self) -> str:  # type: ignore[override]  # it changes
        """The hook's name."""
        return self._by_hook.name

    @property
    def description(self) -> str:
        """The hook's description."""
        return self._by_hook.description

    @property
    def signature(self) -> str:
        """The hook's signature."""
        return self._by_hook.signature

    def for_group(self, group: Group) -> "ChosenExchange":
        """The same among other ranks; what the hook remembers stays."""
        self._hook.release()
        return ChosenExchange(group, self._plain, self._hook)

    def settle(self) -> bool:
        """Average as was chosen from the next step on."""
        now = self._plain if self._hook.averages_plainly else self._by_hook
        if now is self._now:
            return False
        self._now, self.carries_report = now, now.carries_report
        return True

    def factor(self, ranks: int) -> float:
        """What gradients are multiplied by before the reduction."""
        return self._now.factor(ranks)

    def begin(self, weight: float | None, ranks: int) -> None:
        """Get ready for a step."""
        self._now.begin(weight, ranks)
        self.sum_per_result = self._now.sum_per_result

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """A step has ended well on every rank."""
        self._now.finish(parameters, used, total)

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:
        """Begin to reduce a bucket."""
        return self._now.launch(bucket, number, is_last=is_last)

    def wait(self, bucket: Bucket, number: int, pending: Pending, on_slow: OnSlow) -> None:
        """Wait for a launched bucket."""
        self._now.wait(bucket, number, pending, on_slow)
