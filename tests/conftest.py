import os
import signal
from collections.abc import Iterator

import pytest

from paceline.testing import RankPool

# Some virtual machines claim to have AMX and have not: there torch's own products of bfloat16 end by SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# A shell that starts the tests in the background has them ignore interrupts, and some tests send one.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pid(_: int) -> int:
    return os.getpid()


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Two kept ranks, for tests that make many small calls and leave the process group as they found it."""
    with RankPool(2) as pool:
        # Started here, so that no test sees them appear.
        pool.run(pid)
        yield pool
