"""What runs in each rank: it finds out what it can, with a deadline for every wait, and writes it down."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.comm.group import Group
from paceline.comm.probing import gloo_group, meet, reduced_dtypes
from paceline.comm.shm.neighbours import host_id
from paceline.diagnosis import clocks, network, pairs, ports, reach, software
from paceline.diagnosis.board import Board
from paceline.diagnosis.report import Report
from paceline.launching.worker import FOLDER

# So long ranks wait for each other: for one that is being started, or whose link is slow.
SECONDS = 15.0
BACKENDS = ("gloo", "paceline")


def main() -> None:
    """Examine what lies between this rank and the others."""
    rank = int(os.environ["RANK"])
    report = Report()
    stage = "meeting"
    try:
        # Before there are threads, which forks would be without.
        own = facts()
        _see_meeting_place()
        store, _, world = meet(seconds=SECONDS)
        board = Board(store, rank=rank, world=world, seconds=SECONDS)
        stage = "telling versions"
        report.facts = board.share("facts", own)
        stage = "connecting"
        _reach(board, report)
        if None not in report.facts and not any(any(problems or ["?"]) for problems in report.reached):
            stage = "using gloo"
            with gloo_group(store, rank=rank, world=world, seconds=SECONDS) as group:
                use(group, board, report)
    except Exception as error:
        words = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        report.problems = [None] * rank + [{"stage": stage, "words": words, "host": socket.gethostname()}]
    finally:
        report.save(Path(os.environ[FOLDER]), rank)


def _see_meeting_place() -> None:
    """Connect plainly first: torch's store tries again and again, and does not say why."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if (tried := ports.connect(address, port, patience=SECONDS)).problem is not None:
        here = socket.gethostname()
        raise ConnectionError(f"{here} cannot reach {address}:{port}, where ranks meet ({tried.problem})")


def facts() -> dict[str, Any]:
    """What others should know of this rank."""
    installed = software.gather()
    taken = network.gather().taken
    return {
        "host": socket.gethostname(),
        "host_id": host_id(),
        "address": None if taken is None else taken.address,
        "torch": installed.torch,
        "paceline": installed.paceline,
        "python": installed.python,
    }


def _reach(board: Board, report: Report) -> None:
    own = report.facts[int(os.environ["RANK"])]
    with reach.listening(own["address"]) as place:
        report.places = board.share("places", place)
        report.reached = board.share("reached", reach.try_all(report.places))


def use(group: Group, board: Board, report: Report, *, clock: Callable[[], float] | None = None) -> None:
    """Find out what takes a group that works."""
    looks = clocks.look(group) if clock is None else clocks.look(group, clock=clock)
    report.looks = board.share("looks", looks)
    refused = {backend: reduced_dtypes(backend, seconds=SECONDS) for backend in BACKENDS}
    report.dtypes = board.share("dtypes", refused)
    hosts = [fact["host_id"] for fact in report.facts]
    report.measured = board.share("measured", pairs.measure(group.rank, hosts, seconds=SECONDS))


if __name__ == "__main__":
    main()
