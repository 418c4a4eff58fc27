"""What runs in each rank: it finds out what it can, with a deadline for every wait, and writes it down."""

import os
import socket
from pathlib import Path
from typing import Any

from paceline.comm.group import Group
from paceline.comm.probing import reduced_dtypes
from paceline.comm.rendezvous import gloo_group, rendezvous_from_environment
from paceline.comm.shm.local_ranks import host_id
from paceline.tools.doctor import clocks, network, pairs, ports, reach, software
from paceline.tools.doctor.board import Board
from paceline.tools.doctor.report import MEETING, Report
from paceline.tools.run.worker import FOLDER

# So long ranks wait for each other: for one that is being started, or whose link is slow.
SECONDS = 20.0
BACKENDS = ("gloo", "paceline")


def main() -> None:
    """Examine what lies between this rank and the others."""
    rank = int(os.environ["RANK"])
    report = Report()
    try:
        _examine(report)
    except Exception as error:
        problem = {"stage": _stage(report), "words": _words(error), "host": socket.gethostname()}
        report.problems = [*[None] * rank, problem]
    finally:
        report.save(Path(os.environ[FOLDER]), rank)


def _examine(report: Report) -> None:
    """Go on as long as every rank does."""
    # Before there are threads, which forks would be without.
    own = facts()
    _see_meeting_place()
    store, rank, world = rendezvous_from_environment(seconds=SECONDS)
    board = Board(store, rank=rank, world=world, seconds=SECONDS)
    report.facts = board.share("facts", own)
    if None in report.facts:
        return
    with reach.listening(own["address"]) as place:
        report.places = board.share("places", place)
        report.reached = board.share("reached", reach.try_all(report.places))
    if None in report.reached or any(map(any, report.reached)):
        return
    with gloo_group(store, rank=rank, world=world, seconds=SECONDS) as group:
        _use(group, board, report)


def _stage(report: Report) -> str:
    """What a rank was about when it was stopped, by what it knew."""
    if not report.facts:
        return MEETING
    return "using gloo" if report.reached else "connecting"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


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


def _use(group: Group, board: Board, report: Report) -> None:
    """Find out what takes a group that works."""
    report.looks = board.share("looks", clocks.look(group))
    refused = {backend: reduced_dtypes(backend, seconds=SECONDS) for backend in BACKENDS}
    report.dtypes = board.share("dtypes", refused)
    hosts = [fact["host_id"] for fact in report.facts]
    report.measured = board.share("measured", pairs.measure(group.rank, hosts, seconds=SECONDS))


if __name__ == "__main__":
    main()
