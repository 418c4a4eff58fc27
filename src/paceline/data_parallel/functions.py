"""The one autograd function that torch's own operations do not give: a broadcast that sums gradients."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from paceline.tensors import devices as dev


def broadcast(devices: tuple[torch.device, ...], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Differentiable copies of all tensors for the first device, then for the second, and so on."""
    return cast("tuple[torch.Tensor, ...]", Broadcast.apply(devices, *tensors))  # type: ignore[no-untyped-call]


class Broadcast(torch.autograd.Function):
    """Every tensor on every device; on its own device a tensor's copy shares its memory.

    In backward the copies' gradients are summed in the order of the devices, so the sum is the same in
    each run. A tensor that no copy was used of gets zeros, as torch's DataParallel gives.
    """

    @staticmethod
    def forward(
        ctx: Any, devices: tuple[torch.device, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """See broadcast."""
        ctx.set_materialize_grads(False)
        ctx.tensors = tensors  # for the shapes of gradients that never came
        return tuple(dev.send(tensor.detach(), device) for device in devices for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The sums, each on its tensor's device."""
        count = len(ctx.tensors)
        return (None, *(_sum_at(tensor, gradients[i::count]) for i, tensor in enumerate(ctx.tensors)))


def _sum_at(tensor: torch.Tensor, gradients: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    total: torch.Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            moved = dev.send(gradient, tensor.device)
            total = moved if total is None else _add(total, moved)
    return torch.zeros_like(tensor) if total is None else total


def _add(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # torch adds a sparse tensor to a dense one, but not a dense one to a sparse one.
    return other + one if one.is_sparse else one + other
