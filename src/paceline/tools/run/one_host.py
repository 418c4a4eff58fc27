"""The rendezvous of one host alone: no other host reaches its store, which listens on the loopback."""

import errno
import ipaddress
import os
import socket
from typing import Any

from torch import distributed
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

# torch's type hints leave out the stores.
_distributed: Any = distributed
LOOPBACK = "127.0.0.1"
# With this variable of torch, rank 0 has the ranks' store, and not the launcher.
NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class OneHostRendezvous(RendezvousHandler):
    """Has a store for the agent and for the ranks, on the loopback interface.

    torch's own handlers listen on all interfaces. They also wait for hosts that may come or go.

    Args:
        run_id: the name of the run.
        port: where the store listens; 0 for a free port. Ranks that are started again get another one.
    """

    def __init__(self, run_id: str, port: int = 0) -> None:
        self._run_id = run_id
        self._is_closed = False
        self._rounds = 0
        self._store = self._ranks_store = _loopback_store(port)

    def get_backend(self) -> str:
        """The name that torch's agent logs."""
        return "one-host"

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the store that the agent has made."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """This host alone is the world. Each start of ranks has a store of its own.

        torch uses the same names in it each time, and would find the addresses of ranks that are gone.
        """
        self._rounds += 1
        if self._rounds > 1:
            self._ranks_store = _loopback_store(0)
        store: Any = _distributed.PrefixStore(f"{self._run_id}/{self._rounds}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._ranks_store.port))

    def is_closed(self) -> bool:
        """Whether the run is over."""
        return self._is_closed

    def set_closed(self) -> None:
        """Note that the run is over."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """How many other hosts want to join: none can."""
        return 0

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Note that the run is over."""
        self.set_closed()
        return True


def _loopback_store(port: int) -> Any:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError as error:
            reason = errno.errorcode.get(error.errno or 0, str(error))
            raise RuntimeError(f"the store cannot listen on {LOOPBACK} (port: {port}, {reason})") from error
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        # The store closes the socket.
        return _distributed.TCPStore(
            LOOPBACK, port, is_master=True, multi_tenant=True, master_listen_fd=listener.detach()
        )


def one_host_port(parameters: RendezvousParameters) -> int | None:
    """The port for this host's own store; None if another host may have to reach the store, or has it."""
    if parameters.max_nodes > 1 or not _is_loopback(parameters.local_addr):
        return None
    if parameters.backend not in ("c10d", "static") or parameters.config.keys() & {"is_host", "store_type"}:
        return None
    if os.environ.get(NO_SHARED_STORE) == "1":
        return None
    address, port = parse_rendezvous_endpoint(parameters.endpoint.strip() or LOOPBACK, default_port=0)
    if not _is_loopback(address):
        return None
    # As with torch, ranks under c10d get a free port, and those of a static rendezvous the one that is given.
    return port if parameters.backend == "static" else 0


def _is_loopback(address: str | None) -> bool:
    """Whether it is the loopback's address or name; also if there is none."""
    if address is None or address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
