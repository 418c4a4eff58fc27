"""The program that runs in each rank. It gathers facts, each within a deadline, and writes them to a file."""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.comm.group import Group
from paceline.comm.probing import reduced_dtypes
from paceline.comm.rendezvous import gloo_group, rendezvous_from_environment
from paceline.comm.shm.local_ranks import host_id
from paceline.tools.doctor.connections import connect, connect_to_all, listening
from paceline.tools.doctor.host_checks import gather_software
from paceline.tools.doctor.host_network import gather_network
from paceline.tools.doctor.rank_measurements import measure_pairs, read_clocks
from paceline.tools.run.worker import FOLDER

# How long ranks wait for each other: one may start late, or have a slow link.
SECONDS = 20.0
BACKENDS = ("gloo", "paceline")
FILE_SUFFIX = ".diagnosis"
# The stage of a rank that has not reached the rendezvous yet.
RENDEZVOUS = "rendezvous"


@dataclass
class RankFacts:
    """What ranks know of all ranks: one entry per rank, None from a rank that told nothing.

    Attributes:
        software: each rank's host and versions.
        listeners: where each rank listened.
        connection_errors: why each rank could not connect to each other rank.
        clock_readings: each rank's readings of its clock.
        dtype_errors: by backend and dtype, why an all-reduce is refused.
        pair_speeds: the speeds of the pairs that each rank measured.
        failures: the error that stopped a rank, and at which stage.
    """

    software: list[Any] = field(default_factory=list)
    listeners: list[Any] = field(default_factory=list)
    connection_errors: list[Any] = field(default_factory=list)
    clock_readings: list[Any] = field(default_factory=list)
    dtype_errors: list[Any] = field(default_factory=list)
    pair_speeds: list[Any] = field(default_factory=list)
    failures: list[Any] = field(default_factory=list)

    def save(self, folder: Path, rank: int) -> None:
        """Write the facts for the process that started the ranks."""
        (folder / f"{rank}{FILE_SUFFIX}").write_text(json.dumps(asdict(self)))


def load_facts(folder: Path) -> RankFacts:
    """The facts of all ranks of this host, merged."""
    files = sorted(folder.glob(f"*/*{FILE_SUFFIX}"))
    return merge_facts([RankFacts(**json.loads(path.read_text())) for path in files])


def merge_facts(facts: Sequence[RankFacts]) -> RankFacts:
    """For each rank, what any of the given facts has of it."""
    return RankFacts(
        **{each.name: _merge([getattr(one, each.name) for one in facts]) for each in fields(RankFacts)}
    )


def _merge(lists: Sequence[Sequence[Any]]) -> list[Any]:
    length = max(map(len, lists), default=0)
    padded = [[*values, *[None] * (length - len(values))] for values in lists]
    return [
        next((value for value in at_rank if value is not None), None) for at_rank in zip(*padded, strict=True)
    ]


class StoreGather:
    """An all-gather through the store, which works where nothing else does.

    Args:
        store: torch's key-value store.
        rank: this rank.
        world: how many ranks there are.
        seconds: how long to wait for the other ranks.
    """

    def __init__(self, store: Any, *, rank: int, world: int, seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._seconds = seconds

    def all_gather(self, name: str, own: Any) -> list[Any]:
        """Every rank's value, in rank order; None for a rank that has set none in time."""
        self._store.set(self._key(name, self._rank), json.dumps(own))
        until = time.monotonic() + self._seconds
        return [self._get(name, rank, until) for rank in range(self._world)]

    def _get(self, name: str, rank: int, until: float) -> Any:
        key = self._key(name, rank)
        # A timeout of zero would mean to wait without end.
        left = timedelta(seconds=max(0.1, until - time.monotonic()))
        try:
            self._store.wait([key], left)
        except RuntimeError:
            return None
        return json.loads(self._store.get(key))

    def _key(self, name: str, rank: int) -> str:
        return f"doctor/{name}/{rank}"


def main() -> None:
    """Gather what can be found out among the ranks, and write it down, also after an error."""
    rank = int(os.environ["RANK"])
    facts = RankFacts()
    try:
        _gather(facts)
    except Exception as error:
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        failure = {"stage": _stage(facts), "error": first_line, "host": socket.gethostname()}
        facts.failures = [*[None] * rank, failure]
    finally:
        facts.save(Path(os.environ[FOLDER]), rank)


def _gather(facts: RankFacts) -> None:
    """Go from step to step, as long as every rank takes part."""
    # Before the store starts threads: a fork of a process with threads may hang.
    own = gather_own_facts()
    _try_rendezvous()
    store, rank, world = rendezvous_from_environment(seconds=SECONDS)
    exchange = StoreGather(store, rank=rank, world=world, seconds=SECONDS)
    facts.software = exchange.all_gather("software", own)
    if None in facts.software:
        return
    with listening(own["address"]) as listener:
        facts.listeners = exchange.all_gather("listeners", listener)
        facts.connection_errors = exchange.all_gather("connections", connect_to_all(facts.listeners))
    if None in facts.connection_errors or any(map(any, facts.connection_errors)):
        return
    with gloo_group(store, rank=rank, world=world, seconds=SECONDS) as group:
        _gather_with_group(group, exchange, facts)


def _gather_with_group(group: Group, exchange: StoreGather, facts: RankFacts) -> None:
    facts.clock_readings = exchange.all_gather("clocks", read_clocks(group))
    dtype_errors = {backend: reduced_dtypes(backend, seconds=SECONDS) for backend in BACKENDS}
    facts.dtype_errors = exchange.all_gather("dtypes", dtype_errors)
    hosts = [each["host_id"] for each in facts.software]
    facts.pair_speeds = exchange.all_gather("pairs", measure_pairs(group.rank, hosts, seconds=SECONDS))


def _stage(facts: RankFacts) -> str:
    """What a rank was doing when it was stopped, by what it knew."""
    if not facts.software:
        return RENDEZVOUS
    return "using gloo" if facts.connection_errors else "connecting"


def _try_rendezvous() -> None:
    """Open a plain connection first: torch's store retries for minutes and does not say why."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if (tried := connect(address, port, retry_seconds=SECONDS)).problem is not None:
        here = socket.gethostname()
        raise ConnectionError(f"{here} cannot reach {address}:{port}, where ranks meet ({tried.problem})")


def gather_own_facts() -> dict[str, Any]:
    """What other ranks should know of this one."""
    software = gather_software()
    gloo = gather_network().gloo_address
    return {
        "host": socket.gethostname(),
        "host_id": host_id(),
        "address": None if gloo is None else gloo.address,
        "torch": software.torch,
        "paceline": software.paceline,
        "python": software.python,
    }


if __name__ == "__main__":
    main()
