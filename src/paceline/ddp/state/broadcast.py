"""Every rank starts from the same parameters and module buffers."""

from collections.abc import Collection

from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.tensors.dtensor import local_of


def broadcast_state(
    group: Group,
    module: nn.Module,
    *,
    ignored: Collection[str],
    buffers: bool,
    source: int,
    bytes_at_once: int,
) -> None:
    """Make parameters, and buffers if asked, equal to those of one rank."""
    tensors = _state(module, ignored, buffers=buffers)
    group.broadcast(tensors, source=source, bytes_at_once=bytes_at_once)
    group.release_staging()  # what all of a module needs, no step does


def _state(module: nn.Module, ignored: Collection[str], *, buffers: bool) -> list[Tensor]:
    named = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    return [local_of(tensor).detach() for name, tensor in named if name not in ignored]
