"""Ranks that are lost while they train: the run goes on, and ends with the bits of a quiet run."""

from pathlib import Path

from healed_runs import check_ended_well, heal

from paceline.recording.healings import read_healings
from paceline.recording.ledger import read_ledger
from paceline.recording.ledger_check import check_ledger


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
    ran = heal(tmp_path, "--heal", "-n", "3", "--record", "record", "--ledger", plan=plan)
    check_ended_well(ran, 3)
    healings = read_healings(tmp_path / "record")
    lost = [(rank, why) for healing in healings for rank, why in healing.lost]
    assert sorted(lost) == sorted((int(when.split()[1]), "SIGKILL") for when in plan)
    assert check_ledger(read_ledger(tmp_path / "record")).is_right


def test_a_rank_that_is_stopped_for_too_long_is_replaced(tmp_path: Path) -> None:
    ran = heal(tmp_path, "--heal", "--lost-after", "2", "-n", "2", plan={"5 0": "between stops"})
    check_ended_well(ran, 2)
    assert "rank 0 was lost (stopped by a signal for 2 s)" in ran.stderr


def test_an_exception_is_not_healed_because_it_would_come_again(tmp_path: Path) -> None:
    ran = heal(tmp_path, "--heal", "-n", "2", plan={"3 1": "between raises"})
    assert (ran.code, ran.left) == (1, [])
    assert "ValueError: a mistake in the script" in ran.stderr
    assert "takes its place" not in ran.stderr
