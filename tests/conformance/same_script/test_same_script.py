"""Scripts of the kind users write, run with one import changed: the same parameters, bit for bit.

Each script in ``scripts`` is a program of its own, started once for each rank in a fresh process, with the
environment that torchrun would give it. Nothing of it is changed but the line that imports the wrapper.

Averages over two ranks are the same in whatever order they are added up. Over more ranks the bits depend on
the place of a gradient in its message, which the step report behind the last bucket moves.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_scripts import SCRIPTS, saved

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
