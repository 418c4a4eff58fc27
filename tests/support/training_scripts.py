"""The scripts of conformance/same_script, run on fresh ranks with the environment that torchrun would give.

On machines without an accelerator torch's mixed precision and its optimizers in backward raise, because there
is no stream. There torch, and torch only, gets streams and events that do nothing.
"""

import os
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, distributed

from paceline.testing import run_ranks

SCRIPTS = Path(__file__).parents[1] / "conformance/same_script/scripts"
TORCHS = "from torch.nn.parallel import DistributedDataParallel\n"
OURS = "from paceline.nn.parallel import DistributedDataParallel\n"
# What the script has defined, kept until its process ends: torch's wrapper can hang or abort when it is freed
# after its group was closed.
NAMES: dict[str, Any] = {}


class NullStream:
    """A stream, or an event on one, where everything happens at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait_stream(self, stream: object) -> None: ...


def null_streams() -> AbstractContextManager[object]:
    if torch.accelerator.is_available():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(mock.patch("torch.Stream", NullStream))
    stack.enter_context(mock.patch("torch.Event", NullStream))
    stack.enter_context(mock.patch("torch.accelerator.current_stream", NullStream))
    return stack


def program(rank: int, script: Path, wrapper: str, environ: dict[str, str], directory: Path) -> None:
    """What ``python script directory`` would do."""
    os.environ.update(environ, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv[:] = [str(script), str(directory)]
    sys.path.insert(0, str(script.parent))
    NAMES.update(__name__="__main__", __file__=str(script))
    text = script.read_text()
    assert text.count(TORCHS) == 1
    if wrapper == "paceline":
        text = text.replace(TORCHS, OURS)
    with null_streams() if wrapper == "torch" else nullcontext():
        exec(compile(text, script, "exec"), NAMES)


def saved(name: str, wrapper: str, world: int, directory: Path) -> list[dict[str, Tensor]]:
    """Run a script with that wrapper; returns the parameters that each rank saved."""
    directory.mkdir()
    # As under torchrun, the store is not a rank's: it has its port before any rank starts.
    store = distributed.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))
    environ = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    args: tuple[Any, ...] = (SCRIPTS / f"{name}.py", wrapper, environ, directory)
    run_ranks(program, world, args=args, backend=None, timeout=30.0)
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(world)]
