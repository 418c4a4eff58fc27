"""One test of the suite, on one rank."""

import os
import sys
import unittest
from datetime import timedelta
from pathlib import Path

import standins
import suite
import torch.distributed
import wrappers
from suite import common_utils, distributed_test

GROUP_SECONDS = 30


def run_test(rank: int, name: str, wrapper: str, directory: Path) -> str | None:
    """Run a test as torch's runner would; returns why it was skipped, None if it was not."""
    _write_to(directory / f"log-{rank}")
    _give_directories(directory)
    test = suite.Suite(name)
    # The decorators only leave a note; unittest's runner, which is not used here, would act on it.
    if getattr(getattr(suite.Suite, name), "__unittest_skip__", False):
        return getattr(suite.Suite, name).__unittest_skip_why__
    standins.install(rank)
    wrappers.put_in_place(wrapper, rank=rank, directory=directory)
    test.rank, test.file_name = rank, str(directory / "group")
    _open_group(test, name)
    common_utils.set_rng_seed()
    return _reason_to_skip(test, name)


def _write_to(log: Path) -> None:
    """Keep what the test prints out of the runner's own lines."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _give_directories(directory: Path) -> None:
    for name in ("barrier", "test_dir", "init_dir"):
        (directory / name).mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = str(directory)
    os.environ["INIT_METHOD"] = f"file://{directory}/init_dir/shared_init_file"


def _open_group(test: suite.Suite, name: str) -> None:
    seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(name, GROUP_SECONDS)
    torch.distributed.init_process_group(
        suite.ENVIRONMENT["BACKEND"],
        init_method=test.init_method,
        world_size=suite.WORLD,
        rank=test.rank,
        timeout=timedelta(seconds=seconds),
    )


def _reason_to_skip(test: suite.Suite, name: str) -> str | None:
    """Call the test, which may find that it is to be skipped."""
    try:
        getattr(test, name)()
    except unittest.SkipTest as skip:
        return str(skip)
    except SystemExit as end:
        if (message := suite.skip_message(end.code)) is None:
            raise
        return message
    return None
