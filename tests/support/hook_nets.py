"""Hooks by name, and a module whose gradients are what a test gives it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from paceline import DistributedDataParallel, hooks

SHAPES = [(20, 15), (7,), (40, 30), (1,), (3, 0), (600,)]

HOOKS: dict[str, Callable[[], hooks.Hook]] = {
    "average": hooks.average,
    "fp16": hooks.fp16,
    "bf16": hooks.bf16,
    "int8": hooks.int8,
    "int4": hooks.int4,
    "top_k": lambda: hooks.top_k(0.2),
    "power_sgd": lambda: hooks.power_sgd(4, start_step=0),
    "fp16 with feedback": lambda: hooks.with_error_feedback(hooks.fp16()),
    "bf16 with feedback": lambda: hooks.with_error_feedback(hooks.bf16()),
}
# The error of a step, in the largest gradient, where there is a bound.
BOUNDS = {"average": 1e-6, "fp16": 2**-10, "bf16": 2**-7, "int8": 2 / 254, "int4": 2 / 14}
# After how many steps their mean must be near; power_sgd sends a few directions in each.
STEPS = {name: 24 if name == "power_sgd" else 12 for name in HOOKS}
WITH_MEMORY = [name for name in HOOKS if name not in ("average", "fp16", "bf16")]


class Given(nn.Module):
    """Parameters whose gradients are the tensors that forward is given; None leaves one unused."""

    def __init__(self, shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape, dtype=dtype) for shape in shapes])

    def forward(self, grads: Sequence[Tensor | None], *, fail: bool = False) -> Tensor:
        if fail:
            raise ZeroDivisionError
        pairs = zip(self.weights, grads, strict=True)
        # Of a complex product, the real part has the conjugate for gradient.
        return sum((p * g.conj()).sum().real for p, g in pairs if g is not None)  # type: ignore[return-value]


def gradients(
    rank: int, *, step: int = 0, shapes: Sequence[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def mean(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The exact average of each rank's gradients."""
    wide = [
        [tensor.to(torch.promote_types(tensor.dtype, torch.float64)) for tensor in each] for each in lists
    ]
    return [sum(tensors) / len(tensors) for tensors in zip(*wide, strict=True)]  # type: ignore[misc]


def everyones(step: int = 0, **options: object) -> list[list[Tensor]]:
    return [gradients(rank, step=step, **options) for rank in range(distributed.get_world_size())]  # type: ignore[arg-type]


def wrap(
    hook: hooks.Hook | None, net: nn.Module | None = None, cap: float = 0.003, **options: Any
) -> DistributedDataParallel:
    """Under a hook, in several buckets; not in shared memory, where compression has nothing to do."""
    ddp = DistributedDataParallel(net or Given(), **{"bucket_cap_mb": cap, "transport": "c10d", **options})
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    return ddp


def run_step(ddp: DistributedDataParallel, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """The averaged gradients of one step."""
    ddp.zero_grad()
    ddp(grads).backward()
    return [p.grad.clone() for p in ddp.parameters()]  # type: ignore[union-attr]


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of two elements."""
    pairs = zip(found, wanted, strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs if ours.numel())


def largest(lists: Sequence[Sequence[Tensor]]) -> float:
    return max(float(tensor.abs().max()) for each in lists for tensor in each if tensor.numel())


def check_equal_on_all_ranks(tensors: Sequence[Tensor]) -> None:
    own = torch.cat([tensor.to_dense().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()])
    everyone = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyone, own)
    assert all(torch.equal(theirs, own) for theirs in everyone), "ranks have different gradients"
