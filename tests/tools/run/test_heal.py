"""Ranks that are lost while they train: the run goes on, and ends with the bits of a quiet run."""

import functools
import json
import re
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from running import Ran, paceline

from paceline.recording.healings import read_healings
from paceline.recording.ledger import read_ledger
from paceline.recording.ledger_check import check_ledger

SCRIPT = Path(__file__).parents[2] / "support" / "launcher_scripts" / "healed.py"
SECONDS = 90.0
STEPS = 27


def run(
    folder: Path,
    *arguments: str,
    plan: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    sends: Sequence[tuple[str, signal.Signals]] = (),
) -> Ran:
    """``paceline run`` of the script; ``plan`` says which rank is killed when."""
    shutil.copy(SCRIPT, folder)
    environment = {"PLAN": json.dumps(plan or {}), "OPTIONS": json.dumps(options or {})}
    return paceline(
        *("run", *arguments, SCRIPT.name),
        folder=folder,
        sends=sends,
        timeout=SECONDS,
        environment=environment,
    )


def results(ran: Ran) -> list[str]:
    """What each rank printed at its end."""
    return re.findall(r"rank \d of \d: .*", ran.stdout)


@functools.cache
def quiet() -> str:
    """Steps and sha256 of a run on one rank to which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        ran = run(Path(folder), "-n", "1")
    assert ran.code == 0, ran.stderr
    return results(ran)[0].partition(": ")[2]


def check_ended_well(ran: Ran, world: int) -> None:
    assert (ran.code, ran.left) == (0, []), ran.stderr
    assert sorted(results(ran)) == [f"rank {rank} of {world}: {quiet()}" for rank in range(world)]


def test_ranks_that_are_killed_in_any_phase_are_replaced(tmp_path: Path) -> None:
    plan = {
        "2 1": "data",
        "4 0": "forward",
        "6 2": "backward",
        "8 1": "reduction",
        "10 0": "between",
        "12 2": "optimizer",
        "14 1": "after optimizer",
        "16 0": "outside",
        "20 0": "forward",
        "-9 1": "healing",  # of what was lost in step 20
        "23 2": "forward",
        "23 1": "backward",  # two at once
    }
    ran = run(tmp_path, "--heal", "-n", "3", "--record", "record", "--ledger", plan=plan)
    check_ended_well(ran, 3)
    healings = read_healings(tmp_path / "record")
    lost = [(rank, why) for healing in healings for rank, why in healing.lost]
    assert sorted(lost) == sorted((int(when.split()[1]), "SIGKILL") for when in plan)
    assert check_ledger(read_ledger(tmp_path / "record")).is_right


def test_without_spares_the_others_go_on(tmp_path: Path) -> None:
    plan = {"3 0": "backward", "9 0": "optimizer"}
    ran = run(tmp_path, "--heal", "--spares", "0", "-n", "3", "--record", "record", "--ledger", plan=plan)
    check_ended_well(ran, 1)
    assert "rank 0 was lost (SIGKILL); the others go on without it" in ran.stderr
    assert check_ledger(read_ledger(tmp_path / "record")).is_right


def test_a_rank_that_dies_again_and_again_is_left_out(tmp_path: Path) -> None:
    ran = run(tmp_path, "--heal", "-n", "2", plan={"3 1": "forward"}, options={"dies at start": True})
    check_ended_well(ran, 1)
    assert ran.stderr.count("a spare process takes its place") == 3


def test_a_rank_that_is_stopped_for_too_long_is_replaced(tmp_path: Path) -> None:
    ran = run(tmp_path, "--heal", "--lost-after", "2", "-n", "2", plan={"5 0": "between stops"})
    check_ended_well(ran, 2)
    assert "rank 0 was lost (stopped by a signal for 2 s)" in ran.stderr


def test_workers_of_data_loaders_are_left_neither_by_lost_ranks_nor_by_others(tmp_path: Path) -> None:
    plan = {"4 1": "backward", "12 0": "optimizer"}
    ran = run(tmp_path, "--heal", "-n", "2", plan=plan, options={"workers": 1})
    check_ended_well(ran, 2)


def test_if_all_ranks_are_lost_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    plan = {"9 0": "optimizer", "9 1": "optimizer"}
    ran = run(tmp_path, "--heal", "--checkpoint", "saved", "--every", "2", "-n", "2", plan=plan)
    check_ended_well(ran, 2)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["training.pt"]


def test_after_the_launcher_was_killed_the_same_command_goes_on(tmp_path: Path) -> None:
    command = ("--heal", "--checkpoint", "saved", "--every", "4", "-n", "2")
    slow = {"pause": 0.1, "says": 9}
    killed = run(tmp_path, *command, options=slow, sends=[("says", signal.SIGKILL)])
    assert (killed.code, results(killed)) == (-signal.SIGKILL, [])
    ran = run(tmp_path, "--checkpoint", "saved", "-n", "1")
    check_ended_well(ran, 1)


def test_an_exception_is_not_healed_because_it_would_come_again(tmp_path: Path) -> None:
    ran = run(tmp_path, "--heal", "-n", "2", plan={"3 1": "between raises"})
    assert (ran.code, ran.left) == (1, [])
    assert "ValueError: a mistake in the script" in ran.stderr
    assert "takes its place" not in ran.stderr


def test_a_loss_after_the_optimizer_has_no_whole_state_without_a_checkpoint(tmp_path: Path) -> None:
    plan, options = {"5 1": "after optimizer"}, {"collective after optimizer": True}
    ran = run(tmp_path, "--heal", "-n", "2", plan=plan, options=options)
    assert (ran.code, ran.left) == (1, [])
    assert "Have no collective after optimizer.step()" in ran.stderr


def test_a_loss_after_the_optimizer_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    plan, options = {"5 1": "after optimizer"}, {"collective after optimizer": True}
    ran = run(
        tmp_path, "--heal", "--checkpoint", "saved", "--every", "2", "-n", "2", plan=plan, options=options
    )
    check_ended_well(ran, 2)
