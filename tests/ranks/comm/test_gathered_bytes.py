"""Bytes that all ranks gather from each other."""

import pytest
import torch
from torch import Tensor, distributed

from paceline.comm.group import Group
from paceline.testing import RankPool


def refuse(_: Tensor) -> None:
    raise AssertionError("each byte becomes a number in Python, of which a thousand ranks have very many")


def gathered(rank: int) -> list[bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", refuse)
        return Group(distributed.group.WORLD).gather_bytes(bytes([rank, 255, 0]), torch.device("cpu"))


def test_every_rank_gets_the_bytes_of_all_without_looking_at_each(pair: RankPool) -> None:
    assert pair.run(gathered) == [[b"\0\xff\0", b"\1\xff\0"]] * 2
