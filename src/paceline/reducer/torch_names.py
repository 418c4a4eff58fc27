"""Names of torch's reducer that libraries call around a backward that was not to be synced by its forward.

Lightning does so where its user runs backward by hand, inside forward; Accelerate to sync the last of several
backward passes whose forwards came first.
"""

from collections.abc import Sequence

from torch import Tensor


class TorchNames:
    """What a reducer of torch's is told by hand, and ours mostly learns from the gradients themselves.

    Attributes:
        announced: whether the next backward is to be synced whatever its forward was.
        expected: whether a backward is to come.
    """

    announced: bool = False
    expected: bool

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:  # noqa: ARG002  # torch's signature
        """Have the next backward synced, also that of a forward under ``no_sync``."""
        self.announced = self.expected = True

    def _rebuild_buckets(self) -> bool:
        """A new plan is adopted when a step begins: there is none to adopt before."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing is left to be reduced once a backward has ended, whether the graph is static or not."""
