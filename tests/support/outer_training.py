"""What tests of outer loops train, in ranks of two hosts."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paceline import OuterLoop
from paceline.outer.round_parts import DecidedRound
from paceline.testing.hosts import Hosts

WIDTH = 32


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, WIDTH, generator=generator)
    return x, x[:, :4].argmax(1)


def train_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def values(net: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in net.state_dict().values()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@contextlib.contextmanager
def rank_of(hosts: Hosts, rank: int, world: int = 4) -> Iterator[torch.Generator]:
    """A rank of one of two hosts that have as many ranks."""
    with hosts.group(rank, world=world, host=rank // (world // 2)):
        torch.set_num_threads(1)
        yield torch.Generator().manual_seed(rank)


def plain(ddp: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ddp.parameters(), lr=1e-2)


def note_members(outer: OuterLoop) -> list[list[int]]:
    """Which hosts count in each round from now on; nothing on ranks that do not talk to them."""
    members: list[list[int]] = []
    exchange = outer._exchange
    if exchange is None:
        return members
    use = exchange._use

    def note(decided: DecidedRound) -> None:
        members.append([*decided.changes])
        use(decided)

    exchange._use = note  # type: ignore[method-assign]
    return members
