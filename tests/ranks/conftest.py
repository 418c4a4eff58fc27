import contextlib
import os
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import pytest
from left_processes import is_running

from paceline.testing import RankPool, forkserver


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 5.0
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < until, f"still running: {running}"
        time.sleep(0.01)


def children(parent: int) -> set[int]:
    return {pid for pid in _pids() if _parent(pid) == parent}


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it has ended before it was opened, or after that
        return None


def held() -> dict[str, Set[object]]:
    """What ranks could leave behind, in this process and in its fork server."""
    server = forkserver.current()
    return {
        "processes": children(server.pid),
        "directories": set(server.directory.iterdir()),
        "descriptors": _descriptors(os.getpid()),
        "server's descriptors": _descriptors(server.pid),
        "children": children(os.getpid()),
    }


def _descriptors(pid: int) -> set[tuple[str, str]]:
    """A process's open files: their numbers, and what they lead to."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((file.name, str(file.readlink())))
    return found


@pytest.fixture(name="wait_until_gone")
def _wait_until_gone() -> Callable[[list[int]], None]:
    return wait_until_gone


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = held()
    yield
    # What earlier tests have left may go meanwhile.
    assert {what: new for what, now in held().items() if (new := now - before[what])} == {}


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks for one file: a pool whose ranks are ended if a test breaks their group."""
    with RankPool(2, timeout=60.0) as pool:
        yield pool


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The same, of two ranks and of three."""
    with RankPool(request.param, timeout=60.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Four ranks for one file: data parallelism by tensor parallelism."""
    with RankPool(4, timeout=60.0) as pool:
        yield pool
