"""How files of a recording, and of the report, are written and opened.

Note [Files of others]. A folder for recordings may be one that others can write to, such as one in /tmp. So
nothing is written, truncated or deleted through a symbolic link that somebody put there: a file is made under
a new name that cannot be guessed, and renamed. Only regular files are opened, because a FIFO would block the
reader for ever and a device may have no end. The folder itself may be a link: its user has named it.

A recording tells what a program computes, so only its owner can read it, whatever the umask is.
"""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import RecordingError

# More than this is not read from one file. A recording of 100,000 parameters, each with a bucket of its own,
# has 51 MB of rows.
MOST_BYTES = 64 << 20

_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_EXISTING_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OWNER_ONLY_FILE = 0o600
_OWNER_ONLY_FOLDER = 0o700


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A new file, for its owner only, which gets its name when the block ends without an exception.

    Yields:
        Its descriptor, which is closed at the end of the block.

    Raises:
        OSError: the file cannot be made, or there is something at the path that is not a regular file.
    """
    _check_replaceable(path)
    unfinished = path.with_name(f".paceline-{secrets.token_hex(8)}.part")
    try:
        file = os.open(unfinished, _NEW_FILE, _OWNER_ONLY_FILE)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the file cannot be made, because there is no such folder (file: {path}, folder: {path.parent})"
        ) from error
    except OSError as error:  # it names a file that the user does not know
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        with contextlib.suppress(PermissionError):  # some file systems have no modes
            os.fchmod(file, _OWNER_ONLY_FILE)
        yield file
        unfinished.replace(path)  # in one move, so that nobody reads half of it
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    finally:
        os.close(file)


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file, for its owner only; see ``new_file``."""
    with new_file(path) as file, os.fdopen(file, "wb", closefd=False) as stream:
        stream.write(content)


def create_file(path: Path) -> int:
    """Make a file to append to, for its owner only; returns its descriptor.

    Raises:
        OSError: the file cannot be made, or there is something at the path.
    """
    file = os.open(path, _NEW_FILE | os.O_APPEND, _OWNER_ONLY_FILE)
    with contextlib.suppress(PermissionError):  # some file systems have no modes
        os.fchmod(file, _OWNER_ONLY_FILE)
    return file


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, for their owner only; a folder that exists stays as it is."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another rank has just made it
            each.mkdir(_OWNER_ONLY_FOLDER)
            each.chmod(_OWNER_ONLY_FOLDER)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def open_file(path: Path, most_bytes: int = MOST_BYTES) -> int:
    """Open a regular file to read it; returns its descriptor.

    Raises:
        OSError: it cannot be opened, is no regular file, or has more bytes than this.
    """
    file = os.open(path, _EXISTING_FILE)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is not a regular file")
        if found.st_size > most_bytes:
            raise OSError(f"it has {found.st_size} bytes, and at most {most_bytes} are read")
    except BaseException:
        os.close(file)
        raise
    return file


def read_file(path: Path) -> bytes:
    """The content of a regular file; raises as ``open_file`` does."""
    with os.fdopen(open_file(path), "rb") as stream:
        content = stream.read(MOST_BYTES + 1)  # it may have grown meanwhile
    if len(content) > MOST_BYTES:
        raise OSError(f"it has more than {MOST_BYTES} bytes, which is the most that is read")
    return content


def read_json_lines(path: Path, act: Callable[[Any], object], *, most_bytes: int = MOST_BYTES) -> None:
    """Call ``act`` with what each line of a file has; a last line that was cut off is left out.

    Raises:
        RecordingError: the file cannot be read, or ``act`` has raised ValueError.
    """
    number = 0
    try:
        with os.fdopen(open_file(path, most_bytes), "rb") as file:
            for line in file:
                number += 1
                if line.endswith(b"\n"):
                    act(json.loads(line))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordingError(f"the file is damaged ({path}, line {number}: {error})") from error


def _check_replaceable(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
        raise OSError(f"{path} is {kind}, and is not replaced")
