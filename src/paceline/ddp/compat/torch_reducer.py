"""Names of torch's reducer that its tests, its hooks and libraries call.

Lightning and Accelerate call ``prepare_for_backward`` for a backward that its forward did not announce:
Lightning where its user runs backward by hand, inside forward; Accelerate to sync the last of several
backward passes whose forwards came first.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.ddp.reducer.reducer import Reducer


class TorchReducer:
    """What torch's reducer is asked or told; ours mostly learns it from the gradients themselves.

    Args:
        reducer: ours.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:  # noqa: ARG002  # torch's signature
        """Have the next backward synced, also that of a forward under ``no_sync``."""
        self._reducer.sync_next_backward()

    def _rebuild_buckets(self) -> bool:
        """A new plan is adopted when a step begins: there is none to adopt before."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing is left to be reduced once a backward has ended, whether the graph is static or not."""

    def _get_local_used_map(self) -> Tensor:
        """For each trainable parameter the number of ranks that used it in the last step."""
        summary, parameters = self._reducer.last_summary, self._reducer.context.parameters
        assert summary is not None
        used = [summary.used[slot] for slot in parameters.trainable]
        return torch.tensor(used, dtype=torch.int32, device=parameters.local[0].device)

    def _run_allreduce_hook(self, bucket: Any) -> "torch.futures.Future[Any]":
        """A future of the sum of a hook's bucket, for torch's own hooks."""
        return self._reducer.group.all_reduce_future(bucket.buffer())

    def _ddp_graph_static(self) -> bool:
        """Whether every step used the same parameters."""
        return self._reducer.context.readiness.steady
