"""The parameter groups of an optimizer."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def group_options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, such as its learning rate, without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The module's parameters that an optimizer steps, also if its groups have parts of them."""
    whole: list[Tensor] | None = getattr(optimizer, "whole_parameters", None)
    if whole is not None:
        return whole
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
