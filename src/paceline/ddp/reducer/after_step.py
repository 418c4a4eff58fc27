"""What follows a step that has ended well on every rank: hooks, futures, optimizers inside backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.reducer.step_report import StepSummary
from paceline.ddp.state.precision import Precision
from paceline.torch_private import in_backward_optimizers, remove_in_backward_hooks


class AfterStep:
    """Runs on this rank alone: what raises here does not concern the other ranks.

    Among it are the optimizers that ``_apply_optimizer_in_backward`` gave to parameters. torch steps them
    when a gradient has arrived. Here that is too early: the gradient is one rank's, or one micro-batch's.
    They step once every rank is known to have finished the step, so that no rank updates its parameters in a
    step that another has lost.

    Args:
        parameters: the wrapped module's.
        precision: the module's mixed precision, if it has any.
    """

    def __init__(self, parameters: Sequence[Parameter], precision: Precision | None) -> None:
        self._parameters = parameters
        self._precision = precision
        self._with_optimizer: list[Parameter] = []
        self._futures: list[torch.futures.Future[Any]] = []

    def find_optimizers(self) -> None:
        """Look for optimizers that step inside backward, and keep torch's own hooks from stepping them."""
        self._with_optimizer = [each for each in self._parameters if in_backward_optimizers(each)]
        remove_in_backward_hooks(self._with_optimizer)

    def wait_after_step(self, futures: Sequence["torch.futures.Future[Any]"]) -> None:
        """Wait for futures after the next step."""
        self._futures.extend(futures)

    def run(self, exchange: Exchange, summary: StepSummary) -> None:
        """Finish the exchange, wait for the futures, cast the gradients, step the optimizers."""
        with torch.no_grad():
            exchange.finish(self._parameters, summary.used, summary.total_weight)
            while self._futures:
                self._futures.pop().wait()
            if self._precision is not None:
                self._precision.cast_grads()
            self._step_optimizers()

    def _step_optimizers(self) -> None:
        for parameter in self._with_optimizer:
            if parameter.grad is not None:
                for optimizer in in_backward_optimizers(parameter):
                    optimizer.step()
                parameter.grad = None
