"""The user ends each step: ``finalize_backward``.

Backward then returns while buckets are in flight, and the averages become ``.grad`` when the user says so.
Until then a parameter whose gradient is in flight has none, and an optimizer would leave it as it is without
a word. So optimizers are refused until the step has ended.
"""

import contextlib
import threading
import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.ddp.reducer.planner import PlanStage
from paceline.ddp.reducer.reducer import Reducer
from paceline.errors import StepError, UnsupportedError


class ManualFinalization:
    """What the user says about the end of a reducer's steps.

    Args:
        reducer: the reducer.
        refusal: why steps cannot be ended by the user, if so.
        always_after_backward: whether no step can end inside its backward.
    """

    def __init__(self, reducer: Reducer, refusal: str | None, *, always_after_backward: bool) -> None:
        self._reducer = reducer
        self._refusal = refusal
        self._always_after_backward = always_after_backward
        self._lock = threading.RLock()
        self._optimizer_hooks = contextlib.ExitStack()

    def require(self, *, required: bool) -> None:
        """Have the user end each step from now on, or no longer."""
        if required:
            self.check_supported()
        reducer = self._reducer
        is_idle = not (reducer.is_syncing or reducer.turns.awaits_finalize(reducer))
        if reducer.turns.is_expected(reducer) or not is_idle:
            raise StepError(
                "set_manual_finalization_required cannot be called after forward while a backward pass is "
                "expected or in progress; set require_manual_backward_finalization before forward, or when "
                f"the step has ended ({reducer.where})"
            )
        reducer.finalizes_manually = required
        self._optimizer_hooks.close()
        if required:
            self._guard_optimizers()

    @property
    def comes_after_backward(self) -> bool:
        """Whether the next step has to be ended after its backward, and not inside."""
        reducer, context, hooks = self._reducer, self._reducer.context, self._reducer.grad_hooks
        return reducer.finalizes_manually and (
            self._always_after_backward
            # Otherwise gradients may come later than the step could know.
            or reducer.planner.stage is PlanStage.GUESS
            or not context.readiness.used_all
            or any(context.parameters.local[slot].requires_grad for slot in context.outside)
            # Others read .grad until the end of backward, or have collectives to issue in it.
            or (hooks.nested or not hooks.run_last())
            or reducer.turns.is_shared(reducer)
        )

    def finalize(self) -> None:
        """End the step."""
        self.check_supported()
        with self._lock:  # if two threads call it, one is told that it was a call too many
            self._finalize()

    def _finalize(self) -> None:
        reducer, turns = self._reducer, self._reducer.turns
        if not reducer.finalizes_manually:
            raise StepError(
                "finalize_backward() called but manual backward finalization is not required; set "
                "require_manual_backward_finalization to True before forward"
            )
        if reducer.is_syncing:
            self._check_inside_backward()
            turns.finish_inside_backward(reducer)
        if not turns.awaits_finalize(reducer):
            raise StepError(
                "finalize_backward() called but no gradient reduction requires finalization: there was no "
                f"synced backward since the last call, or it raised ({reducer.where})"
            )
        turns.finalize(reducer)

    def _check_inside_backward(self) -> None:
        where = self._reducer.where
        if missing := self._reducer.missing():
            raise StepError(
                "finalize_backward() called before all DDP buckets were ready: some parameters have no "
                f"gradient yet; call it when they do, or after backward (parameters: {missing}, {where})"
            )
        if self.comes_after_backward:
            raise StepError(
                "finalize_backward() called inside backward in a step that has to be finalized after it; ask "
                f"should_finalize_after_backward after forward ({where})"
            )

    def check_supported(self) -> None:
        """Raise if steps cannot be ended by the user."""
        if self._refusal is not None:
            raise UnsupportedError(self._refusal)

    def _guard_optimizers(self) -> None:
        """Refuse optimizer steps on parameters whose gradients are in flight."""
        known = weakref.ref(self._reducer)
        ids = {id(parameter) for parameter in self._reducer.context.parameters.whole}

        def check(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            alive = known()
            if alive is None or not alive.is_launched:
                return
            if any(id(each) in ids for group in optimizer.param_groups for each in group["params"]):
                raise StepError(
                    f"{type(optimizer).__name__}.step() called before finalize_backward(): the gradients of "
                    f"this step are still being averaged ({alive.where})"
                )

        # After it too: a closure may have run a backward.
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            self._optimizer_hooks.callback(register(check).remove)
        weakref.finalize(self._reducer, self._optimizer_hooks.close)
