"""Training scripts, run on fresh ranks with the environment that torchrun would give.

On machines without an accelerator torch's mixed precision and its optimizers in backward raise, because there
is no stream. There torch, and torch only, gets streams and events that do nothing.
"""

import os
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, distributed

from paceline.testing import run_ranks
from paceline.tools.run.patch_torch import patch_torch

SCRIPTS = Path(__file__).parents[1] / "conformance/same_script/scripts"
TORCHS = "from torch.nn.parallel import DistributedDataParallel\n"
OURS = "from paceline.nn.parallel import DistributedDataParallel\n"
# The script as a module, kept until its process ends: torch's wrapper can hang or abort when it is freed
# after its group was closed.
MAIN = ModuleType("__main__")


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


def program(rank: int, script: Path, wrapper: str, environ: dict[str, str], arguments: list[str]) -> None:
    """What ``python script arguments`` would do."""
    os.environ.update(environ, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    sys.modules["__main__"] = MAIN  # where torch.compile looks for what it defines
    MAIN.__file__ = str(script)
    text = script.read_text()
    if wrapper == "paceline":
        assert text.count(TORCHS) == 1
        text = text.replace(TORCHS, OURS)
    elif wrapper == "paceline, patched":
        patch_torch()
    with null_streams() if wrapper == "torch" else nullcontext():
        exec(compile(text, script, "exec"), vars(MAIN))


def run_script(
    script: Path, wrapper: str, world: int, arguments: list[str], environ: dict[str, str] | None = None
) -> None:
    """Run a script with that wrapper: "torch", "torch, no streams", "paceline" or "paceline, patched"."""
    # As under torchrun, the store is not a rank's: it has its port before any rank starts.
    store = distributed.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))
    told = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    args: tuple[Any, ...] = (script, wrapper, told | (environ or {}), arguments)
    run_ranks(program, world, args=args, backend=None, timeout=90.0)


def saved(name: str, wrapper: str, world: int, directory: Path) -> list[dict[str, Tensor]]:
    """Run a script of same_script; returns the parameters that each rank saved."""
    directory.mkdir()
    run_script(SCRIPTS / f"{name}.py", wrapper, world, [str(directory)])
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(world)]
