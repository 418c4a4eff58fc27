"""Every rank starts from the same parameters and module buffers."""

from collections.abc import Collection

from torch import Tensor, nn

from paceline.comm.group import Group


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


def _state(module: nn.Module, ignored: Collection[str], *, buffers: bool) -> list[Tensor]:
    tensors = [parameter.detach() for name, parameter in module.named_parameters() if name not in ignored]
    if buffers:
        tensors += [buffer.detach() for name, buffer in module.named_buffers() if name not in ignored]
    return tensors
