"""What an exhausted rank does under join: one shadow for each step of the others, and the final model."""

from typing import Protocol

import torch

from paceline.comm.group import Group
from paceline.comm.joining import JoinHook
from paceline.join.attendance import attend
from paceline.reducer.reducer import Reducer


class Wrapper(Protocol):
    """What a shadow knows of the wrapper; the names are torch's."""

    device: torch.device
    reducer: Reducer
    require_forward_param_sync: bool
    _group: Group
    _buffer_source: int

    def _check_sync_bufs_pre_fwd(self) -> bool: ...

    def _check_sync_bufs_post_fwd(self) -> bool: ...

    def _sync_buffers(self) -> None: ...

    def _sync_final_model(self, is_last_joiner: bool) -> None: ...  # noqa: FBT001


class Shadow(JoinHook):
    """Answers, for one wrapper, torch's join context manager.

    Args:
        wrapper: the wrapper.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper
        super().__init__()

    def main_hook(self) -> None:
        """Issue the collectives of one step of the ranks that have inputs, in their order."""
        wrapper = self._wrapper
        attendance = attend(wrapper._group, wrapper.device, active=False, synced=False)
        wrapper._buffer_source = attendance.authority
        wrapper.reducer.prepare()
        if wrapper._check_sync_bufs_pre_fwd() or wrapper._check_sync_bufs_post_fwd():
            wrapper._sync_buffers()
        wrapper.require_forward_param_sync = attendance.synced
        if attendance.synced:
            wrapper.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001  # torch's signature
        """Every rank is exhausted: all take over the model of one that was so last."""
        self._wrapper.reducer.end_shadows()
        self._wrapper._sync_final_model(is_last_joiner)
