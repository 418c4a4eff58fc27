"""The program that the command ``paceline`` starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import paceline_command

SECONDS = 20
COMMAND = "import paceline_command; paceline_command.main()"
# Takes long to import, as torch does; and nothing that is raised then reaches its caller, as in numpy.
TORCH = """
import time
try:
    print("up", flush=True)
    time.sleep(60)
except BaseException:
    raise ImportError
"""


def start(folder: Path, text: str) -> "subprocess.Popen[str]":
    """Start the command with a torch that consists of ``text``."""
    (folder / "torch.py").write_text(text)
    path = f"{folder}:{Path(paceline_command.__file__).parent}"
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_while_torch_is_imported_ends_the_command_without_a_word(tmp_path: Path) -> None:
    with start(tmp_path, TORCH) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "up\n"
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=SECONDS) == ("", "")
        assert command.returncode == 130


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler], ids=["nohup", "python"])
def test_a_handler_of_sigint_stays(handler: signal.Handlers, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("paceline.tools.main.main", lambda: seen.append(signal.getsignal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, handler)
    try:
        paceline_command.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [handler]
