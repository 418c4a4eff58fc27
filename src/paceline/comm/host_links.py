"""Connections between hosts that may come and go: messages of a few fields and some bytes, in a thread.

A process group needs all its members in every collective. Here a host that is away is one that nothing comes
from: the others go on, and what was sent to it waits, up to a limit, until it is back.

Each pair of hosts has one connection, which the host of the higher number opens, and opens again whenever it
breaks. It says its number and the token, and the other one says welcome: until then there is no connection,
because somebody else may listen there by now. Nothing that is received is unpickled.
"""

import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from paceline.comm.host_connection import READ_BYTES, Fields, HostConnection, Place, connect, end, frame

_TICK_SECONDS = 0.05
_RETRY_SECONDS = 0.5
_GONE_SECONDS = 3.0
_END_SECONDS = 60.0


class Listener(Protocol):
    """Whoever uses the links; all is called in the thread of the links."""

    def linked(self, host: int) -> None:
        """There is a connection to a host."""

    def received(self, host: int, fields: Fields, payload: bytes) -> None:
        """A message has come."""

    def tick(self) -> None:
        """Called every few hundredths of a second."""

    def greeted(self, fields: Fields) -> Fields:
        """Somebody has connected who has no number yet, and says this; returns the answer."""

    def goes_on_with(self, token: object) -> bool:
        """A host with another token connects: whether to take that over, because its loop goes on here."""

    def failed(self, error: Exception) -> None:
        """The thread of the links ends with an error."""


