"""A forked child has its parent's gradients, and is no rank."""

import os
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.errors import StepError
from paceline.testing import RankPool


def in_child(body: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def fork_between_steps(rank: int, transport: str) -> list[float]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    ddp = DistributedDataParallel(net, transport=transport)
    x = torch.full((1, 3), rank + 1.0)

    def harm() -> None:
        for parameter in net.parameters():
            assert parameter.grad is not None
            assert (parameter.grad == (1.5 if parameter.dim() > 1 else 1.0)).all()
            parameter.grad.fill_(77)
            assert (parameter.grad == 77).all()
        with pytest.raises(StepError, match="cannot be called in a forked child"):
            ddp(x)
        with torch.no_grad(), pytest.raises(StepError, match="cannot be called in a forked child"):
            ddp(x)
        net.zero_grad()
        net(x).sum().backward()  # its own affair
        assert net.weight.grad is not None
        assert (net.weight.grad == x).all()

    for _ in range(3):
        net.zero_grad()
        ddp(x).sum().backward()
        in_child(harm)
        assert net.weight.grad is not None
        assert net.weight.grad.tolist() == [[1.5] * 3]
    return net.weight.grad.flatten().tolist()


@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_what_a_child_does_to_gradients_does_not_reach_its_parent(pair: RankPool, transport: str) -> None:
    assert pair.run(fork_between_steps, transport) == [[1.5] * 3] * 2
