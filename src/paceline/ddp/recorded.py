"""What a recording is of, and what is recorded of optimizers."""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.comm.group import Group
from paceline.ddp.buckets.plan import Slot
from paceline.recording import recorder
from paceline.recording.chapter import About

_numbers = itertools.count()


def describer(
    module: nn.Module, slots: Sequence[Slot], *, caps: Sequence[int], device: torch.device
) -> Callable[[Group], About]:
    """Tells what a wrapper's recording is of, given whom it averages with.

    Args:
        module: what is wrapped.
        slots: its parameters.
        caps: bytes of the first bucket, of the second, and so on.
        device: where the module is.
    """
    _watch_optimizers()
    name, number = type(module).__name__, next(_numbers)

    def about(group: Group) -> About:
        return About(
            rank=group.global_ranks[group.rank],
            world=group.world,
            group=group.global_ranks,
            module=name,
            slots=[slot.name for slot in slots],
            nbytes=[slot.nbytes for slot in slots],
            backend=group.backend,
            transport=_transport(group),
            hosts=1 if group.shared is None else group.shared.hosts,
            device=str(device),
            first_cap=caps[0],
            cap=caps[-1],
            wrapper=number,
        )

    return about


def _transport(group: Group) -> str:
    if group.shared is None:
        return "c10d"
    return "shared memory" if group.shared.hosts == 1 else "shared memory and c10d"


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(lambda optimizer, *_: recorder.optimizer_began(_trained_by(optimizer)))
    register_optimizer_step_post_hook(lambda optimizer, *_: recorder.optimizer_ended(_trained_by(optimizer)))


def _trained_by(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
