"""torch's optimizers that work inside backward. Their modules are private; tried with torch 2.13."""

from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter


def take_over(parameters: Iterable[Parameter]) -> None:
    """Keep ``_apply_optimizer_in_backward``'s own hooks from stepping on gradients that are not averaged."""
    parameters = list(parameters)
    if parameters:
        from torch.distributed.optim import apply_optimizer_in_backward

        for parameter in parameters:
            for handle in apply_optimizer_in_backward.param_to_optim_hook_handle_map.pop(parameter, []):
                handle.remove()


def overlapped(optimizer: type, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch makes of an optimizer so that it steps behind a communication hook."""
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

    return _as_overlapped_optim(optimizer, parameters, *args, **kwargs)