class HostLinks:
    """This host's connections to the others.

    Args:
        addresses: where others may reach this host.
        max_queued_bytes: what may wait for one host. If it is more, the connection is closed: a host that
            comes back then has to ask for the whole state.
        silent_seconds: after this time without a word the connection is opened anew: after a long failure of
            the network, the system itself would try the old one again only after minutes.
        bind: where to listen; by default anywhere.

    Attributes:
        port: where this host listens.
        own_place: the same, with its addresses.
        number: this host's.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        max_queued_bytes: int,
        silent_seconds: float,
        bind: tuple[str, int] = ("", 0),
    ) -> None:
        self._silent_seconds = silent_seconds
        self._token = ""
        self._may_join = False
        self._max_queued_bytes = max_queued_bytes
        self._listening = socket.create_server(bind, reuse_port=False)
        self._listening.settimeout(0.0)
        self.port: int = self._listening.getsockname()[1]
        self.own_place: Place = (addresses, self.port)
        self.number = -1
        self._listener: Listener | None = None
        self._places: dict[int, Place] = {}
        self._retry_at: dict[int, float] = {}
        self._connecting: set[int] = set()  # until they have said welcome
        self._connections: dict[int, HostConnection] = {}
        self._unnamed: list[HostConnection] = []  # whose other side has not said who it is
        self._opened: deque[tuple[int, socket.socket]] = deque()
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._waker, self._wake_end = socket.socketpair()
        for each in (self._waker, self._wake_end):
            # Also the thread itself wakes, which must not wait for what it reads later. In a full pipe there
            # is enough to wake it.
            each.settimeout(0.0)
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        self._is_closed = self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="paceline-hosts", daemon=True)

    def start(
        self,
        number: int,
        places: Mapping[int, Place],
        listener: Listener,
        *,
        token: str,
        may_join: bool = False,
    ) -> None:
        """Open the connections, and keep them open.

        Args:
            number: this host's.
            token: what hosts of the same loop know, so that a stranger's messages are not taken for theirs.
            may_join: whether a host without a number may ask for one.
            places: where the other hosts listen.
            listener: whom to call.
        """
        self.number = number
        self._token = token
        self._may_join = may_join
        self._listener = listener
        for host, place in places.items():
            self.add(host, place)
        self._thread.start()

    def add(self, host: int, place: Place) -> None:
        """Know where a host is; at the same port it may still have the addresses that it had before."""
        addresses, port = place
        with self._lock:
            if host != self.number:
                before, port_before = self._places.get(host, ((), port))
                known = before if port == port_before else ()
                self._places[host] = ([*dict.fromkeys([*addresses, *known])], port)
                self._retry_at.setdefault(host, 0.0)

    def forget(self, host: int) -> None:
        """A host does not come back, and its place may be another's: do not connect to it again."""
        with self._lock:
            self._places.pop(host, None)
            self._retry_at.pop(host, None)

    @property
    def places(self) -> dict[int, Place]:
        """Where the other hosts listen."""
        return dict(self._places)

    @property
    def linked(self) -> list[int]:
        """The hosts to which there is a connection."""
        return sorted(self._connections)

    def heard(self, host: int) -> float:
        """When something came from a host last, by the monotonic clock; 0 without a connection."""
        found = self._connections.get(host)
        return 0.0 if found is None else found.heard

    def is_receiving(self, host: int) -> bool:
        """Whether a message of a host has come in part."""
        found = self._connections.get(host)
        return found is not None and found.is_receiving

    def queued_bytes(self, host: int) -> int:
        """How much still waits to be sent to a host."""
        with self._lock:
            found = self._connections.get(host)
            return 0 if found is None else found.queued_bytes

    def send(self, host: int, fields: Fields, payload: bytes = b"", *, urgent: bool = False) -> None:
        """Send a message to a host, if there is a connection; an urgent one goes before those that wait."""
        with self._lock:
            connection = self._connections.get(host)
            if connection is None or self._is_ending:
                return
            connection.put(frame(fields, payload), urgent=urgent)
        self.wake()

    def close(self) -> None:
        """Send what waits, as long as the others take it, and end."""
        self._is_ending = True
        left, until = math.inf, 0.0
        while queued := sum(map(self.queued_bytes, self.linked)):
            if queued < left:
                left, until = queued, time.monotonic() + _GONE_SECONDS
            elif time.monotonic() > until:
                break
            time.sleep(0.01)
        self._end_connections()
        self._is_closed = True
        if self._thread.ident is None:  # it was never started
            self._shut()
            return
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_GONE_SECONDS)

    def abandon(self) -> None:
        """End at once, without a word to the others; takes no lock, so a finalizer may call it anywhere."""
        self._is_ending = self._is_closed = True
        self.wake()

    def _end_connections(self) -> None:
        """Tell the others that nothing more comes, and wait until they have read all, if they are there.

        A socket that is closed while something has come that nobody has read loses what is still to be sent.
        """
        with self._lock:
            connections = [*self._connections.values()]
            for connection in connections:
                with suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_WR)
        until = time.monotonic() + _END_SECONDS
        while time.monotonic() < until and self._thread.is_alive() and any(map(self._is_there, self.linked)):
            time.sleep(0.01)

    def _is_there(self, host: int) -> bool:
        return time.monotonic() - self.heard(host) < _GONE_SECONDS

    def wake(self) -> None:
        """Have the thread look at once."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def _run(self) -> None:
        assert self._listener is not None
        try:
            while not self._is_closed:
                self._connect_missing()
                self._watch_connections()
                for key, events in self._selector.select(_TICK_SECONDS):
                    self._serve(key.fileobj, key.data, events)
                self._listener.tick()
        except Exception as error:  # nobody waits for this thread, so nobody else would tell
            self._listener.failed(error)
        finally:
            self._shut()

    def _shut(self) -> None:
        with self._lock:
            for connection in [*self._connections.values(), *self._unnamed]:
                end(connection.socket)
            self._connections.clear()
            for each in (self._listening, self._waker, self._wake_end):
                end(each)
            self._selector.close()

    def _serve(self, source: Any, connection: Any, events: int) -> None:
        if source is self._listening:
            self._accept()
        elif source is self._wake_end:
            with suppress(BlockingIOError):
                source.recv(READ_BYTES)
        else:
            self._exchange(connection, events)

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _ = self._listening.accept()
            self._adopt(HostConnection(sock))

    def _adopt(self, connection: HostConnection) -> None:
        self._unnamed.append(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _watch_connections(self) -> None:
        """Take up new connections, wait until there is room for what is to be sent, and drop full ones."""
        while self._opened:
            host, sock = self._opened.popleft()
            self._adopt(HostConnection(sock, dialled=host))
        for connection in [*self._unnamed, *self._connections.values()]:
            with self._lock:
                queued = connection.queued_bytes
            is_silent = time.monotonic() - connection.heard > self._silent_seconds
            if queued > self._max_queued_bytes or is_silent:
                self._drop(connection)
            elif queued:
                events = selectors.EVENT_READ | selectors.EVENT_WRITE
                self._selector.modify(connection.socket, events, connection)

    def _exchange(self, connection: HostConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                with self._lock:
                    if not connection.write():
                        self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
            if events & selectors.EVENT_READ:
                for fields, payload in connection.read():
                    self._receive(connection, fields, payload)
        except (OSError, ValueError, KeyError):
            self._drop(connection)

    def _receive(self, connection: HostConnection, fields: Fields, payload: bytes) -> None:
        assert self._listener is not None
        if connection.host is not None:
            self._listener.received(connection.host, fields, payload)
        elif connection.dialled is not None and fields.get("kind") == "welcome":
            self._name(connection, connection.dialled)
        elif connection.dialled is not None or fields.get("kind") != "hello":
            raise ValueError("a stranger has connected")
        elif (host := fields["host"]) is None and self._may_join:
            answer = self._listener.greeted(fields)
            connection.put(frame(answer), urgent=True)
        elif self._is_known(fields.get("token")) and is_host_number(host) and host != self.number:
            connection.put(frame({"kind": "welcome"}), urgent=True)
            self._name(connection, host)
        else:
            raise ValueError("a stranger has connected")

    def _is_known(self, token: object) -> bool:
        """Whether a host with this token is one of ours; takes over the token of a loop to go on with."""
        assert self._listener is not None
        if token != self._token and self._may_join and self._listener.goes_on_with(token):
            self._token = str(token)
        return token == self._token

    def _name(self, connection: HostConnection, host: int) -> None:
        """A connection's other side is known."""
        assert self._listener is not None
        with self._lock:
            if (before := self._connections.pop(host, None)) is not None:
                self._discard(before)  # it has connected anew
            connection.host = host
            self._connections[host] = connection
            self._connecting.discard(host)
            if connection in self._unnamed:
                self._unnamed.remove(connection)
        self._listener.linked(host)

    def _drop(self, connection: HostConnection) -> None:
        with self._lock:
            self._discard(connection)
            if connection in self._unnamed:
                self._unnamed.remove(connection)
            if connection.host is None and connection.dialled is not None:
                self._retry(connection.dialled)
            host = connection.host
            if host is None or self._connections.get(host) is not connection:
                return
            del self._connections[host]
            self._retry(host)

    def _discard(self, connection: HostConnection) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        end(connection.socket)

    def _connect_missing(self) -> None:
        """Connect to the hosts of lower numbers; connecting may take seconds, so threads do it."""
        now = time.monotonic()
        for host, place in self.places.items() if not self._is_ending else ():
            is_missing = host < self.number and host not in self._connections
            if is_missing and host not in self._connecting and self._retry_at.get(host, 0.0) <= now:
                self._connecting.add(host)
                threading.Thread(target=self._connect, args=(host, place), daemon=True).start()

    def _connect(self, host: int, place: Place) -> None:
        hello = {"kind": "hello", "token": self._token, "host": self.number}
        try:
            sock = connect(place)
            sock.sendall(frame(hello))
        except OSError:
            self._retry(host)
        else:
            self._opened.append((host, sock))
            self.wake()

    def _retry(self, host: int) -> None:
        self._retry_at[host] = time.monotonic() + _RETRY_SECONDS
        self._connecting.discard(host)


def is_host_number(value: object) -> bool:
    """Whether a value that came from elsewhere can be a host's number."""
    return type(value) is int and value >= 0


def is_place(value: object) -> bool:
    """Whether a value that came from elsewhere says where a host listens."""
    match value:
        case [[*addresses], int(port)]:
            return all(isinstance(each, str) for each in addresses) and 0 < port < 1 << 16
    return False
