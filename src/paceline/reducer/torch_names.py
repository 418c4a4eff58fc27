"""Names of torch's reducer that libraries call, and that ask nothing of ours.

Lightning calls them around a backward that its user runs by hand, inside forward: there torch's reducer has
to be told what ours learns from the gradients themselves.
"""

from collections.abc import Sequence

from torch import Tensor


class TorchNames:
    """What a reducer of torch's would have to be told."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """A backward is going to begin; the first gradient says so too."""

    def _rebuild_buckets(self) -> bool:
        """A new plan is adopted when a step begins: there is none to adopt before."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing is left to be reduced once a backward has ended, whether the graph is static or not."""
