"""The two hooks that torch has built in, by their type."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.errors import OptionError
from paceline.hooks.grad_bucket import GradBucket


def builtin_hook(group: Group, kind: Any) -> Callable[[Any, GradBucket], "torch.futures.Future[Any]"]:
    """The hook of that type: ALLREDUCE averages, FP16_COMPRESS does so in half precision."""
    types: dict[str, torch.dtype | None] = {"ALLREDUCE": None, "FP16_COMPRESS": torch.float16}
    name = str(kind).rpartition(".")[2]
    if name not in types:
        raise OptionError(f"an unknown built-in hook (type: {kind}, known: {sorted(types)})")
    return _averaging_in(group, types[name])


def _averaging_in(
    group: Group, dtype: torch.dtype | None
) -> Callable[[Any, GradBucket], "torch.futures.Future[Any]"]:
    def hook(_: Any, bucket: GradBucket) -> "torch.futures.Future[Any]":
        buffer = bucket.buffer()
        sent = buffer.to(dtype or buffer.dtype).div_(group.size)

        def decompress(future: "torch.futures.Future[Any]") -> Tensor:
            (reduced,) = future.value()
            return buffer.copy_(reduced)

        return group.all_reduce_future(sent).then(decompress)

    return hook
