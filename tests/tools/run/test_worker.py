"""What a rank does by itself, without whoever starts it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.tools.run import worker

SECONDS = 20


@contextmanager
def start(folder: Path, text: str) -> "Iterator[subprocess.Popen[str]]":
    (folder / "script.py").write_text(text)
    command = [sys.executable, "-u", worker.__file__, "--script", "script.py"]
    environment = os.environ | {"RANK": "0", worker.FOLDER: str(folder)}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as rank:
        try:
            yield rank
        finally:
            rank.kill()


def test_a_rank_that_waits_in_c_is_ended_all_the_same(tmp_path: Path) -> None:
    text = """
import ctypes
lock = ctypes.CDLL(None).pthread_mutex_lock
mutex = ctypes.create_string_buffer(64)
lock(mutex)
print("up")
lock(mutex)
"""
    with start(tmp_path, text) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "up\n"
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(SECONDS) == worker.EXIT_SIGTERM


DROPS = """
import time
for time_ in range({times}):
    try:
        if time_ == 0:
            print("up")
        time.sleep(60)
    except BaseException:
        pass
"""
GOES_ON = """
import atexit
import time
atexit.register(print, "exit handler")
import drops
time.sleep(60)
"""
DELETES = """
import atexit
import time
atexit.register(print, "exit handler")
class Slow:
    def __del__(self):
        print("up")
        time.sleep(60)
Slow()
time.sleep(60)
"""
SAVES = """
import time
def save():
    time.sleep(3)
    print("saved")
try:
    import drops
finally:
    save()
"""


@pytest.mark.parametrize(
    ("text", "times", "printed"),
    [
        (GOES_ON, 1, "exit handler\n"),
        (GOES_ON, 9, ""),
        (DELETES, 0, "exit handler\n"),
        (SAVES, 0, "saved\n"),
    ],
    ids=["an import once", "an import each time", "del", "nobody, while the script saves"],
)
def test_sigterm_ends_a_rank_whose_libraries_drop_the_exit(
    text: str, times: int, printed: str, tmp_path: Path
) -> None:
    (tmp_path / "drops.py").write_text(
        DROPS.format(times=times) if times else "import time\nprint('up')\ntime.sleep(60)"
    )
    with start(tmp_path, text) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "up\n"
        rank.send_signal(signal.SIGTERM)
        assert rank.communicate(timeout=SECONDS)[0] == printed
        assert rank.returncode == worker.EXIT_SIGTERM


def test_a_script_that_catches_sigterms_exit_may_save(tmp_path: Path) -> None:
    text = "import time\ntry:\n    print('up')\n    time.sleep(60)\nexcept SystemExit:\n    pass\n"
    with start(tmp_path, f"{text}time.sleep(2)\nprint('saved')") as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "up\n"
        rank.send_signal(signal.SIGTERM)
        assert rank.communicate(timeout=SECONDS)[0] == "saved\n"
        assert rank.returncode == 0


@pytest.mark.parametrize(
    ("raises", "kinds"),
    [
        ("raise ValueError('own')", ["ValueError"]),
        ("try:\n    1 / 0\nfinally:\n    raise ValueError", ["ZeroDivisionError"]),
        ("raise ValueError from OSError()", ["OSError"]),
        ("try:\n    1 / 0\nexcept Exception:\n    raise ValueError from None", ["ValueError"]),
        ("raise ExceptionGroup('two', [ValueError(), KeyError()])", ["ValueError", "KeyError"]),
        ("a = ValueError(); b = OSError(); a.__cause__ = b; b.__cause__ = a; raise a", ["OSError"]),
    ],
    ids=["plain", "context", "cause", "from none", "group", "circle"],
)
def test_a_note_says_what_an_error_began_with(raises: str, kinds: list[str]) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - any kind of error can be noted
        exec(raises, {})
    report = worker.error_report(raised.value)
    assert [origin["types"][0] for origin in report["origins"]] == [f"builtins.{kind}" for kind in kinds]
    assert json.loads(json.dumps(report)) == report


def test_a_hook_of_the_scripts_own_is_told(tmp_path: Path) -> None:
    text = (
        "import sys\nsys.excepthook = lambda _, error, trace: print('hook', error)\nraise ValueError('own')"
    )
    with start(tmp_path, text) as rank:
        assert rank.communicate(timeout=SECONDS)[0] == "hook own\n"
    assert rank.returncode == 1
    assert json.loads((tmp_path / "0.json").read_text())["message"] == "own"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(3), 3),
        (SystemExit(-1), 255),
        (SystemExit("words"), 1),
        (KeyboardInterrupt(), 130),
        (OSError(), 1),
    ],
    ids=repr,
)
def test_a_note_has_the_exit_code_that_python_gives(error: BaseException, code: int) -> None:
    assert worker.error_report(error)["code"] == code
