"""The module ``torch.toy``, with the functions that torch and its users expect of a device's module."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.testing.toy.counts import count
from paceline.testing.toy.queues import QueuePlace, StreamQueue, queues_of, raise_failure, wait_on_host
from paceline.torch_private import OUTSIDE_DEVICE_TYPE, DeviceModule

NAME = "toy"
COUNT = 2


class ToyStream(torch.Stream):
    """Has a queue of kernels, and lists in its module what it was asked to do."""

    _numbers = itertools.count(1)
    _module: "ToyModule"
    queue: StreamQueue

    def __new__(cls, module: "ToyModule", index: int) -> "ToyStream":
        """A stream on the device with that index, unlike any other."""
        number = next(cls._numbers)
        made = super().__new__(cls, stream_id=number, device_index=index, device_type=OUTSIDE_DEVICE_TYPE)
        made._module = module
        made.queue = StreamQueue(f"stream {number} of {NAME}:{index}", index)
        return made

    def wait_stream(self, other: "ToyStream") -> None:  # type: ignore[override]  # of this device only
        """Let what follows on this stream wait for what is on the other one now; list the wait."""
        self._module.operations.append(StreamOperation("wait", self, other))
        self.queue.wait_for(other.queue.end)

    def wait_event(self, event: "ToyEvent") -> None:  # type: ignore[override]
        """Let what follows on this stream wait for an event."""
        event.wait(self)

    def record_event(self, event: "ToyEvent | None" = None) -> "ToyEvent":  # type: ignore[override]
        """Record an event, or a new one, behind what is on this stream now."""
        event = ToyEvent(self._module) if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether everything on this stream is done."""
        return self.queue.end.is_done

    def synchronize(self) -> None:
        """Let the host wait for everything on this stream."""
        count("waits", "Stream.synchronize")
        wait_on_host([self.queue.end])
        raise_failure()


class ToyEvent:
    """A place in a stream's queue, for which other streams or the host can wait.

    Args:
        module: the module whose current streams are meant where none is given.
    """

    def __init__(self, module: "ToyModule") -> None:
        self._module = module
        self._place: QueuePlace | None = None

    def record(self, stream: ToyStream | None = None) -> None:
        """Stand for what is on the stream now."""
        self._place = (stream or self._module.current_stream()).queue.end

    def wait(self, stream: ToyStream | None = None) -> None:
        """Let what follows on the stream wait; not if nothing was recorded."""
        if self._place is not None:
            (stream or self._module.current_stream()).queue.wait_for(self._place)

    def query(self) -> bool:
        """Whether it has been reached."""
        return self._place is None or self._place.is_done

    def synchronize(self) -> None:
        """Let the host wait."""
        count("waits", "Event.synchronize")
        if self._place is not None:
            wait_on_host([self._place])
        raise_failure()


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

    def Event(self) -> ToyEvent:  # noqa: N802 - as above
        """A new event, which nothing is recorded in."""
        return ToyEvent(self)

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Let the host wait for all streams of the device."""
        count("waits", "synchronize")
        self.wait_for_device(self.current_device() if device is None else _index(device))
        raise_failure()

    def wait_for_device(self, index: int) -> None:
        """As ``synchronize``, but raise no error of the device, and count nothing."""
        wait_on_host([queue.end for queue in queues_of(index)])

    def default_stream(self, device: torch.device | int | None = None) -> ToyStream:
        """The stream that is current where no other was set."""
        return self._defaults[self.current_device() if device is None else _index(device)]

    def current_stream(self, device: torch.device | int | None = None) -> ToyStream:
        """The calling thread's stream on the device."""
        index = self.current_device() if device is None else _index(device)
        return self._streams().get(index, self._defaults[index])

    def set_stream(self, stream: ToyStream) -> None:
        """Set the calling thread's stream."""
        self._streams()[_index(stream.device)] = stream

    @contextlib.contextmanager
    def stream(self, stream: ToyStream) -> Iterator[None]:
        """Set the calling thread's stream inside a ``with`` block."""
        before = self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

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
