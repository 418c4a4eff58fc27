"""A rank's share of the optimizer state, for checkpoints that the ranks write and read together."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class ShareState:
    """What ``torch.distributed.checkpoint`` takes for a rank's share: each rank saves and loads its own.

    Every entry goes by its parameter's name, so any number of ranks finds what falls to it.

    Args:
        own: steps this rank's share.
        names: every parameter's name in the module.
        groups: the whole optimizer's parameter groups, whose options are the same on all ranks.
    """

    def __init__(self, own: Optimizer, names: Mapping[Tensor, str], groups: Sequence[dict[str, Any]]) -> None:
        self._own = own
        self._names = names
        self._groups = groups

    def state_dict(self) -> dict[str, Any]:
        """The state itself, not a copy; what is not there yet is made, so that it can be loaded into."""
        _make_missing(self._own)
        return {
            "state": {self._names[parameter]: dict(state) for parameter, state in self._own.state.items()},
            "groups": {str(number): options(group) for number, group in enumerate(self._groups)},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was loaded."""
        for parameter, state in self._own.state.items():
            state.update(state_dict["state"][self._names[parameter]])
        for number, group in enumerate(self._groups):
            group.update(state_dict["groups"][str(number)])


def options(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's options, without its parameters."""
    # Names go with the parameters, of which a share has fewer.
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _make_missing(optimizer: Optimizer) -> None:
    """Have an optimizer make the state that it lacks, by a step that moves nothing and does not count."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    lacking = [each for each in parameters if each.requires_grad and not optimizer.state.get(each)]
    if not lacking:
        return
    with _standing_still(optimizer, parameters, lacking), torch.no_grad():
        optimizer.step()
    for parameter in lacking:
        if isinstance(steps := optimizer.state[parameter].get("step"), Tensor):
            steps.zero_()


@contextmanager
def _standing_still(
    optimizer: Optimizer, parameters: Sequence[Tensor], stepped: Sequence[Tensor]
) -> Iterator[None]:
    """Inside, gradients of zero for those to be stepped, none for the others, and learning rates of zero."""
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
