"""Two wrappers on one group, as in a GAN: a fault on one rank is told in the wrapper that others wait in."""

import contextlib

import pytest
import torch
from torch import distributed, nn
from wrappers import be_impatient, equal_on_all

from paceline import DistributedDataParallel, PeerError
from paceline.testing import RankPool

TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "c10d"])


class Net(nn.Module):
    def __init__(self, name: str, *, buffers: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.norm = nn.BatchNorm1d(8).double() if buffers else nn.Identity()
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x: torch.Tensor, fault: str) -> torch.Tensor:
        if fault == f"{self.name} forward":
            raise ArithmeticError("planted")
        hidden = self.norm(self.first(x)).tanh()
        if fault == f"{self.name} backward":
            hidden.register_hook(lambda _: 1 / 0)
        return self.last(hidden)


FAULTS = {
    # What rank 1 does wrong, and which loss the ranks use.
    "D after a detached G": ("D forward", "detached"),
    "G before a detached D": ("G forward", "detached"),
    "D after G": ("D forward", "whole"),
    "G before D": ("G forward", "whole"),
    "backward of D": ("D backward", "whole"),
    "backward of G": ("G backward", "whole"),
    "backward of D alone": ("D backward", "detached"),
}


def adversarial(
    rank: int, fault: str, loss: str, transport: str, culprit: int = 1, buffers: str = ""
) -> list[str]:
    be_impatient()
    generator, discriminator = (
        DistributedDataParallel(Net(name, buffers=name in buffers), transport=transport) for name in "GD"
    )
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, discriminator)]
    told = []
    for step in range(6):
        planted = fault if rank == culprit and step in (2, 4) else ""
        noise = torch.randn(2, 4, dtype=torch.float64)
        try:
            made = generator(noise, planted)
            judged = discriminator(made.detach() if loss == "detached" else made, planted)
            judged.square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        except (ArithmeticError, PeerError) as error:
            told.append(f"{step} {type(error).__name__} {error}")
        for optimizer in optimizers:
            optimizer.zero_grad()
    distributed.barrier()
    assert equal_on_all([*generator.parameters(), *discriminator.parameters()])
    return told


@TRANSPORTS
@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_is_told_and_all_go_on(ranks: RankPool, name: str, transport: str) -> None:
    first, culprit, *others = ranks.run(adversarial, *FAULTS[name], transport)
    assert [line.split()[0] for line in culprit] == ["2", "4"]
    for told in (first, *others):
        assert [line[:23] for line in told] == ["2 PeerError rank 1 rais", "4 PeerError rank 1 rais"]
        assert all("test_two_wrappers_fail.py" in line for line in told)


@TRANSPORTS
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("buffers", ["D", "GD"])
@pytest.mark.parametrize("name", ["G before a detached D", "D after a detached G"])
def test_others_that_wait_for_module_buffers_are_told_too(
    pair: RankPool, name: str, buffers: str, culprit: int, transport: str
) -> None:
    everyone = pair.run(adversarial, *FAULTS[name], transport, culprit, buffers)
    assert [line.split()[0] for line in everyone[culprit]] == ["2", "4"]
    told = everyone[1 - culprit]
    assert [line[:23] for line in told] == [f"{step} PeerError rank {culprit} rais" for step in (2, 4)]


def all_raise(rank: int) -> None:
    be_impatient()
    nets = [DistributedDataParallel(Net(name)) for name in "GD"]
    for step in range(8):
        faults = {1: f"{'GD'[rank % 2]} forward", **dict.fromkeys(range(3, 7), "D forward")}
        try:
            x = torch.ones(1, 4, dtype=torch.float64)
            for net in nets:
                x = net(x, faults.get(step, ""))
            x.sum().backward()
        except ArithmeticError:
            assert step in faults
        else:
            assert step not in faults


def test_if_all_ranks_raise_nobody_waits(pair: RankPool) -> None:
    pair.run(all_raise)


def in_the_second_forward(rank: int) -> list[str]:
    """In one step all ranks call D twice, which is unusual, and on rank 1 the second call raises."""
    be_impatient()
    generator, discriminator = (DistributedDataParallel(Net(name)) for name in "GD")
    told = []
    for step in range(7):
        x = torch.ones(1, 4, dtype=torch.float64)
        try:
            loss = discriminator(generator(x, ""), "").sum()
            if step == 4:
                loss = loss + discriminator(x, "D forward" if rank == 1 else "").sum()
            loss.backward()
        except (ArithmeticError, PeerError) as error:
            told.append(f"{step} {type(error).__name__}")
    return told


def test_a_repeated_forward_that_raises_is_told(ranks: RankPool) -> None:
    first, culprit, *others = ranks.run(in_the_second_forward)
    assert culprit == ["4 ArithmeticError"]
    assert [first, *others] == [["4 PeerError"]] * (1 + len(others))


def trained_before(rank: int, transport: str, how: str) -> None:
    """G has averaged gradients when D fails on rank 1; then both optimizers step."""
    be_impatient()
    generator, discriminator = (DistributedDataParallel(Net(name), transport=transport) for name in "GD")
    generator.require_manual_backward_finalization = how == "finalized manually"
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, discriminator)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.randn(2, 4, dtype=torch.float64)
        with generator.no_sync() if how == "accumulated" else contextlib.nullcontext():
            generator(x, "").square().mean().backward()
        with contextlib.suppress(ArithmeticError, PeerError):
            discriminator(x, "D forward" if rank == 1 and step in (1, 3) else "").square().mean().backward()
        if how == "finalized manually":
            generator.finalize_backward()
        if how == "accumulated":
            generator(x, "").square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert equal_on_all([*generator.parameters(), *discriminator.parameters()])


@TRANSPORTS
@pytest.mark.parametrize("how", ["averaged", "accumulated", "finalized manually"])
def test_gradients_of_another_wrapper_are_lost_on_all_ranks_or_on_none(
    pair: RankPool, transport: str, how: str
) -> None:
    pair.run(trained_before, transport, how)
