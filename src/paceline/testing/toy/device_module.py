"""The module ``torch.toy``, with the functions that torch and its users expect of a device's module."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from paceline.torch_private import OUTSIDE_DEVICE_TYPE, DeviceModule

NAME = "toy"
COUNT = 2


class ToyStream(torch.Stream):
    """Runs everything in order, and lists in its module what a real stream would have been asked to do."""

    _numbers = itertools.count(1)
    _module: "ToyModule"

    def __new__(cls, module: "ToyModule", index: int) -> "ToyStream":
        """A stream on the device with that index, unlike any other."""
        number = next(cls._numbers)
        made = super().__new__(cls, stream_id=number, device_index=index, device_type=OUTSIDE_DEVICE_TYPE)
        made._module = module
        return made

    def wait_stream(self, other: Any) -> None:
        """List the wait."""
        self._module.operations.append(StreamOperation("wait", self, other))


@dataclass(frozen=True)
class StreamOperation:
    """What a stream was asked: to ``copy`` to its device, to ``wait`` for another, to ``record`` a use."""

    what: str
    stream: torch.Stream
    other: torch.Stream | None = None


class ToyModule(DeviceModule):  # type: ignore[misc]  # found at run time
    """Two devices, and each thread's current device and streams."""

    def __init__(self) -> None:
        self.operations: list[StreamOperation] = []
        self._thread = threading.local()
        self._defaults = [ToyStream(self, index) for index in range(COUNT)]

    def device_count(self) -> int:
        """How many devices there are."""
        return COUNT

    def current_device(self) -> int:
        """The calling thread's device."""
        return int(getattr(self._thread, "device", 0))

    def set_device(self, device: torch.device | int) -> None:
        """Set the calling thread's device."""
        self._thread.device = _index(device)

    @contextlib.contextmanager
    def device(self, device: torch.device | int) -> Iterator[None]:
        """Set the calling thread's device inside a ``with`` block."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def Stream(self, device: torch.device | int) -> ToyStream:  # noqa: N802 - called as a class on other devices
        """A new stream on the device."""
        return ToyStream(self, _index(device))

    def current_stream(self, device: torch.device | int | None = None) -> ToyStream:
        """The calling thread's stream on the device."""
        index = self.current_device() if device is None else _index(device)
        return self._streams().get(index, self._defaults[index])

    @contextlib.contextmanager
    def stream(self, stream: ToyStream) -> Iterator[None]:
        """Set the calling thread's stream inside a ``with`` block."""
        index = _index(stream.device)
        before = self.current_stream(index)
        self._streams()[index] = stream
        try:
            yield
        finally:
            self._streams()[index] = before

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """The types that autocast may choose."""
        return [torch.bfloat16, torch.float16]

    def _streams(self) -> dict[int, ToyStream]:
        if not hasattr(self._thread, "streams"):
            self._thread.streams = {}
        streams: dict[int, ToyStream] = self._thread.streams
        return streams


def _index(device: torch.device | int) -> int:
    return device if isinstance(device, int) else device.index
