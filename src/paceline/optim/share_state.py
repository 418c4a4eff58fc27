"""A rank's share of the optimizer state in a checkpoint that all ranks write and read together."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.tensors.param_groups import group_options


class ShareState:
    """One rank's share as ``torch.distributed.checkpoint`` takes it: each rank saves and loads its own.

    Every entry is stored under its parameter's name, so any number of ranks can load its shares.

    Args:
        optimizer: the optimizer of this rank's share.
        names: every parameter's name in the module.
        groups: the parameter groups of the ShardedOptimizer, whose options are the same on all ranks.
    """

    def __init__(
        self, optimizer: Optimizer, names: Mapping[Tensor, str], groups: Sequence[dict[str, Any]]
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._groups = groups

    def state_dict(self) -> dict[str, Any]:
        """The state itself, not a copy. State that no step has created yet is created, to be loaded into."""
        _create_missing_state(self._optimizer)
        return {
            "state": {
                self._names[parameter]: dict(state) for parameter, state in self._optimizer.state.items()
            },
            "groups": {str(number): group_options(group) for number, group in enumerate(self._groups)},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store what was loaded."""
        for parameter, state in self._optimizer.state.items():
            state.update(state_dict["state"][self._names[parameter]])
        for number, group in enumerate(self._groups):
            group.update(state_dict["groups"][str(number)])


def _create_missing_state(optimizer: Optimizer) -> None:
    """Have an optimizer create the state that it lacks, by a step that changes no parameter."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    without_state = [each for each in parameters if each.requires_grad and not optimizer.state.get(each)]
    if not without_state:
        return
    with _zero_updates(optimizer, parameters, without_state), torch.no_grad():
        optimizer.step()
    for parameter in without_state:
        if isinstance(steps := optimizer.state[parameter].get("step"), Tensor):
            steps.zero_()


@contextmanager
def _zero_updates(
    optimizer: Optimizer, parameters: Sequence[Tensor], stepped: Sequence[Tensor]
) -> Iterator[None]:
    """Set zero gradients for the parameters to step, none for the others, and zero learning rates."""
    grads = [parameter.grad for parameter in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for parameter in stepped:
        parameter.grad = torch.zeros_like(parameter)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
