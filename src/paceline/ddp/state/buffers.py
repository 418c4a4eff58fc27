"""Module buffers, kept equal over the ranks."""

from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.tensors.dtensor import local_of

# So many steps without a change on any rank, and buffers count as constant.
_STEADY_STEPS = 3


class BufferHookLocation(Enum):
    """When a hook for module buffers is called."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


class BufferHook(NamedTuple):
    """A user's way of making module buffers equal.

    Attributes:
        state: handed to the hook.
        call: gets the state and the buffers by name; may return futures to be waited for after backward.
        location: before forward or after it.
    """

    state: Any
    call: Callable[[Any, dict[str, Tensor]], Any]
    location: BufferHookLocation


class ModuleBuffers:
    """A module's buffers that are not ignored.

    Buffers are looked up by name each time, because a module may replace them. Once no rank's have changed
    for a few steps they are taken for constant, and broadcast no more until one changes. The ranks tell
    each other at the end of each step, so a change to constant buffers reaches the other ranks one step
    later.

    Args:
        module: whose buffers.
        ignored: names to leave alone.

    Attributes:
        any: whether there were buffers when last looked.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._seen: list[_Place] | None = None
        self.hook: BufferHook | None = None
        self.any = bool(self.named())
        self._steady = 0

    @property
    def constant(self) -> bool:
        """Whether no rank's buffers have changed for so long that they need no broadcast."""
        return self._steady >= _STEADY_STEPS

    def learn(self, *, changed: bool) -> None:
        """Take in what the ranks said at the end of a step."""
        self._steady = 0 if changed else self._steady + 1

    def named(self) -> dict[str, Tensor]:
        """The buffers as they are now."""
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}

    def changed(self) -> bool:
        """Whether a buffer was replaced or has other values than after the last broadcast."""
        if self._seen is None:
            return False
        # While they are broadcast, each forward looks for new ones.
        added = self.constant and len(self._places()) != len(self._seen)
        return added or any(place.changed() for place in self._seen)

    def broadcast(self, group: Group, *, source: int, bytes_at_once: int) -> None:
        """Make every rank's buffers those of one rank."""
        places = self._places()
        buffers = [place.buffer for place in places]
        broadcast_in_place(group, buffers, source=source, bytes_at_once=bytes_at_once)
        for place in places:
            place.remember()
        self._seen = places
        self.any = bool(places)

    def sync(self, group: Group, *, source: int, bytes_at_once: int) -> "Sequence[torch.futures.Future[Any]]":
        """Make them equal by the user's hook, or by a broadcast unless they are constant.

        Returns:
            What the hook wants waited for after backward.
        """
        if self.hook is not None:
            return self.hook.call(self.hook.state, self.named()) or ()
        if not self.constant:
            self.broadcast(group, source=source, bytes_at_once=bytes_at_once)
        return ()

    def forget(self) -> None:
        """Know nothing of earlier broadcasts, as when the group has changed."""
        self._seen = None
        self._steady = 0

    def _places(self) -> list["_Place"]:
        found: dict[int, _Place] = {}
        for prefix, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full not in self._ignored:
                    found.setdefault(id(buffer), _Place(module._buffers, name, buffer))
        return list(found.values())


class _Place:
    """Where a buffer was found and what it held: its version would not tell of writes through ``.data``."""

    def __init__(self, owner: dict[str, Tensor | None], name: str, buffer: Tensor) -> None:
        self.buffer = buffer
        self._owner = owner
        self._name = name

    def remember(self) -> None:
        self._values = local_of(self.buffer).detach().clone()

    def changed(self) -> bool:
        replaced = self._owner.get(self._name) is not self.buffer
        return replaced or not torch.equal(local_of(self.buffer), self._values)


def broadcast_in_place(group: Group, tensors: Sequence[Tensor], *, source: int, bytes_at_once: int) -> None:
    """Write to tensors that autograd may hold for a backward to come, and have it take them as unchanged."""
    local = [local_of(tensor) for tensor in tensors]
    # torch 2.13; it is what torch's own wrapper uses.
    unchanged = torch.autograd._unsafe_preserve_version_counter(tuple(local))  # type: ignore[attr-defined]
    with torch.no_grad(), unchanged:
        group.broadcast(local, source=source, bytes_at_once=bytes_at_once)
