"""Hosts on one machine: network namespaces with links between them, on which bytes can be counted.

    with Hosts() as hosts:
        hosts.limit("100mbit")
        run_ranks(train, world=2, args=(hosts,), backend=None)

    def train(rank, hosts):
        with hosts.group(rank, world=2, host=rank):
            ...
            print(sent_bytes())

Two hosts have one link between them. More hosts, as of ``Hosts(count=8)``, have a link each to a bridge, as
to a switch. Ranks are those of ``run_ranks``; they move into their host's namespace before they open a
process group. Ranks of different hosts do not share memory. Needs root, and the programs ``ip`` and ``tc``.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.comm.rendezvous import tcp_store_group
from paceline.comm.shm.local_ranks import HOST_VARIABLE
from paceline.errors import OptionError

_PREFIX = "paceline"
_LINK = "wire"  # each namespace has its own names
_BRIDGE, _PORT_PREFIX = "bridge", "port"
_MOST_HOSTS = 254  # addresses of one network
_PORT = 29500  # and its own ports
_NEWNET = 0x40000000  # linux/sched.h: CLONE_NEWNET
_SECONDS = 10.0
_numbers = itertools.count()


def why_not() -> str | None:
    """Why there can be no ``Hosts`` on this machine; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"these programs are missing: {missing}"
    trial = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}-trial"
    try:
        _run("ip", "netns", "add", trial)
    except subprocess.CalledProcessError as error:  # a container may lack the right
        return f"network namespaces cannot be made ({error.stderr.strip()})"
    finally:
        _remove(trial)
    return None


class Hosts:
    """Network namespaces, which exist inside a ``with`` block.

    Args:
        count: how many.

    Attributes:
        names: the namespaces' names.
        addresses: the hosts' addresses.
    """

    def __init__(self, *, count: int = 2) -> None:
        if not 2 <= count <= _MOST_HOSTS:
            raise OptionError(f"there can be 2 to {_MOST_HOSTS} hosts (count: {count})")
        own = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.names: Sequence[str] = [f"{own}-{host}" for host in range(count)]
        self.addresses: Sequence[str] = [f"10.77.0.{host + 1}" for host in range(count)]
        self._switch = None if count == 2 else f"{own}-switch"

    def __enter__(self) -> Self:
        _remove_abandoned()
        with ExitStack() as on_error:
            on_error.callback(self._remove)
            for name in self._namespaces:
                _run("ip", "netns", "add", name)
            if self._switch is None:
                _link(self.names[0], _LINK, self.names[1])
            else:
                self._connect_to(self._switch)
            for name, address in zip(self.names, self.addresses, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", _LINK)
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "link", "set", _LINK, "up")
            on_error.pop_all()
        return self

    def _connect_to(self, switch: str) -> None:
        """Link each host to a bridge, which has a namespace of its own: its name may be used elsewhere."""
        _run("ip", "-n", switch, "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", _BRIDGE, "up")
        for number, name in enumerate(self.names):
            port = f"{_PORT_PREFIX}{number}"
            _link(switch, port, name)
            _run("ip", "-n", switch, "link", "set", port, "master", _BRIDGE, "up")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def limit(self, rate: str, *, only: str | None = None) -> None:
        """Limit what each host sends to a rate, such as ``100mbit``.

        Args:
            rate: the rate.
            only: the name of a host, if only that one is limited.
        """
        for name in self.names if only is None else [only]:
            shape = ("tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
            _run("tc", "-n", name, "qdisc", "replace", "dev", _LINK, "root", *shape)

    @contextmanager
    def group(self, rank: int, *, world: int, host: int) -> Iterator[None]:
        """On a rank: move this process to a host for good, and open a gloo group there."""
        enter(self.names[host])
        os.environ["GLOO_SOCKET_IFNAME"] = _LINK
        os.environ[HOST_VARIABLE] = self.names[host]
        with tcp_store_group(self.addresses[0], _PORT, rank=rank, world=world, backend="gloo"):
            yield

    @property
    def _namespaces(self) -> list[str]:
        return [*self.names, *([] if self._switch is None else [self._switch])]

    def _remove(self) -> None:
        for name in self._namespaces:
            _remove(name)


def sent_bytes() -> int:
    """On a rank: the bytes that its host has sent over the link so far."""
    # This thread's namespace: the process may be in another.
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    [counts] = [line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{_LINK}:")]
    return int(counts[8])


def enter(name: str) -> None:
    """Move this process to a network namespace for good."""
    with Path("/run/netns", name).open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter a network namespace (name: {name})")


def _link(first: str, device: str, second: str) -> None:
    """Link two namespaces; in the second one the link has the name that hosts know."""
    _run("ip", "-n", first, "link", "add", device, "type", "veth", "peer", "name", _LINK, "netns", second)


def _remove_abandoned() -> None:
    """Remove the namespaces of processes that were killed."""
    for path in Path("/run/netns").glob(f"{_PREFIX}-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            _remove(path.name)


def _remove(name: str) -> None:
    with suppress(subprocess.CalledProcessError):  # it was never made
        _run("ip", "netns", "delete", name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)  # noqa: S603 - ours
