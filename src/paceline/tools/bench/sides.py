"""What is compared: wrappers and optimizers of torch and of paceline, and two that are no wrappers."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.tools.bench.floor import Floor
from paceline.tools.bench.models import OptimizerKind


@dataclass(frozen=True)
class Side:
    """One of those that are compared.

    Attributes:
        wrapper: whose wrapper.
        through: what it reduces through, if that is not its default.
        views: whether gradients are views of its buckets.
        lazy: whether it drops its buckets between steps.
        optimizer: the class that splits the optimizer's work or state over ranks; None for a plain optimizer.
    """

    wrapper: str
    through: str | None = None
    views: bool = False
    lazy: bool = False
    optimizer: str | None = None

    def __str__(self) -> str:
        through = {None: "", "backend": "-on-paceline", "c10d": "-c10d"}[self.through]
        optimizer = "" if self.optimizer is None else f"-{self.optimizer}"
        buckets = f"{'-views' if self.views else ''}{'-lazy' if self.lazy else ''}"
        return f"{self.wrapper}{through}{buckets}{optimizer}"

    @property
    def is_baseline(self) -> bool:
        """Whether others are compared with it: torch's wrapper on gloo."""
        return self.wrapper == "torch" and self.through is None

    @property
    def is_synchronised(self) -> bool:
        """Whether its gradients are averages, the same as those of the other synchronised sides."""
        return self not in (ALONE, BARRIER_ONLY)

    def wrap(self, module: nn.Module, *, has_unused: bool = False) -> nn.Module:
        """Wrap the module; ``has_unused`` if some of its parameters may get no gradient."""
        if self == ALONE:
            return module
        if self == BARRIER_ONLY:
            group = dist.new_group(backend="paceline")
            first = next(module.parameters())  # its gradient comes last
            first.register_post_accumulate_grad_hook(lambda _: dist.barrier(group))
            return module
        if self == FLOOR:
            Floor(module)
            return module
        options: dict[str, Any] = {"gradient_as_bucket_view": self.views}
        if self.lazy:  # which not every version of torch knows
            options["lazy_bucket_allocation"] = True
        if self.through == "backend":
            options["process_group"] = dist.new_group(backend="paceline")
        elif self.through == "c10d":
            options["transport"] = "c10d"
        if has_unused and self.wrapper == "torch":
            options["find_unused_parameters"] = True
        # By name, so that either wrapper can be measured without the other.
        wrapper = importlib.import_module(f"{self.wrapper}.nn.parallel").DistributedDataParallel
        wrapped: nn.Module = wrapper(module, **options)
        return wrapped

    def make_optimizer(self, module: nn.Module, *, kind: OptimizerKind) -> Optimizer:
        """The optimizer of a wrapped module."""
        if self.optimizer is None:
            return kind.make(module)
        first = module if self.wrapper == "paceline" else module.parameters()
        return self.import_optimizer()(first, kind.optimizer_class, **kind.options)

    def import_optimizer(self) -> Callable[..., Optimizer]:
        """The class of its optimizer, which must not be a plain one."""
        package = {"torch": "torch.distributed.optim", "paceline": "paceline"}[self.wrapper]
        found: Callable[..., Optimizer] = getattr(importlib.import_module(package), str(self.optimizer))
        return found


ALONE = Side("the module alone")
BARRIER_ONLY, FLOOR = Side("barrier-only"), Side("floor")
TORCH, ZERO = Side("torch"), Side("torch", optimizer="ZeroRedundancyOptimizer")
PLAIN = Side("paceline")
SHARDED, HOST = (Side("paceline", optimizer=name) for name in ("ShardedOptimizer", "HostOptimizer"))
_WITHOUT_VIEWS = [TORCH, Side("torch", "backend"), PLAIN, Side("paceline", "c10d")]
# Those that differ in how gradients are averaged.
STEP_SIDES = {
    str(side): side
    for each in _WITHOUT_VIEWS
    for side in (each, Side(each.wrapper, each.through, views=True))
} | {str(side): side for side in (BARRIER_ONLY, FLOOR)}
# Those that differ in which rank has, and steps, which part of the parameters.
OPTIMIZER_SIDES = {str(side): side for side in (TORCH, ZERO, PLAIN, SHARDED, HOST)}
