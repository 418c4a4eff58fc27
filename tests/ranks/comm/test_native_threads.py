"""A process that exits while gloo's threads still have something to do ends well."""

import subprocess
import sys

from running import EXITS_AT_ONCE


def test_the_interpreter_exits_after_gloos_threads_have_dropped_their_works() -> None:
    program = "import paceline" + EXITS_AT_ONCE
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
