"""Scripts of the kind users write, run with one import changed: the same parameters, bit for bit.

Each script in ``scripts`` is a program of its own, started once for each rank in a fresh process, with the
environment that torchrun would give it. Nothing of it is changed but the line that imports the wrapper.

On machines without an accelerator torch's mixed precision and its optimizers in backward raise, for want of a
stream. There torch, and torch only, is given streams and events that do nothing.

Averages over two ranks are the same in whatever order they are added up. Over more ranks the bits depend on
the place of a gradient in its message, which the step report behind the last bucket moves.
"""

import os
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed

from paceline.testing import run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
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
    """What the script saved on each rank."""
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


# Which ranks end with the same parameters: all, except where each holds a part of some of them.
REPLICAS = {
    "plain": [(0, 1)],
    "fp16_hook": [(0, 1)],
    "power_sgd": [(0, 1)],
    "mixed_precision": [(0, 1)],
    "in_backward": [(0, 1)],
    "join": [(0, 1)],
    "static_graph": [(0, 1)],
    "mesh": [(0, 2), (1, 3)],
}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], where: str) -> None:
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        off = (mine.double() - theirs[name].double()).abs().max()
        assert torch.equal(mine, theirs[name]), f"{where}: {name!r} is off by {off:.3g}"


@pytest.mark.parametrize("name", REPLICAS)
def test_one_changed_import_changes_no_bit(name: str, tmp_path: Path) -> None:
    replicas = REPLICAS[name]
    world = sum(map(len, replicas))
    ours, theirs = (saved(name, wrapper, world, tmp_path / wrapper) for wrapper in ("paceline", "torch"))
    for rank in range(world):
        assert_same(ours[rank], theirs[rank], f"rank {rank} and torch's")
    for first, second in replicas:
        assert_same(ours[first], ours[second], f"ranks {first} and {second}")


def test_every_script_is_run() -> None:
    assert {file.stem for file in SCRIPTS.glob("*.py")} == {*REPLICAS, "task"}
