"""Makes a wrapper's recorder, and tells it when optimizers step and checkpoints are saved."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.comm.group import Group
from paceline.ddp.buckets.plan import Slot
from paceline.recording.recorder import (
    Recorder,
    folder_from_environment,
    optimizer_began,
    optimizer_ended,
    state_saved,
)
from paceline.recording.writer import WrapperDescription
from paceline.tensors.param_groups import parameters_of
from paceline.torch_private import after_each_save
from paceline.watch.rank_page import Activity
from paceline.watch.watcher import change_activity

_wrapper_numbers = itertools.count()


def make_recorder(
    module: nn.Module,
    slots: Sequence[Slot],
    parameters: Sequence[nn.Parameter],
    *,
    caps: Sequence[int],
    device: torch.device,
) -> Recorder:
    """A recorder that can describe the wrapper in each process group that it may get.

    Args:
        module: the wrapped module.
        slots: the names and sizes of its parameters.
        parameters: the parameters themselves.
        caps: how many bytes the first bucket may hold, the second, and so on.
        device: where the module is.
    """
    _watch_user()
    # Only the name, because the recorder must not keep the module alive.
    name, number = type(module).__name__, next(_wrapper_numbers)

    def describe(group: Group) -> WrapperDescription:
        return WrapperDescription(
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

    return Recorder(map(id, parameters), describe=describe, folder=folder_from_environment())


def _transport(group: Group) -> str:
    if group.shared is None:
        return "c10d"
    return "shared memory" if group.shared.hosts == 1 else "shared memory and c10d"


@functools.cache
def _watch_user() -> None:
    after_each_save(state_saved)
    register_optimizer_step_pre_hook(_on_optimizer)
    register_optimizer_step_post_hook(_after_optimizer)


def _on_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    change_activity(Activity.OPTIMIZER)
    optimizer_began(_parameter_ids(optimizer))


def _after_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    change_activity(Activity.OUTSIDE)
    optimizer_ended(_parameter_ids(optimizer))


def _parameter_ids(optimizer: torch.optim.Optimizer) -> list[int]:
    return [*map(id, parameters_of(optimizer))]
