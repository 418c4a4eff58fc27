"""Module buffers: kept equal on all ranks."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.tensors.dtensor import local_of
from paceline.torch_private import buffers_of, preserve_version_counter

# After this many steps without a change on any rank, buffers count as constant.
_STEPS_UNTIL_CONSTANT = 3


class BufferHookLocation(Enum):
    """When a hook for module buffers is called."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


class BufferHook(NamedTuple):
    """A user's way of making module buffers equal.

    Attributes:
        state: passed to the hook.
        call: gets the state and the buffers by name; may return futures to wait for after backward.
        location: before forward or after it.
    """

    state: Any
    call: Callable[[Any, dict[str, Tensor]], Any]
    location: BufferHookLocation


@dataclass
class BufferSettings:
    """What users may set at any time, under torch's names for it.

    Attributes:
        in_forward: whether each forward makes buffers equal (``forward_sync_buffers``).
        required: whether the next forward does (``require_forward_param_sync``); False after a forward that
            is not synced, such as one under ``no_sync``.
        bytes_at_once: bytes per broadcast (``broadcast_bucket_size``).
    """

    in_forward: bool = True
    required: bool = True
    bytes_at_once: int = 250 * 1024 * 1024


class ModuleBuffers:
    """A module's buffers that are not ignored.

    Buffers are looked up by name each time, because a module may replace them. They stop being broadcast
    after three steps in which no rank's buffers changed, until one changes. The ranks tell each other at the
    end of each step, so a change to constant buffers reaches the other ranks one step later. Buffers on an
    accelerator are always broadcast, because to compare them the host would have to wait for the device.

    Args:
        module: whose buffers.
        ignored: names to leave alone.
        settings: when they are made equal; by default before each forward.

    Attributes:
        settings: as given, or the defaults.
        any: whether there were buffers at the last look.
        source: the rank whose buffers the others take over; under join one that still has inputs.
        hook: the user's way of making them equal, if there is one.
    """

    def __init__(
        self, module: nn.Module, ignored: Collection[str], settings: BufferSettings | None = None
    ) -> None:
        self._module = module
        self._ignored = ignored
        self.settings = settings or BufferSettings()
        self._last_synced: list[_Buffer] | None = None
        self._unchanged_steps = 0
        self.hook: BufferHook | None = None
        self.source = 0
        self.any = bool(self.named())

    @property
    def constant(self) -> bool:
        """Whether no rank's buffers have changed for so long that they need no broadcast."""
        return self._unchanged_steps >= _STEPS_UNTIL_CONSTANT

    def learn(self, *, changed: bool) -> None:
        """Note whether any rank's buffers changed in the step that ended."""
        self._unchanged_steps = 0 if changed else self._unchanged_steps + 1

    def named(self) -> dict[str, Tensor]:
        """The buffers as they are now."""
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}

    def changed(self) -> bool:
        """Whether a buffer was replaced, or has other values than after the last broadcast."""
        if self._last_synced is None:
            return False
        # While they are broadcast, each forward looks for new ones.
        added = self.constant and len(self._find()) != len(self._last_synced)
        return added or any(buffer.changed() for buffer in self._last_synced)

    def will_sync(self, location: BufferHookLocation | None = None) -> bool:
        """Whether the next forward makes buffers equal; given a location, whether it does so there."""
        here = BufferHookLocation.PRE_FORWARD if self.hook is None else self.hook.location
        return location in (None, here) and self.settings.required and self.settings.in_forward and self.any

    def sync(self, group: Group) -> "Sequence[torch.futures.Future[Any]]":
        """Make buffers equal by the user's hook, or by a broadcast unless they are constant.

        Returns:
            Futures of the hook, to be waited for after backward.
        """
        if self.hook is not None:
            return self.hook.call(self.hook.state, self.named()) or ()
        if not self.constant:
            self._broadcast(group)
        return ()

    def forget(self) -> None:
        """Start anew, as when the group has changed."""
        self._last_synced = None
        self._unchanged_steps = 0

    def _broadcast(self, group: Group) -> None:
        found = self._find()
        broadcast_in_place(
            group,
            [each.buffer for each in found],
            source=self.source,
            bytes_at_once=self.settings.bytes_at_once,
        )
        for each in found:
            each.remember()
        self._last_synced = found
        self.any = bool(found)

    def _find(self) -> list["_Buffer"]:
        found: dict[int, _Buffer] = {}
        for prefix, module in self._module.named_modules():
            for name, buffer in buffers_of(module).items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full not in self._ignored:
                    found.setdefault(id(buffer), _Buffer(buffers_of(module), name, buffer))
        return list(found.values())


class _Buffer:
    """A buffer, where it was found, and the values it had: its version misses writes through ``.data``."""

    def __init__(self, owner: dict[str, Tensor | None], name: str, buffer: Tensor) -> None:
        self.buffer = buffer
        self._owner = owner
        self._name = name
        self._values: Tensor | None = None

    def remember(self) -> None:
        local = local_of(self.buffer).detach()
        # To compare an accelerator's, the host would have to wait for the device.
        self._values = local.clone() if local.device.type == "cpu" else None

    def changed(self) -> bool:
        if self._values is None:
            return True
        replaced = self._owner.get(self._name) is not self.buffer
        return replaced or not torch.equal(local_of(self.buffer), self._values)


def broadcast_in_place(group: Group, tensors: Sequence[Tensor], *, source: int, bytes_at_once: int) -> None:
    """Write one rank's values to tensors that autograd may have saved, without autograd noticing a change."""
    local = [local_of(tensor) for tensor in tensors]
    with torch.no_grad(), preserve_version_counter(tuple(local)):
        group.broadcast(local, source=source, bytes_at_once=bytes_at_once)
