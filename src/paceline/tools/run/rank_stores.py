"""A store of its own for each start of the ranks, when torch's rendezvous brings hosts together.

Note [Stale keys]. torch's c10d rendezvous makes one store for the ranks and keeps it for the whole run, and a
static one has the ranks use its own. But ranks use the same keys at each start: gloo's are in
``default_pg/0//cpu//0/``, one per rank, with the address at which it listens. So a rank that is started again
may find the address of a process that is gone. Then it waits in ``init_process_group`` until that times out,
or it fails. A host that joins later also finds no address of the store.

So the launcher of the first host opens a new store at each start, at another port. Ranks do not open it:
those that are left after rank 0 was lost can still read what it has written.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from paceline.tools.run.one_host import NO_SHARED_STORE

# torch's type hints leave out the stores.
_distributed: Any = distributed


class RankStores(RendezvousHandler):
    """A rendezvous of torch, with a new store for the ranks in each round, see Note [Stale keys].

    Args:
        hosts: the rendezvous of the hosts: c10d or static.
    """

    def __init__(self, hosts: RendezvousHandler) -> None:
        self._hosts = hosts
        self._rounds = 0
        self._store: Any = None

    def get_backend(self) -> str:
        """The name that torch's agent logs."""
        return self._hosts.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the store that the agent has made."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other hosts, and open the ranks' store if this is the first host."""
        self._rounds += 1
        with _without_shared_store():
            info = self._hosts.next_rendezvous()
        address = info.bootstrap_store_info
        assert address is not None
        if self._hosts.get_backend() == "static":
            if self._rounds == 1:
                return info
            # A static rendezvous has only one address, and one store for all rounds.
            store: Any = _distributed.PrefixStore(f"start {self._rounds}", info.store)
            address = RendezvousStoreInfo.build(info.rank, store, local_addr=address.master_addr)
        self._store = _open(address) if info.rank == 0 else None
        return RendezvousInfo(info.store, info.rank, info.world_size, address)

    def is_closed(self) -> bool:
        """Whether the run is over."""
        return self._hosts.is_closed()

    def set_closed(self) -> None:
        """Note that the run is over."""
        self._hosts.set_closed()

    def num_nodes_waiting(self) -> int:
        """How many other hosts want to join."""
        return self._hosts.num_nodes_waiting()

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._hosts.get_run_id()

    def shutdown(self) -> bool:
        """Note that the run is over, and leave the other hosts."""
        return self._hosts.shutdown()


def _open(address: RendezvousStoreInfo) -> Any:
    return _distributed.TCPStore(address.master_addr, address.master_port, is_master=True, multi_tenant=True)


@contextmanager
def _without_shared_store() -> Iterator[None]:
    """Have torch choose a port for a new store in each round, and tell it to all hosts."""
    before = os.environ.get(NO_SHARED_STORE)
    os.environ[NO_SHARED_STORE] = "1"
    try:
        yield
    finally:
        del os.environ[NO_SHARED_STORE]
        if before is not None:
            os.environ[NO_SHARED_STORE] = before
