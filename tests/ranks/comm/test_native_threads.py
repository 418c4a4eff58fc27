"""A process that exits while gloo's threads still have something to do ends well."""

import subprocess
import sys

# The thread that runs the collective has the only reference to it, and needs the interpreter once for each
# tensor. The loop leaves it none.
EXITS_AT_ONCE = """
import sys, time
import torch
from torch import distributed
import paceline

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
tensors = [torch.ones(1) for _ in range(2000)]
sys.setswitchinterval(100)
distributed.group.WORLD.allreduce_coalesced(tensors)
until = time.monotonic() + 0.2
while time.monotonic() < until:
    pass
"""


def test_the_interpreter_exits_after_gloos_threads_have_dropped_their_works() -> None:
    done = subprocess.run([sys.executable, "-c", EXITS_AT_ONCE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
