"""Names of torch's reducer that its tests, its hooks and libraries call.

Those around a backward are for one that was not to be synced by its forward: Lightning calls them where its
user runs backward by hand, inside forward; Accelerate to sync the last of several backward passes whose
forwards came first.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.ddp.reducer.readiness import Ledger
from paceline.ddp.reducer.step_report import Summary
from paceline.tensors.dtensor import Trained


class TorchNames:
    """What a reducer of torch's is asked or told; ours mostly learns it from the gradients themselves.

    Attributes:
        announced: whether the next backward is to be synced whatever its forward was.
    """

    announced: bool = False
    expected: bool
    group: Group
    ledger: Ledger
    parameters: Sequence[Trained]
    summary: Summary | None
    trainable_at_wrap: Sequence[int]

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:  # noqa: ARG002  # torch's signature
        """Have the next backward synced, also that of a forward under ``no_sync``."""
        self.announced = self.expected = True

    def _rebuild_buckets(self) -> bool:
        """A new plan is adopted when a step begins: there is none to adopt before."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing is left to be reduced once a backward has ended, whether the graph is static or not."""

    def _get_local_used_map(self) -> Tensor:
        """How many ranks used each trainable parameter in the last step."""
        assert self.summary is not None
        used = [self.summary.used[slot] for slot in self.trainable_at_wrap]
        return torch.tensor(used, dtype=torch.int32, device=self.parameters[0].device)

    def _run_allreduce_hook(self, bucket: Any) -> "torch.futures.Future[Any]":
        """A future of the sum of a hook's bucket, for torch's own hooks."""
        return self.group.all_reduce_future(bucket.buffer())

    def _ddp_graph_static(self) -> bool:
        """Whether every step used the same parameters."""
        return self.ledger.steady
