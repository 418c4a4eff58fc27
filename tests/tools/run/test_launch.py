"""Functions on ranks: sent by value, with their results and errors sent back."""

import asyncio
import contextlib
import io
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from running import TIMEOUT, without_gloos

import paceline
from paceline.testing import run_ranks


def test_a_function_of_a_running_event_loop_runs_on_ranks() -> None:
    class Sent:
        """Of a function's inside, so that it can only travel by value."""

        def __init__(self, value: object) -> None:
            self.value = value

    def work(first: int, *, second: Sent) -> Sent:
        import torch

        sys.stdout.write(f"second {second.value}\n")
        torch.distributed.init_process_group("gloo")
        total = torch.full((2,), float(first + torch.distributed.get_rank()))
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        return Sent((total.tolist(), os.environ["RANK"]))

    async def in_a_loop() -> list[Sent]:
        return paceline.launch(work, 2, args=(5,), kwargs={"second": Sent("s")})

    printed = io.StringIO()
    handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    with contextlib.redirect_stdout(printed):
        results = asyncio.run(in_a_loop())
    assert [result.value for result in results] == [([11.0, 11.0], "0"), ([11.0, 11.0], "1")]
    assert all(type(result).__name__ == "Sent" for result in results)
    assert sorted(without_gloos(printed.getvalue()).splitlines()) == ["[0] second s", "[1] second s"]
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == handlers


def raises() -> Callable[[], None]:
    def work() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("own")
        threading.Event().wait()

    return work


def test_the_first_error_is_raised_with_its_traceback_and_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(paceline.LaunchError, match="rank 1 failed") as raised:
        paceline.launch(raises())
    assert list(tmp_path.iterdir()) == []
    assert isinstance(raised.value, RuntimeError)
    assert 'raise ValueError("own")' in str(raised.value)
    assert str(raised.value).endswith("ValueError: own\nrank 0: stopped")


def test_what_cannot_be_sent_is_said() -> None:
    with pytest.raises(TypeError, match="fn and its arguments must be picklable"):
        paceline.launch(print, args=(threading.Lock(),))
    with pytest.raises(paceline.LaunchError, match=r"the result must be picklable.*\(type: lock\)"):
        paceline.launch(lambda: threading.Lock(), 1)
    with pytest.raises(paceline.LaunchError, match=r"rank 0 exited before fn returned \(exit code: 0\)"):
        paceline.launch(sys.exit, 1)
    with pytest.raises(paceline.OptionError, match=r"at least one rank is needed \(n: 0\)"):
        paceline.launch(print, 0)


def test_ctrl_c_ends_the_ranks_and_is_passed_on(tmp_path: Path) -> None:
    [raised] = run_ranks(interrupted, 1, args=(tmp_path,), backend=None, timeout=TIMEOUT)
    assert raised == "KeyboardInterrupt"


def interrupted(_: int, folder: Path) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    caller = os.getpid()

    def work() -> None:
        os.kill(caller, signal.SIGINT)
        threading.Event().wait()

    try:
        paceline.launch(work, 1, log_dir=folder)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "nothing"
