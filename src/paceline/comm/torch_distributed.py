"""Types of torch.distributed that other packages need."""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import distributed
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinAlone", "JoinHook", "Joinable", "is_grad_bucket_type"]


class JoinAlone(Join):
    """torch's join context manager for one wrapper, whose group torch.distributed need not know.

    Args:
        wrapper: the wrapper.
        at_end: called at the end of the block, before its collectives; not if the block raised.
        naming: makes what is entered around the collectives at the end, to name a rank that is lost.
        arguments: those of torch's context manager.
    """

    def __init__(
        self,
        wrapper: Joinable,
        at_end: Callable[[], None],
        naming: Callable[[], contextlib.AbstractContextManager[None]],
        *arguments: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__([wrapper], *arguments, **kwargs)
        self._at_end = at_end
        self._naming = naming

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the block: take part in the others' steps until they have no inputs either."""
        if kind is None:
            self._at_end()
        with self._naming() if kind is None else contextlib.nullcontext():
            super().__exit__(kind, value, traceback)

    def _extract_dist_info(self) -> None:
        [wrapper] = self._joinables
        self._process_group = wrapper.join_process_group
        self._rank = wrapper.join_process_group.rank()
        self._device = wrapper.join_device


def is_grad_bucket_type(annotation: object) -> bool:
    """Whether an annotation names torch's own bucket type."""
    return annotation is distributed.GradBucket  # type: ignore[attr-defined]
