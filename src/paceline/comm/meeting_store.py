"""The store in which launched ranks meet: torch's TCPStore, with an end to every wait.

torch waits without limit for whoever accepts a connection and does not answer: another program, or a rank 0
that is frozen. So a thread waits, and is left behind if that takes too long.
"""

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

from torch import distributed

from paceline.comm.launchers import LOOPBACK, MeetingPlace
from paceline.errors import MeetingError

_distributed: Any = distributed  # its type hints leave out the stores
STORE_ERRORS = (RuntimeError, OSError)
_POLL_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
# A store that ends closes a connection too, but then nobody listens any more.
_CLOSED_OFTEN = 3
# How long a store may take to answer the first connection. torch may look up names then, which is slow on a
# host whose name server does not answer.
ANSWER_SECONDS = 20.0
# The least time for an answer, also when the time for the meeting is over.
_LEAST_SECONDS = 1.0
# How long rank 0 waits for a port to become free.
_PORT_SECONDS = 4.0


class NotAStoreError(Exception):
    """What listens at an address is no store; the message says how that shows."""


class LostStoreError(Exception):
    """The store went away."""


class MeetingStore:
    """The store where one world's ranks meet, as one of them finds and calls it.

    Args:
        place: where it is.
        rank: this process's rank.
        is_listener: whether this process is to be the store.
        seconds: how long the meeting may take.
        store: the store of the last meeting, if there was one.

    Attributes:
        until: when the meeting ends, in the time of ``time.monotonic``.
        is_port_in_use: whether this process was to be the store, and found another one there.
        store: torch's store; None if it has not been found.
    """

    def __init__(
        self, place: MeetingPlace, *, rank: int, is_listener: bool, seconds: float, store: Any = None
    ) -> None:
        self._place = place
        self._rank = rank
        self.is_listener = is_listener
        self.seconds = seconds
        self.until = time.monotonic() + seconds
        self.is_port_in_use = False
        # No function may have it in a variable: whoever keeps an exception would keep rank 0's port.
        self.store = store

    @property
    def where(self) -> str:
        """The address, with the variables that change it."""
        return f"MASTER_ADDR={self._place.address}, MASTER_PORT={self._place.port}"

    def port_in_use(self, by_whom: str) -> str:
        """The words of an error about the port."""
        return f"the port is in use {by_whom} ({self.where}). Set MASTER_PORT to a free port, on every rank"

    def find(self) -> None:
        """Be the store, or connect to it, unless that was done."""
        if self.store is not None:
            return
        if self.is_listener:
            self._listen()
            return
        try:
            self.connect(self.until)
        except OSError as error:
            text = f"rank {self._rank} cannot reach rank 0 ({self.where}): {error}"
            raise MeetingError(text) from error

    def connect(self, until: float) -> None:
        """Be a client of the store; raises OSError if nobody listens there until then."""
        address, port = self._place
        seconds = max(_LEAST_SECONDS, min(ANSWER_SECONDS, self.until - time.monotonic()))
        try:
            self.store = connect(address, port, until=until, answer_seconds=seconds)
        except NotAStoreError as error:
            raise MeetingError(
                f"what listens at {address} port {port} is not rank 0: the port is used by another program, "
                f"or rank 0 is frozen ({self.where}): {error}. Set MASTER_PORT to a free port, on every rank"
            ) from error
        self.store.set_timeout(timedelta(seconds=self.seconds))

    def close(self) -> None:
        """Give up the store, and with it rank 0's port."""
        self.store = None

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the store.

        Raises:
            LostStoreError: if the store has gone.
            MeetingError: if it does not answer.
        """
        seconds = max(_LEAST_SECONDS, self.until - time.monotonic())
        try:
            return within(seconds, self._call_store, name, *args)
        except TimeoutError:
            text = f"rank 0 does not answer: it is frozen, or cannot be reached any more ({self.where})"
            raise MeetingError(text) from None
        except STORE_ERRORS as error:
            raise LostStoreError(first_line(error)) from error

    def _call_store(self, name: str, *args: Any) -> Any:
        return getattr(self.store, name)(*args)

    def _listen(self) -> None:
        """Be the store. If the port is in use, look at who listens there, and whether it becomes free."""
        until = min(self.until, time.monotonic() + _PORT_SECONDS)
        while True:
            try:
                self.is_port_in_use = False
                self.store = listen(self._place.address, self._place.port, self.seconds)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    text = f"rank 0 cannot listen at port {self._place.port} ({self.where}): {error}"
                    raise MeetingError(text) from error
            else:
                return
            self.is_port_in_use = True
            with contextlib.suppress(OSError):
                self.connect(min(until, time.monotonic() + 0.5))
                return
            if time.monotonic() > until:
                raise MeetingError(self.port_in_use("by another program, which does not listen there"))


def within(seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """A function's result.

    Raises:
        TimeoutError: if it takes longer; then it goes on in its thread.
    """
    outcome = _start(function, *args)
    try:
        return _result(outcome, seconds)
    except Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def listen(address: str, port: int, seconds: float) -> Any:
    """A store of this process.

    Raises:
        OSError: if the port cannot be had.
    """
    if address == LOOPBACK:
        listener = socket.create_server((address, port))
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port))
    return _distributed.TCPStore(
        LOOPBACK,  # its own connection, which does not need the address that others use
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )


def connect(address: str, port: int, *, until: float, answer_seconds: float) -> Any:
    """A client of the store at this address; ranks start at different times, and names may be known late.

    Args:
        address: the store's host.
        port: its port.
        until: when to give up, in the time of ``time.monotonic``; there is one try at least.
        answer_seconds: how long the store may take to answer.

    Raises:
        OSError: if nobody listens there.
        NotAStoreError: if it is another program, or does not answer.
    """
    pause, closed = _POLL_SECONDS, 0
    while True:
        try:
            return _connect_once(address, port, max(1.0, until - time.monotonic()), answer_seconds)
        except OSError as error:
            closed += isinstance(error, ConnectionResetError)
            if closed == _CLOSED_OFTEN:
                raise NotAStoreError("it closes connections") from error
            if time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _connect_once(address: str, port: int, seconds: float, answer_seconds: float) -> Any:
    with within(seconds, socket.create_connection, (address, port), seconds) as beside:
        # Linux connects a socket to itself if it happens to choose this port for it.
        if beside.getsockname() == beside.getpeername():
            # Ended at once, or it would keep the port from rank 0 for a minute.
            beside.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return _await_client(address, port, answer_seconds, beside)


def is_own_address(address: str) -> bool:
    """Whether an address is one of this host's."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def _await_client(address: str, port: int, seconds: float, beside: socket.socket) -> Any:
    """Wait for torch's client, and see by a connection beside it what torch does not tell."""
    outcome = _start(_make_client, address, port, seconds)
    until = time.monotonic() + seconds
    beside.settimeout(0.0)
    while True:
        try:
            return _result(outcome, _POLL_SECONDS)
        except Empty:
            _check_silent(beside)
        except STORE_ERRORS as error:
            raise ConnectionResetError(errno.ECONNRESET, first_line(error)) from error
        if time.monotonic() > until:
            raise NotAStoreError(f"it did not answer within {seconds:.0f} s")


def _make_client(address: str, port: int, seconds: float) -> Any:
    return _distributed.TCPStore(
        address, port, None, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
    )


def _check_silent(beside: socket.socket) -> None:
    """A store says nothing to a client that has asked nothing, and does not close the connection."""
    with contextlib.suppress(BlockingIOError):
        if beside.recv(1):
            raise NotAStoreError("it answers what no store answers")
        raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")


def _start(function: Callable[..., Any], *args: Any) -> "SimpleQueue[tuple[Any, Exception | None]]":
    outcome: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((function(*args), None))
        except Exception as error:  # for the thread that asked
            outcome.put((None, error))

    threading.Thread(target=run, name="paceline-meeting", daemon=True).start()
    return outcome


def _result(outcome: "SimpleQueue[tuple[Any, Exception | None]]", seconds: float) -> Any:
    value, error = outcome.get(timeout=min(seconds, threading.TIMEOUT_MAX))
    if error is not None:
        raise error
    return value


def first_line(error: BaseException) -> str:
    """An error of torch without the stack of C++ functions that follows."""
    return str(error).partition("\n")[0]
