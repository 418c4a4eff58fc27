"""The healings of a run: what was written is read again, and training goes on if it cannot be written."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import RecordingError
from paceline.recording.healings import Healing, healings_file, read_healings, write_healing
from paceline.recording.ledger import LedgerWriter
from paceline.recording.reader import delete_recording

FIRST = Healing(1, 812, 4, [(2, "SIGKILL")], 1_700_000_000_000_000_000, 0.7)
SECOND = replace(FIRST, generation=2, world=3, lost=[(0, "not heard of for 30 s"), (3, "é\n\x1b")])


def test_what_was_written_is_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert read_healings(folder) == []
    for each in (FIRST, SECOND):
        write_healing(folder, each)
    assert read_healings(folder) == [FIRST, SECOND]
    assert stat.S_IMODE(healings_file(folder).stat().st_mode) == 0o600


def test_half_a_last_line_is_left_out_and_written_over(tmp_path: Path) -> None:
    for each in (FIRST, SECOND):
        write_healing(tmp_path, each)
    path = healings_file(tmp_path)
    os.truncate(path, path.stat().st_size - 5)
    assert read_healings(tmp_path) == [FIRST]
    write_healing(tmp_path, SECOND)
    assert read_healings(tmp_path) == [FIRST, SECOND]


@pytest.mark.parametrize("change", [{"step": -1}, {"world": "4"}, {"lost": [[2]]}, {"lost": [["2", "x"]]}])
def test_other_damage_is_an_error_that_names_file_and_line(tmp_path: Path, change: dict[str, object]) -> None:
    write_healing(tmp_path, FIRST)
    write_healing(tmp_path, replace(FIRST, **change))
    with pytest.raises(RecordingError, match=r"healings\.jsonl, line 2: "):
        read_healings(tmp_path)


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-1", "1" + "0" * 400, '"1"', "null"])
def test_a_duration_that_is_none_is_damage(tmp_path: Path, seconds: str) -> None:
    write_healing(tmp_path, FIRST)
    path = healings_file(tmp_path)
    path.write_text(path.read_text().replace("0.7", seconds))
    with pytest.raises(RecordingError, match=r"healings\.jsonl, line 1: "):
        read_healings(tmp_path)


@pytest.mark.parametrize("target", ["kept", "missing"])
def test_nothing_is_written_or_read_through_a_link(tmp_path: Path, target: str) -> None:
    (tmp_path / "kept").write_text("mine")
    healings_file(tmp_path).symlink_to(tmp_path / target)
    with pytest.warns(RuntimeWarning, match="a healing is not recorded"):
        write_healing(tmp_path, FIRST)
    with pytest.raises(RecordingError, match=r"healings\.jsonl"):
        read_healings(tmp_path)
    assert (tmp_path / "kept").read_text() == "mine"


def test_a_folder_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="a healing is not recorded"):
        write_healing(tmp_path / "file", FIRST)


def test_healings_and_ledgers_of_an_earlier_run_are_deleted(tmp_path: Path) -> None:
    write_healing(tmp_path, FIRST)
    LedgerWriter(tmp_path, rank=0).close()
    for kept in ("ledger.jsonl", "other.jsonl"):
        (tmp_path / kept).touch()
    delete_recording(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ledger.jsonl", "other.jsonl"]
