"""PyTorch's own distributed tests, as the installed torch carries them.

Importing this module imports them, so their surroundings are set here first: they read the backend and the
world size from the environment, at import as well as at run time.
"""

import os
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

WORLD = 2
ENVIRONMENT = {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}

# How the reasons begin for which torch's developers have switched a test off: it fails at times on their
# machines. Whether it passes here is for a run to say.
SWITCHED_OFF = (
    "https://github.com/pytorch/pytorch/",
    "Test is failing",
    "Currently failing in",
    "Skipped due to flakiness",
)


def _stand_in_for_expecttest() -> ModuleType:
    """torch's test base class derives from this package's; no test of this suite uses what that adds."""
    module = ModuleType("expecttest")
    module.TestCase = unittest.TestCase
    return module


@contextmanager
def _tests_switched_on() -> Iterator[None]:
    """Do not skip what is only switched off. The decorators do their work while the tests are imported."""
    with ExitStack() as stack:
        for owner, name in (
            (unittest, "skip"),
            (unittest, "skipIf"),
            (common_utils, "skip_but_pass_in_sandcastle"),
            (common_utils, "skip_but_pass_in_sandcastle_if"),
        ):
            stack.enter_context(mock.patch.object(owner, name, _unless_switched_off(getattr(owner, name))))
        yield


def _unless_switched_off(skip: Callable[..., Any]) -> Callable[..., Any]:
    """As the decorator ``skip``, whose last argument is the reason."""
    return lambda *args: (lambda test: test) if args[-1].startswith(SWITCHED_OFF) else skip(*args)


os.environ.update(ENVIRONMENT)
sys.modules.setdefault("expecttest", _stand_in_for_expecttest())

from torch.testing._internal import common_distributed, common_utils  # noqa: E402 - see the top

with _tests_switched_on():
    from torch.testing._internal.distributed import distributed_test


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Every test of the suite as a method of one class, as torch's own test files put them together."""


def test_names() -> list[str]:
    """The ids of all tests, in alphabetical order."""
    return sorted(name for name in dir(Suite) if name.startswith("test_"))


def skip_message(exit_code: object) -> str | None:
    """What it means that a test left with this exit code, if that is how torch's decorators skip a test."""
    messages = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
    return messages.get(exit_code)
