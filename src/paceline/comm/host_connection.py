"""One connection between two hosts: messages of a few fields and some bytes, in and out."""

import json
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

# A host's addresses, of which at least one can be reached from the others, and its port.
Place = tuple[Sequence[str], int]
Fields = Mapping[str, Any]

MAGIC = b"paceline-hosts-1"
HEAD = struct.Struct("!16sIQ")  # the magic, the bytes of the fields, the bytes of the payload
READ_BYTES = 1 << 18
_MAX_FIELDS_BYTES = 1 << 20
_CONNECT_SECONDS = 3.0


class HostConnection:
    """A connection, with what is still to be sent and what has come of the next message.

    Args:
        sock: the connection.
        dialled: the host that it was opened to; None if the other side has opened it.

    Attributes:
        host: whom it is to; None until the other side has said so.
        heard: when something came last.
    """

    def __init__(self, sock: socket.socket, *, dialled: int | None = None) -> None:
        sock.settimeout(0.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.dialled = dialled
        self.host: int | None = None
        self.heard = time.monotonic()
        self._urgent: deque[bytes] = deque()
        self._queue: deque[bytes] = deque()
        self._sending: memoryview | None = None
        self._received = bytearray()

    @property
    def is_receiving(self) -> bool:
        """Whether a message has come in part."""
        return bool(self._received)

    @property
    def queued_bytes(self) -> int:
        """How much still waits to be sent."""
        rest = 0 if self._sending is None else len(self._sending)
        return rest + sum(map(len, self._urgent)) + sum(map(len, self._queue))

    def put(self, frame: bytes, *, urgent: bool) -> None:
        """Have a message wait; an urgent one goes before those that are not."""
        (self._urgent if urgent else self._queue).append(frame)

    def write(self) -> bool:
        """Send what can be sent now; whether there is more."""
        while True:
            if not self._sending:
                if not (self._urgent or self._queue):
                    self._sending = None
                    return False
                self._sending = memoryview((self._urgent or self._queue).popleft())
            try:
                self._sending = self._sending[self.socket.send(self._sending) :]
            except BlockingIOError:
                return True

    def read(self) -> Iterable[tuple[Fields, bytes]]:
        """Messages that are complete.

        Raises:
            OSError: at the connection's end.
            ValueError: if they are not ours.
        """
        while True:
            try:
                chunk = self.socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                raise ConnectionResetError("the other host has closed the connection")
            self.heard = time.monotonic()
            self._received += chunk
            while (message := self._take()) is not None:
                yield message

    def _take(self) -> tuple[Fields, bytes] | None:
        received = self._received
        if len(received) < HEAD.size:
            return None
        magic, fields_bytes, payload_bytes = HEAD.unpack_from(received)
        if magic != MAGIC or fields_bytes > _MAX_FIELDS_BYTES:
            raise ValueError("not a message of paceline's hosts")
        if payload_bytes and self.host is None:
            raise ValueError("a stranger sends bytes")  # which would fill the memory
        start = HEAD.size + fields_bytes
        if len(received) < start + payload_bytes:
            return None
        fields = _fields_of(received[HEAD.size : start])
        payload = bytes(received[start : start + payload_bytes])
        del received[: start + payload_bytes]
        return fields, payload


def end(sock: socket.socket) -> None:
    """Close a socket; a process that was forked, such as a worker of a DataLoader, may still have it."""
    with suppress(OSError):  # it is not connected
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def frame(fields: Fields, payload: bytes = b"") -> bytes:
    """A message as it is sent."""
    text = json.dumps(fields).encode()
    return HEAD.pack(MAGIC, len(text), len(payload)) + text + payload


def _fields_of(text: bytearray) -> Fields:
    """The fields of a message; raises ValueError if it is not ours."""
    try:
        fields = json.loads(text)
    except RecursionError as error:  # lists in lists
        raise ValueError("not a message of paceline's hosts") from error
    if not isinstance(fields, dict):
        raise ValueError("not a message of paceline's hosts")
    return fields


def connect(place: Place) -> socket.socket:
    """A connection to one of a host's addresses; raises OSError if none answers."""
    addresses, port = place
    for address in addresses:
        with suppress(OSError):
            return socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
    raise ConnectionRefusedError(f"nobody answers at {', '.join(addresses)} port {port}")


def ask(place: Place, fields: Fields, *, seconds: float) -> Fields:
    """Connect to a host, say something, and return its answer; raises OSError if there is none."""
    sock = connect(place)
    with sock:
        sock.settimeout(seconds)
        sock.sendall(frame({"kind": "hello", "host": None, **fields}))
        received = bytearray()
        while len(received) < HEAD.size or len(received) < HEAD.size + HEAD.unpack_from(received)[1]:
            if not (chunk := sock.recv(READ_BYTES)):
                raise ConnectionResetError("the other host has closed the connection")
            received += chunk
    answer: Fields = json.loads(received[HEAD.size :])
    return answer
