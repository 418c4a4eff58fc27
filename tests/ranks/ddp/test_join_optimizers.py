"""Plain optimizers under join: ranks that have missed steps go on with the state of those that took them."""

import copy
import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer
from wrappers import equal_on_all

from paceline import DistributedDataParallel
from paceline.testing import RankPool

EPOCHS = 3
OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "tensor rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.05), foreach=False),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batches(rank: int, epoch: int, counts: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * epoch + rank)
    return [torch.randn(2 + rank, 3, generator=generator, dtype=torch.float64) for _ in range(counts[rank])]


def step(model: nn.Module, optimizer: Optimizer, x: Tensor, backward: Callable[[Tensor], None]) -> None:
    optimizer.zero_grad()
    backward(model(x).square().mean())
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.97


def alone(name: str, counts: Sequence[int]) -> list[Tensor]:
    """One process on what the ranks with inputs have in each step."""
    model = network()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for epoch in range(EPOCHS):
        everyone = [batches(rank, epoch, counts) for rank in range(len(counts))]
        for number in range(max(counts)):
            x = torch.cat([mine[number] for mine in everyone if number < len(mine)])
            step(model, optimizer, x, lambda loss: loss.backward())
    return [parameter.detach() for parameter in model.parameters()]


def together(rank: int, name: str, counts: Sequence[int]) -> None:
    counts = counts[: distributed.get_world_size()]
    ddp = DistributedDataParallel(network())
    optimizer = OPTIMIZERS[name](list(ddp.parameters()))
    for epoch in range(EPOCHS):
        with ddp.join():
            for x in batches(rank, epoch, counts):
                step(ddp, optimizer, x, functools.partial(ddp.backward, weight=len(x)))
        assert equal_on_all(list(ddp.parameters()))
        states = [value for state in optimizer.state.values() for value in state.values()]
        assert equal_on_all([value for value in states if isinstance(value, Tensor)])
    for ours, want in zip(ddp.parameters(), alone(name, counts), strict=True):
        torch.testing.assert_close(ours.detach(), want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_epochs_train_as_one_process_does(pair: RankPool, name: str) -> None:
    pair.run(together, name, [2, 4])


def test_the_same_on_three_ranks(ranks: RankPool) -> None:
    ranks.run(together, "adam", [3, 1, 2])


def starts_late(rank: int) -> None:
    """Rank 0 has nothing in the first epoch, so nobody knows its optimizer until it steps."""
    ddp = DistributedDataParallel(network())
    optimizer = OPTIMIZERS["adam"](list(ddp.parameters()))
    for epoch, counts in enumerate([(0, 3), (0, 2), (2, 2)]):
        with ddp.join():
            for x in batches(rank, epoch, counts):
                step(ddp, optimizer, x, lambda loss: ddp.backward(loss, weight=1))
    assert equal_on_all(list(ddp.parameters()))
    assert {float(state["step"]) for state in optimizer.state.values()} == {7.0}


def test_a_rank_that_had_no_inputs_at_first_goes_on_where_the_others_are(pair: RankPool) -> None:
    pair.run(starts_late)


def shared(rank: int) -> None:
    """One optimizer of two wrappers."""
    first, second = DistributedDataParallel(network()), DistributedDataParallel(network())
    optimizer = OPTIMIZERS["adam"]([*first.parameters(), *second.parameters()])
    for epoch in range(2):
        with Join([first, second]):
            for x in batches(rank, epoch, (1, 3)):
                optimizer.zero_grad()
                first(x).square().mean().backward()
                second(x).exp().mean().backward()
                optimizer.step()
        assert equal_on_all([*first.parameters(), *second.parameters()])
        assert equal_on_all([value for state in optimizer.state.values() for value in state.values()])


def test_an_optimizer_of_two_wrappers(pair: RankPool) -> None:
    pair.run(shared)


def even(rank: int) -> None:
    ddp = DistributedDataParallel(network())
    optimizer = OPTIMIZERS["adam"](list(ddp.parameters()))
    with ddp.join():
        for x in batches(rank, 0, (2, 2)):
            step(ddp, optimizer, x, lambda loss: loss.backward())
    own = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    with ddp.join():
        for x in batches(rank, 1, (2, 2)):
            step(ddp, optimizer, x, lambda loss: loss.backward())
    assert float(own["state"][0]["step"]) == 2.0
    assert optimizer.param_groups[0]["lr"] == pytest.approx((0.1 + rank) * 0.97**2)
    distributed.barrier()


def test_nothing_is_taken_over_where_no_rank_has_missed_a_step(pair: RankPool) -> None:
    pair.run(even)
