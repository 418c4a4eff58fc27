"""What torch's tests, hooks and libraries call on ``wrapper.reducer``.

``prepare_for_backward`` is for a backward that its forward did not announce as synced. Lightning calls it
where its user runs backward by hand, inside forward; Accelerate to sync the last of several backward passes
whose forwards came first.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.ddp.reducer.reducer import Reducer


class TorchReducer:
    """The names of torch's reducer; ours learns most of it from the gradients themselves.

    Args:
        reducer: our own.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:  # noqa: ARG002  # torch's signature
        """Sync the next backward, also that of a forward under ``no_sync``."""
        self._reducer.announced = self._reducer.expected = True

    def _rebuild_buckets(self) -> bool:
        """Report that nothing was rebuilt: a new plan is adopted when a step begins."""
        return False

    def _delay_all_reduce(self) -> None:
        """Do nothing: once a backward has ended, nothing is left to be reduced."""

    def _get_local_used_map(self) -> Tensor:
        """How many ranks used each trainable parameter in the last step."""
        summary = self._reducer.summary
        assert summary is not None
        used = [summary.used[slot] for slot in self._reducer.trainable_at_wrap]
        return torch.tensor(used, dtype=torch.int32, device=self._reducer.parameters[0].device)

    def _run_allreduce_hook(self, bucket: Any) -> "torch.futures.Future[Any]":
        """A future of the sum of a hook's bucket, for torch's own hooks."""
        return self._reducer.group.all_reduce_future(bucket.buffer())

    def _ddp_graph_static(self) -> bool:
        """Whether every step used the same parameters."""
        return self._reducer.ledger.steady
