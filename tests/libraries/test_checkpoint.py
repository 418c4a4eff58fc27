"""torch.distributed.checkpoint: what one number of ranks has saved, another loads, to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import rows
from torch import Tensor, distributed
from wrappers import Net

from paceline import DistributedDataParallel, ShardedOptimizer
from paceline.testing import RankPool

STEPS = 3


def plain(ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ddp.parameters(), lr=0.1)


def sharded(ddp: DistributedDataParallel) -> ShardedOptimizer:
    return ShardedOptimizer(ddp, torch.optim.AdamW, lr=0.1)


def train(ddp: Any, optimizer: Any, rank: int, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        ddp(rows(rank, step)).square().mean().backward()
        optimizer.step()


def content(ddp: Any, optimizer: Any) -> dict[str, Tensor]:
    """Every tensor of this rank that training goes on from."""
    named = dict(ddp.module.named_parameters())
    moments = {
        f"{name}.{key}": value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    rate = torch.tensor(optimizer.param_groups[0]["lr"])
    return {name: value.detach().clone() for name, value in {**named, **moments, "rate": rate}.items()}


# Three ways to make a state of what is to be saved, and to take over what was loaded into it.


def by_name(ddp: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, state = get_state_dict(ddp, optimizer)
    return {"model": model, "optimizer": state}


def take_by_name(ddp: Any, optimizer: Any, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    set_state_dict(ddp, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def as_it_is(ddp: Any, optimizer: Any) -> dict[str, Any]:
    if not optimizer.state:
        train(ddp, optimizer, 0, steps=1)  # moments to load into
    return {"model": ddp.module_state_dict(), "optimizer": optimizer.state_dict()}


def take_as_it_is(ddp: Any, optimizer: Any, state: dict[str, Any]) -> None:
    ddp.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def in_shares(ddp: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": ddp.module_state_dict(), "optimizer": optimizer.share}


def take_in_shares(ddp: Any, _: Any, state: dict[str, Any]) -> None:
    ddp.load_state_dict(state["model"])


def reshaped(
    rank: int, folder: Path, make: Callable[..., Any], describe: Callable[..., Any], take: Callable[..., None]
) -> list[dict[str, Tensor] | None]:
    """Two ranks save, three load that and save it, one loads that and saves it, two load that."""
    import torch.distributed.checkpoint as dcp

    found: list[dict[str, Tensor] | None] = []
    for turn, ranks in enumerate((2, 3, 1, 2)):
        group = distributed.new_group(range(ranks))
        if rank < ranks:
            ddp = DistributedDataParallel(Net(seed=turn), process_group=group)
            optimizer = make(ddp)
            if turn == 0:
                train(ddp, optimizer, rank)
                optimizer.param_groups[0]["lr"] = 0.05
            else:
                state = describe(ddp, optimizer)
                dcp.load(state, checkpoint_id=folder / str(turn - 1), process_group=group)
                take(ddp, optimizer, state)
            dcp.save(describe(ddp, optimizer), checkpoint_id=folder / str(turn), process_group=group)
            found.append(content(ddp, optimizer))
            train(ddp, optimizer, rank, steps=1)  # it goes on
        else:
            found.append(None)
        distributed.barrier()
    return found


@pytest.mark.parametrize(
    ("make", "describe", "take"),
    [(plain, by_name, take_by_name), (plain, as_it_is, take_as_it_is), (sharded, in_shares, take_in_shares)],
    ids=["by name", "as it is", "in shares"],
)
def test_other_numbers_of_ranks_load_parameters_and_moments(
    three: RankPool, tmp_path: Path, make: Any, describe: Any, take: Any
) -> None:
    turns = list(zip(*three.run(reshaped, tmp_path, make, describe, take), strict=True))
    ranks = [[found for found in turn if found is not None] for turn in turns]
    assert [len(turn) for turn in ranks] == [2, 3, 1, 2]
    wanted = {name: value for found in ranks[0] for name, value in found.items()}
    assert wanted["first.weight.step"] == STEPS
    for turn in ranks:
        for found in turn:
            assert all(torch.equal(value, wanted[name]) for name, value in found.items())
        assert {name for found in turn for name in found} == wanted.keys()
