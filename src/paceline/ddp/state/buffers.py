"""Module buffers: kept equal on all ranks."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.tensors.dtensor import local_of
from paceline.torch_private import buffers_of, foreach_copy_, preserve_version_counter

# After this many steps without a change on any rank, buffers count as constant.
_STEPS_UNTIL_CONSTANT = 3
# No element of a tensor is longer, in bytes.
_ALIGNMENT = 16


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
        is_synced: whether they were made equal in a forward of the running step.
    """

    def __init__(
        self, module: nn.Module, ignored: Collection[str], settings: BufferSettings | None = None
    ) -> None:
        self._module = module
        self._ignored = ignored
        self.settings = settings or BufferSettings()
        self._last_synced: _SyncedBuffers | None = None
        self._unchanged_steps = 0
        self.hook: BufferHook | None = None
        self.source = 0
        self.is_synced = False
        self.any = bool(self.named())

    @property
    def constant(self) -> bool:
        """Whether no rank's buffers have changed for so long that they need no broadcast."""
        return self._unchanged_steps >= _STEPS_UNTIL_CONSTANT

    def learn(self, *, changed: bool) -> None:
        """Note whether any rank's buffers changed in the step that ended."""
        self._unchanged_steps = 0 if changed else self._unchanged_steps + 1
        self.is_synced = False

    def named(self) -> dict[str, Tensor]:
        """The buffers as they are now."""
        return {name: buffer for name, buffer in self._module.named_buffers() if name not in self._ignored}

    def changed(self) -> bool:
        """Whether a buffer was replaced, or has other values than after the last broadcast."""
        if self._last_synced is None:
            return False
        # While they are broadcast, each forward looks for new ones.
        added = self.constant and len(self._find()) != len(self._last_synced.found)
        return added or self._last_synced.changed()

    def changed_names(self) -> frozenset[str]:
        """The buffers that have other values than after the last broadcast, or were replaced."""
        return frozenset() if self._last_synced is None else self._last_synced.changed_names()

    def will_sync(self, location: BufferHookLocation | None = None) -> bool:
        """Whether the next forward makes buffers equal; given a location, whether it does so there."""
        here = BufferHookLocation.PRE_FORWARD if self.hook is None else self.hook.location
        return location in (None, here) and self.settings.required and self.settings.in_forward and self.any

    def sync(self, group: Group) -> "Sequence[torch.futures.Future[Any]]":
        """Make buffers equal by the user's hook, or by a broadcast unless they are constant.

        Returns:
            Futures of the hook, to be waited for after backward.
        """
        self.is_synced = True
        if self.hook is not None:
            return self.hook.call(self.hook.state, self.named()) or ()
        if not self.constant:
            self._broadcast(group)
        return ()

    def keep_values(self) -> Callable[[], None]:
        """Returns what gives the buffers the values of now again, also those that were replaced meanwhile."""
        found = self._find()
        values = [each.buffer.clone() for each in found]

        def restore() -> None:
            for each in found:
                each.owner[each.name] = each.buffer
            if found:
                with torch.no_grad():
                    foreach_copy_([each.buffer for each in found], values)

        return restore

    def forget(self) -> None:
        """Start anew, as when the group has changed."""
        self._last_synced = None
        self._unchanged_steps = 0

    def _broadcast(self, group: Group) -> None:
        found = self._find()
        if self._last_synced is None or not self._last_synced.are(found):
            self._last_synced = _SyncedBuffers(found)
        self._last_synced.broadcast(group, source=self.source, bytes_at_once=self.settings.bytes_at_once)
        self.any = bool(found)

    def _find(self) -> list["_Found"]:
        found: dict[int, _Found] = {}
        for prefix, module in self._module.named_modules():
            if not (buffers := buffers_of(module)):
                continue
            for name, buffer in buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is not None and full not in self._ignored:
                    found.setdefault(id(buffer), _Found(buffers, name, buffer, full))
        return list(found.values())


class _Found(NamedTuple):
    """A buffer, and where it was found."""

    owner: dict[str, Tensor | None]
    name: str
    buffer: Tensor
    full_name: str


class _SyncedBuffers:
    """Buffers that were made equal, and the values that they had then.

    Those in host memory travel in one flat tensor, which keeps the values: a buffer's version would miss
    writes through ``.data``. To compare those on an accelerator, the host would have to wait for the device.

    Args:
        found: the buffers.
    """

    def __init__(self, found: Sequence[_Found]) -> None:
        self.found = found
        self._layouts = [*map(_layout, found)]
        local = [local_of(each.buffer) for each in found]
        self._on_host = [tensor.device.type == "cpu" for tensor in local]
        on_host = list(compress(local, self._on_host))
        starts = [*accumulate((_padded(tensor.nbytes) for tensor in on_host), initial=0)]
        # The first forward may be in inference mode, and later ones are not.
        with torch.inference_mode(mode=False):
            self._flat = torch.empty(starts[-1], dtype=torch.uint8)
            self._values = [
                self._flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for start, tensor in zip(starts, on_host, strict=False)
            ]

    def are(self, found: Sequence[_Found]) -> bool:
        """Whether these are the same buffers, and none was given data of another shape or type."""
        return [*map(_layout, found)] == self._layouts

    def broadcast(self, group: Group, *, source: int, bytes_at_once: int) -> None:
        """Make them equal to those of one rank."""
        local = [local_of(each.buffer) for each in self.found]
        on_host = list(compress(local, self._on_host))
        with _unnoticed(local):
            if on_host and group.rank == source:
                foreach_copy_(self._values, on_host)
            if on_host:
                group.broadcast([self._flat], source=source, bytes_at_once=bytes_at_once)
            if on_host and group.rank != source:
                foreach_copy_(on_host, self._values)
            others = [tensor for tensor, is_host in zip(local, self._on_host, strict=True) if not is_host]
            group.broadcast(others, source=source, bytes_at_once=bytes_at_once)

    def changed(self) -> bool:
        """Whether one was replaced, or has other values."""
        if not all(self._on_host) or any(each.owner.get(each.name) is not each.buffer for each in self.found):
            return True
        return not all(
            torch.equal(local_of(each.buffer), values)
            for each, values in zip(self.found, self._values, strict=True)
        )

    def changed_names(self) -> frozenset[str]:
        """Which of those in host memory were replaced, or have other values."""
        on_host = compress(self.found, self._on_host)
        return frozenset(
            each.full_name
            for each, values in zip(on_host, self._values, strict=True)
            if each.owner.get(each.name) is not each.buffer or not torch.equal(local_of(each.buffer), values)
        )


def _layout(found: _Found) -> tuple[int, torch.dtype, torch.Size, torch.device]:
    buffer = found.buffer
    return id(buffer), buffer.dtype, buffer.shape, buffer.device


def _padded(nbytes: int) -> int:
    """A length after which elements of any type are aligned."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@contextlib.contextmanager
def _unnoticed(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Write to tensors that autograd may have saved, without autograd noticing a change."""
    with torch.no_grad(), preserve_version_counter(tuple(tensors)):
        yield


def broadcast_in_place(group: Group, tensors: Sequence[Tensor], *, source: int, bytes_at_once: int) -> None:
    """Write one rank's values to tensors that autograd may have saved, without autograd noticing a change."""
    local = [local_of(tensor) for tensor in tensors]
    with _unnoticed(local):
        group.broadcast(local, source=source, bytes_at_once=bytes_at_once)
