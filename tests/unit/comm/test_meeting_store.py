"""Connections to the store in which ranks meet, and to what is no store."""

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from paceline.comm import meeting_store
from paceline.comm.meeting_store import NotAStoreError, connect, listen, within


def test_what_takes_too_long_is_left_behind() -> None:
    assert within(5.0, max, 1, 2) == 2
    with pytest.raises(ValueError, match="invalid literal"):
        within(5.0, int, "x")
    with pytest.raises(TimeoutError):
        within(0.05, threading.Event().wait)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_store_without_references_gives_up_its_port() -> None:
    port = free_port()
    for _ in range(2):
        store = listen("127.0.0.1", port, 5.0)
        client = connect("127.0.0.1", port, until=0.0, answer_seconds=5.0)
        client.set("a", "b")
        assert store.get("a") == b"b"
        del store


def test_a_connection_to_itself_is_none_and_leaves_the_port_free(monkeypatch: pytest.MonkeyPatch) -> None:
    own = socket.socket()
    own.bind(("127.0.0.1", 0))
    address, port = own.getsockname()
    own.connect((address, port))
    monkeypatch.setattr(socket, "create_connection", lambda *_: own)
    with pytest.raises(ConnectionRefusedError):
        connect(address, port, until=0.0, answer_seconds=0.1)
    socket.create_server((address, port)).close()


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def test_tries_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(meeting_store, "time", clock)
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", free_port(), until=20.0, answer_seconds=1.0)
    assert clock.pauses == sorted(clock.pauses)
    assert clock.pauses[-1] == 1.0
    assert 18.0 < clock.now <= 20.0


def say_hello(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9\r\n")


@pytest.mark.parametrize(
    ("answer", "text"), [(say_hello, "answers what no store"), (socket.socket.close, "closes connections")]
)
def test_another_program_is_recognised_before_the_time_for_an_answer_is_over(
    answer: Callable[[socket.socket], Any], text: str
) -> None:
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve() -> None:
            with suppress(OSError):  # it was shut down
                while True:
                    answer(opened.enter_context(listener.accept()[0]))

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(NotAStoreError, match=text):
            connect("127.0.0.1", listener.getsockname()[1], until=1e9, answer_seconds=20.0)
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
