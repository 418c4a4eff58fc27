"""What a wrapper is to torch's join context manager, with inputs and when they have run out."""

from collections.abc import Callable
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.comm.torch_distributed import Join, Joinable, JoinHook, disable_join
from paceline.ddp.compat.logging_samples import Stats
from paceline.ddp.join.attendance import Attendance, attend
from paceline.ddp.join.optimizer_state import take_over, watch_optimizers
from paceline.ddp.reducer.reducer import Reducer
from paceline.errors import OptionError, StepError


class Shadow(JoinHook):
    """Answers, for one wrapper, torch's join context manager.

    Args:
        wrapper: the wrapper.
    """

    def __init__(self, wrapper: "UnevenInputs") -> None:
        self._wrapper = wrapper
        super().__init__()

    def main_hook(self) -> None:
        """Issue the collectives of one step of the ranks that have inputs, in their order."""
        wrapper = self._wrapper
        attendance = attend(wrapper._group, wrapper.device, active=False, synced=False)
        wrapper._follow(attendance)
        wrapper.reducer.prepare()
        if wrapper._check_sync_bufs_pre_fwd() or wrapper._check_sync_bufs_post_fwd():
            wrapper._sync_buffers()
        wrapper.require_forward_param_sync = attendance.synced
        if attendance.synced:
            wrapper._own_grads = wrapper._own_grads or [
                each.grad for each in wrapper.reducer.context.parameters.local
            ]
            wrapper.reducer.context.parameters.clear_grads(range(len(wrapper._own_grads)))
            wrapper.reducer.run_empty_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Every rank is exhausted: all take over the model of one that was so last."""
        for parameter, grad in zip(
            self._wrapper.reducer.context.parameters.local, self._wrapper._own_grads or (), strict=False
        ):
            parameter.grad = grad
        self._wrapper._own_grads = None
        self._wrapper._sync_final_model(is_last_joiner)


class UnevenInputs(Joinable):
    """A wrapper's part in training with inputs that run out on some ranks before others."""

    device: torch.device
    process_group: Any
    reducer: Reducer
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    broadcast_bucket_size: int
    _group: Group
    _stats: Stats
    _use_python_reducer: bool
    _check_sync_bufs_pre_fwd: Callable[[], bool]
    _check_sync_bufs_post_fwd: Callable[[], bool]
    _sync_buffers: Callable[[], None]
    _broadcast_state: Callable[..., None]
    _buffer_source = 0
    _own_grads: Any = None
    _divides_by_all = True

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train in here with inputs that run out on some ranks before others.

        A rank without inputs takes part in the others' collectives with nothing; at the end every rank has
        the model of one that had inputs to the last, and the state of its optimizers. Each synced forward
        needs its backward.

        Args:
            divide_by_initial_world_size: let sums be divided by the number of all ranks, so that each sample
                counts the same; if not, by the number of those that still have inputs. A user's communication
                hook divides as it likes.
            enable: off for inputs known to be even; then nothing is told between the ranks.
            throw_on_early_termination: raise on every rank as soon as one runs out of inputs.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> Shadow:
        """What torch's join context manager calls on a rank without inputs."""
        if not self.reducer.exchange.supports_join or self._use_python_reducer:
            raise OptionError(
                "join is not for hooks that average parameters, nor for reductions in a compiled graph "
                f"(hook: {self.reducer.exchange.name}, in graph: {self._use_python_reducer})"
            )
        self._divides_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        self._stats.joins_uneven_inputs = True
        watch_optimizers()
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """The device for the collectives of torch's join context."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The group for the collectives of torch's join context."""
        return self.process_group

    def _attend(self, *, synced: bool) -> None:
        """Hear which ranks have inputs left, at the start of a forward."""
        if self.reducer.turns.is_shared(self.reducer):
            self._refuse_nested()
        if (told := Join.notify_join_context(self)) is not None:
            told.wait()
        attendance = attend(self._group, self.device, active=True, synced=synced)
        self._follow(attendance)

    def _follow(self, attendance: Attendance) -> None:
        self._buffer_source = attendance.authority
        if attendance.synced and not self._divides_by_all:
            self.reducer.ranks = len(attendance.active)

    def _refuse_nested(self) -> None:
        reason = (
            "under join a wrapper's forward needs its backward before another wrapper of the group has its "
            "forward, because a rank without inputs cannot know the order of the others' collectives"
        )
        self.reducer.turns.fail_forward(self.reducer, reason)
        raise StepError(f"{reason} (rank: {self._group.rank})")

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        """Make every rank's model, and its optimizers' state, that of the last rank which had inputs."""
        last = attend(self._group, self.device, active=is_last_joiner, synced=False)
        self._authoritative_rank = last.authority
        self._buffer_source = 0
        self.reducer.ranks = self._group.size
        self._broadcast_state(source=last.authority, buffers=self.forward_sync_buffers)
        if len(last.active) < self._group.size:
            take_over(
                self._group,
                self.reducer.context.parameters.whole,
                self.device,
                source=last.authority,
                bytes_at_once=self.broadcast_bucket_size,
            )
        disable_join(self)
