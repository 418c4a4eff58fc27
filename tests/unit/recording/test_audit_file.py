"""The file of an audit: what was written is read again, and nothing else is."""

import os
import stat
from pathlib import Path

import pytest

from paceline.errors import RecordingError
from paceline.recording import audit_file
from paceline.recording.audit_file import AuditWriter, audit_files, read_audit_file


def write(folder: Path, rank: int = 0) -> Path:
    writer = AuditWriter(folder, rank=rank, wrapper=0)
    writer.write_layout([["a", "b"], []])
    writer.write_step(0, 0, digest=b"d" * 8, options=b"o" * 8, hashes=[-(2**63), 2**63 - 1])
    writer.write_step(1, 1, digest=b"e" * 8, options=b"o" * 8)
    writer.write_finding("replicas differ: é")
    writer.close()
    return folder / f"rank{rank}-wrapper0.audit"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    found = read_audit_file(write(tmp_path, 3))
    assert (found.rank, found.wrapper, found.findings) == (3, 0, ["replicas differ: é"])
    assert [step.step for step in found.steps] == [0, 1]
    assert found.steps[0].hashes == {"a": -(2**63), "b": 2**63 - 1}
    assert found.steps[1].hashes == {}


def test_only_its_owner_can_read_it_and_links_are_not_followed(tmp_path: Path) -> None:
    assert stat.S_IMODE(write(tmp_path).stat().st_mode) == 0o600
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "rank1-wrapper0.audit").symlink_to(target)
    write(tmp_path, 1)
    assert target.read_text() == "precious"


def test_a_record_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path)
    os.truncate(path, path.stat().st_size - 3)
    assert read_audit_file(path).findings == []
    assert len(read_audit_file(path).steps) == 2


@pytest.mark.parametrize("content", [b"", b"something else", audit_file.MAGIC + b"\x09\0\0\0\0"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank0-wrapper0.audit"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="cannot be read"):
        read_audit_file(path)


def test_a_long_file_has_digests_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_file, "_MOST_BYTES", 100)
    writer = AuditWriter(tmp_path, rank=0, wrapper=0)
    assert writer.wants_hashes
    writer.write_layout([["a" * 100]])
    assert not writer.wants_hashes
    writer.write_step(7, 0, digest=b"d" * 8, options=b"o" * 8)
    writer.close()
    assert [each.step for each in read_audit_file(tmp_path / "rank0-wrapper0.audit").steps] == [7]


def test_a_folder_that_cannot_be_written_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = AuditWriter(tmp_path / "file", rank=0, wrapper=0)
    writer.write_layout([])
    assert not writer.wants_hashes


def test_files_come_by_rank(tmp_path: Path) -> None:
    for rank in (10, 2):
        write(tmp_path, rank)
    (tmp_path / "other.audit").touch()
    assert [path.name for path in audit_files(tmp_path)] == ["rank2-wrapper0.audit", "rank10-wrapper0.audit"]
