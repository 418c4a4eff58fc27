"""Connections between hosts, over the loopback interface of this one."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from paceline.comm.host_connection import frame
from paceline.comm.host_links import HostLinks, Place

SECONDS = 10.0
TOKEN = "known"
HERE = ["127.0.0.1"]


class Listening:
    """What a host hears; ``on_linked`` is called in the thread of its links."""

    def __init__(self, on_linked: Callable[[int], None] = lambda _: None) -> None:
        self._on_linked = on_linked
        self.linked_to: list[int] = []
        self.messages: list[Mapping[str, Any]] = []

    def linked(self, host: int) -> None:
        self.linked_to.append(host)
        self._on_linked(host)

    def received(self, _: int, fields: Mapping[str, Any], __: bytes) -> None:
        self.messages.append(fields)

    def tick(self) -> None:
        pass

    def greeted(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    def failed(self, error: Exception) -> None:
        raise error


def make_links() -> HostLinks:
    return HostLinks(HERE, max_queued_bytes=1 << 24, silent_seconds=60.0)


@pytest.fixture
def first() -> Iterator[HostLinks]:
    links = make_links()
    yield links
    links.close()


@pytest.fixture
def second() -> Iterator[HostLinks]:
    links = make_links()
    yield links
    links.close()


def wait_until(is_so: Callable[[], bool], seconds: float = SECONDS) -> bool:
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(0.01)
    return is_so()


def place_of(listening: socket.socket) -> Place:
    return HERE, listening.getsockname()[1]


def test_thousands_of_messages_of_the_thread_itself_do_not_block_it() -> None:
    first, second = make_links(), make_links()  # if the thread is blocked, nobody could close them
    count = 5000
    heard = Listening()

    def send(host: int) -> None:
        for number in range(count):
            second.send(host, {"number": number})

    first.start(0, {}, heard, token=TOKEN)
    second.start(1, {0: first.own_place}, Listening(send), token=TOKEN)
    assert wait_until(lambda: len(heard.messages) == count)
    assert [message["number"] for message in heard.messages] == [*range(count)]
    second.close()
    first.close()


def test_a_host_says_the_addresses_that_it_was_given() -> None:
    links = HostLinks(["10.0.0.7"], max_queued_bytes=1, silent_seconds=1.0)
    assert links.own_place == (["10.0.0.7"], links.port)
    links.close()


@pytest.mark.parametrize(("port", "addresses"), [(1234, ["127.0.1.1", "10.0.0.2"]), (4321, ["127.0.1.1"])])
def test_addresses_that_were_known_stay_as_long_as_the_port_does(
    first: HostLinks, port: int, addresses: list[str]
) -> None:
    first.add(2, (["10.0.0.2"], 1234))
    first.add(2, (["127.0.1.1"], port))
    assert first.places == {2: (addresses, port)}


def test_a_host_connects_again_after_another_one_named_an_address_where_it_is_not(
    second: HostLinks,
) -> None:
    heard = Listening()
    first = HostLinks(HERE, max_queued_bytes=1 << 24, silent_seconds=60.0, bind=(HERE[0], 0))
    first.start(0, {}, heard, token=TOKEN)
    second.start(1, {0: first.own_place}, Listening(), token=TOKEN)
    assert wait_until(lambda: heard.linked_to == [1] and second.linked == [0])
    second.add(0, (["127.0.1.9"], first.port))  # tried first
    second._connections[0].socket.shutdown(socket.SHUT_RDWR)
    assert wait_until(lambda: heard.linked_to == [1, 1])
    first.close()


@pytest.mark.parametrize("said", [b"", b"220 somewhere ESMTP\r\n"])
def test_who_only_accepts_a_connection_is_not_taken_for_a_host(first: HostLinks, said: bytes) -> None:
    heard = Listening()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        first.start(1, {0: place_of(stranger)}, heard, token=TOKEN)
        with stranger.accept()[0] as connection:
            connection.sendall(said)
            time.sleep(0.3)
    assert heard.linked_to == []


def test_hosts_of_two_loops_are_not_linked_on_either_side(first: HostLinks, second: HostLinks) -> None:
    one, other = Listening(), Listening()
    first.start(0, {}, one, token="of one loop")
    second.start(1, {0: first.own_place}, other, token="of another")
    time.sleep(1.0)
    assert one.linked_to == other.linked_to == []


@pytest.fixture
def fork() -> Iterator[Callable[[], None]]:
    """Makes a process that has all of this one's sockets and does nothing, as a worker of a DataLoader."""
    children: list[int] = []

    def sleep_in_a_fork() -> None:
        child = os.fork()
        if child == 0:
            time.sleep(6 * SECONDS)
            os._exit(0)
        children.append(child)

    yield sleep_in_a_fork
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("way", [HostLinks.close, HostLinks.abandon])
def test_a_forked_process_keeps_neither_the_port_nor_a_connection(
    fork: Callable[[], None], way: Callable[[HostLinks], None]
) -> None:
    first, second = make_links(), make_links()
    heard = Listening()
    first.start(0, {}, heard, token=TOKEN)
    second.start(1, {0: first.own_place}, Listening(), token=TOKEN)
    assert wait_until(lambda: heard.linked_to == [1] and second.linked == [0])
    fork()
    way(first)
    first._thread.join(SECONDS)
    assert wait_until(lambda: second.linked == [])
    with contextlib.closing(socket.create_server(("127.0.0.1", first.port))):
        pass
    second.close()


def test_a_message_that_comes_slowly_is_seen_while_it_comes(first: HostLinks) -> None:
    heard = Listening()
    first.start(0, {}, heard, token=TOKEN)
    message = frame({"number": 1}, b"payload")
    with socket.create_connection((HERE[0], first.port)) as slow:
        slow.sendall(frame({"kind": "hello", "token": TOKEN, "host": 1}))
        assert wait_until(lambda: first.linked == [1])
        assert not first.is_receiving(1)
        slow.sendall(message[:20])
        assert wait_until(lambda: first.is_receiving(1))
        slow.sendall(message[20:])
        assert wait_until(lambda: len(heard.messages) == 1)
        assert not first.is_receiving(1)
    assert not first.is_receiving(2)


def test_a_host_that_is_forgotten_is_not_dialled_again(first: HostLinks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        gone.settimeout(SECONDS)
        first.start(1, {0: place_of(gone)}, Listening(), token=TOKEN)
        with gone.accept()[0]:
            first.forget(0)
        gone.settimeout(1.5)
        with pytest.raises(TimeoutError):
            gone.accept()


def test_links_that_are_abandoned_end_and_free_their_port() -> None:
    links = make_links()
    links.start(0, {}, Listening(), token=TOKEN)
    links.abandon()
    links._thread.join(SECONDS)
    assert not links._thread.is_alive()
    with contextlib.closing(socket.create_server(("127.0.0.1", links.port))):
        pass
