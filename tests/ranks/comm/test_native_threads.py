"""A process that exits while gloo's threads still have something to do ends well."""

import subprocess
import sys
import threading

from running import EXITS_AT_ONCE

from paceline.comm import native_threads
from paceline.testing import run_ranks


def test_the_interpreter_exits_after_gloos_threads_have_dropped_their_works() -> None:
    program = "import paceline" + EXITS_AT_ONCE
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def waits_for_itself(rank: int) -> bool:  # noqa: ARG001
    return str(threading.get_native_id()) in {task.name for task in native_threads._native_threads()}


def test_a_forked_process_does_not_wait_for_its_own_thread() -> None:
    assert run_ranks(waits_for_itself, 1, timeout=60) == [False]
