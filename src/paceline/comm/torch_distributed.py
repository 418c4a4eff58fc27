"""What other packages need of torch.distributed besides process groups: join, optimizers, types, constants.

Private names of torch that are used here, tried with torch 2.13: ``_JoinConfig``,
``_functional_collectives``, ``apply_optimizer_in_backward.param_to_optim_hook_handle_map``,
``_as_overlapped_optim`` and ``_DEFAULT_FIRST_BUCKET_BYTES``.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, distributed
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn import Parameter

__all__ = [
    "Join",
    "JoinHook",
    "Joinable",
    "as_overlapped_optimizer",
    "disable_join",
    "first_bucket_bytes",
    "is_grad_bucket_type",
    "remove_in_backward_hooks",
    "traced_all_reduce",
]


def disable_join(joinable: Joinable) -> None:
    """Let forward tell the other ranks nothing more. torch's own wrapper goes on after its join has ended."""
    joinable._join_config = _JoinConfig.construct_disabled_join_config()


def remove_in_backward_hooks(parameters: Iterable[Parameter]) -> None:
    """Remove the hooks of ``_apply_optimizer_in_backward``: they step before gradients are averaged."""
    parameters = list(parameters)
    if parameters:
        from torch.distributed.optim import apply_optimizer_in_backward

        for parameter in parameters:
            for handle in apply_optimizer_in_backward.param_to_optim_hook_handle_map.pop(parameter, []):
                handle.remove()


def as_overlapped_optimizer(optimizer: type, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's version of an optimizer that steps behind a communication hook."""
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

    return _as_overlapped_optim(optimizer, parameters, *args, **kwargs)


def traced_all_reduce(tensor: Tensor, process_group: Any) -> Tensor:
    """The sum of a tensor over the ranks, by a collective that torch.compile can trace.

    It is waited for where it is first read.
    """
    total: Tensor = functional.all_reduce(tensor, "sum", process_group)
    return total


def is_grad_bucket_type(annotation: object) -> bool:
    """Whether an annotation names torch's own bucket type."""
    return annotation is distributed.GradBucket  # type: ignore[attr-defined]


def first_bucket_bytes() -> int:
    """The size of the first bucket in torch's wrapper."""
    return int(distributed._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]
