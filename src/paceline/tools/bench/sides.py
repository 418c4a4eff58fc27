"""The sides of a training step that are compared."""

import importlib
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Side:
    """One of those that are compared: a wrapper, what it reduces through, and how it keeps gradients."""

    wrapper: str
    through: str | None = None
    views: bool = False

    def __str__(self) -> str:
        through = {None: "", "backend": "-on-paceline", "c10d": "-c10d"}[self.through]
        return f"{self.wrapper}{through}{'-views' if self.views else ''}"

    @property
    def is_base(self) -> bool:
        """Whether it is what others are compared with: torch's wrapper on gloo."""
        return self.wrapper == "torch" and self.through is None

    @property
    def is_synchronised(self) -> bool:
        """Whether its gradients are averages, and so the same as those of others that are."""
        return self not in (ALONE, MEETING)

    def wrap(self, module: nn.Module, *, has_unused: bool = False) -> nn.Module:
        """Put the wrapper around the module, some of whose parameters may get no gradient."""
        if self == ALONE:
            return module
        if self == MEETING:
            group = dist.new_group(backend="paceline")
            first = next(module.parameters())  # whose gradient comes last
            first.register_post_accumulate_grad_hook(lambda _: dist.barrier(group))
            return module
        options: dict[str, Any] = {"gradient_as_bucket_view": self.views}
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


ALONE = Side("the module alone")
MEETING = Side("meeting")
_PLAIN = [Side("torch"), Side("torch", "backend"), Side("paceline"), Side("paceline", "c10d")]
SIDES = {
    str(side): side for plain in _PLAIN for side in (plain, Side(plain.wrapper, plain.through, views=True))
} | {str(MEETING): MEETING}
