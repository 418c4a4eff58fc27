"""Files are for their owner only, and nothing is written or read through what others put in their place."""

import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recordings import Run, write

from paceline.errors import RecordingError
from paceline.recording.files import MOST_BYTES, make_folder, new_file, read_file, write_file
from paceline.recording.reader import delete_recording, read_recording
from paceline.recording.ring_buffer import RingBuffer
from paceline.recording.rows import row_width


@pytest.fixture(params=[0o000, 0o022, 0o377], ids="umask {:o}".format)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_recordings_and_new_folders_are_for_their_owner_only(tmp_path: Path) -> None:
    folder = write(Run(ranks=1, steps=3), tmp_path / "new" / "folder")
    assert [mode(each) for each in (folder.parent, folder)] == [0o700, 0o700]
    assert {mode(each) for each in folder.iterdir()} == {0o600}


def test_the_mode_of_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    make_folder(tmp_path / "link")
    assert mode(tmp_path) == 0o755
    assert read_recording(write(Run(ranks=1, steps=3), tmp_path / "link"))


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for name in ("file", "dangling"):
        with pytest.raises(NotADirectoryError, match=name):
            make_folder(tmp_path / name)


def test_an_error_names_the_file_that_was_to_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, words in (
        (tmp_path / "missing" / "page.html", f"no such folder (file: {tmp_path}/missing/page.html, folder: "),
        (tmp_path / "file" / "page.html", f"Not a directory: '{tmp_path}/file/page.html'"),
    ):
        with pytest.raises(OSError, match=re.escape(words)) as raised:
            write_file(path, b"x")
        assert ".part" not in str(raised.value)


@pytest.mark.parametrize("target", ["kept", "missing"])
def test_nothing_is_written_through_a_link(tmp_path: Path, target: str) -> None:
    (tmp_path / "kept").write_text("mine")
    link = tmp_path / "link.rows"
    link.symlink_to(tmp_path / target)
    makers: list[Callable[[], object]] = [
        lambda: write_file(link, b"x"),
        lambda: RingBuffer(row_width(1), link),
    ]
    for make in makers:
        with pytest.raises(OSError, match=r"link\.rows is a symbolic link, and is not replaced"):
            make()
    assert (tmp_path / "kept").read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept", "link.rows"]


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="fifo is no regular file"):
        write_file(tmp_path / "fifo", b"x")


def test_a_rank_whose_files_are_links_records_in_memory(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    (tmp_path / "rank0-wrapper0-plan0.rows").symlink_to(tmp_path / "kept")
    with pytest.warns(RuntimeWarning, match="recorded in .* but in memory.*is a symbolic link"):
        write(Run(ranks=1, steps=3), tmp_path)
    assert (tmp_path / "kept").read_text() == "mine"


def test_of_an_earlier_recording_links_are_deleted_and_not_what_they_point_to(tmp_path: Path) -> None:
    kept, folder = tmp_path / "kept", tmp_path / "run"
    kept.write_text("mine")
    write(Run(ranks=1, steps=3), folder)
    (folder / "rank0-wrapper0-plan0.rows").unlink()
    (folder / "rank0-wrapper0-plan0.rows").symlink_to(kept)
    (folder / "rank1-wrapper0-plan0.json").symlink_to(kept)
    (folder / "rank2-wrapper0-plan0.json").mkdir()
    delete_recording(folder)
    assert [each.name for each in folder.iterdir()] == ["rank2-wrapper0-plan0.json"]
    assert kept.read_text() == "mine"


def test_where_there_is_no_folder_nothing_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "none"):
        delete_recording(tmp_path / name)
    assert (tmp_path / "file").exists()


def test_a_file_that_could_not_be_finished_leaves_nothing(tmp_path: Path) -> None:
    write_file(tmp_path / "page", b"old")
    with pytest.raises(ZeroDivisionError), new_file(tmp_path / "page"):
        raise ZeroDivisionError
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("page", "old")]


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    place = os.open(path.parent, os.O_RDONLY)  # the whole path may be too long for a socket's name
    try:
        with socket.socket(socket.AF_UNIX) as each:
            each.bind(f"/proc/self/fd/{place}/{path.name}")
    finally:
        os.close(place)


def put_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_endless(path: Path) -> None:
    path.touch()
    os.truncate(path, MOST_BYTES + 1)


@pytest.mark.parametrize("put", [put_fifo, put_socket, Path.mkdir, put_link, put_endless])
@pytest.mark.parametrize("suffix", ["json", "rows"])
def test_what_is_no_regular_file_is_an_error_that_names_it(
    tmp_path: Path, put: Callable[[Path], None], suffix: str
) -> None:
    write(Run(ranks=1, steps=3), tmp_path)
    path = tmp_path / f"rank0-wrapper0-plan1.{suffix}"
    path.unlink()
    put(path)
    with pytest.raises(RecordingError, match=path.name):
        read_recording(tmp_path)


def test_the_limit_is_told(tmp_path: Path) -> None:
    put_endless(tmp_path / "file")
    with pytest.raises(OSError, match=rf"it has {MOST_BYTES + 1} bytes, and at most {MOST_BYTES} are read"):
        read_file(tmp_path / "file")
