"""A training by ``paceline.Run``, to which nothing happens, and what it refuses before it begins."""

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import OptionError, RanksError, StepError
from paceline.testing import run_ranks
from paceline.training.checkpoints import EVERY_VARIABLE, FOLDER_VARIABLE

SHARDS = 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2))


def wrapped(module: nn.Module | None = None) -> paceline.DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "shards: each rank calculates with")
        return paceline.DistributedDataParallel(module or net(), shards=SHARDS)


def loader(**options: Any) -> "DataLoader[Any]":
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(50, 4, generator=generator))
    sampler = paceline.ShardedBatchSampler(data, **{"shards": SHARDS, "batch_size": 8, **options})
    return DataLoader(data, batch_sampler=sampler)


def adam(ddp: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(ddp.parameters(), lr=0.05)


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()


def trained(rank: int, epochs: int = 3, leave_at: int = -1) -> tuple[list[tuple[int, int]], str]:  # noqa: ARG001
    ddp = wrapped()
    optimizer = adam(ddp)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    run = paceline.Run(ddp, optimizer, loader(), epochs=epochs, scheduler=scheduler)
    seen = []
    for step in run:
        if step.number == leave_at:
            break
        with step:
            for (x,) in step.shards():
                ddp(x + 0.1 * torch.rand(1)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        seen.append((step.epoch, step.number))
    if leave_at < 0:
        assert list(run) == []
    return seen, digest(*ddp.module.parameters(), *ddp.module.buffers())


def trained_by_hand(rank: int) -> str:  # noqa: ARG001
    ddp = wrapped()
    optimizer = adam(ddp)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    batches = loader()
    for epoch in range(3):
        batches.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for batch in batches:
            optimizer.zero_grad()
            for (x,) in ddp.shards(batch):
                ddp(x + 0.1 * torch.rand(1)).square().mean().backward()
            optimizer.step()
            scheduler.step()
    return digest(*ddp.module.parameters(), *ddp.module.buffers())


def test_a_run_trains_as_a_loop_by_hand_with_any_number_of_ranks() -> None:
    [by_hand] = run_ranks(trained_by_hand, 1, timeout=60)
    steps = [(number // 6, number) for number in range(18)]
    for world in (1, 2, 3):
        assert run_ranks(trained, world, timeout=60)[0] == (steps, by_hand)


def resumed(rank: int, folder: Path, leave_at: int) -> tuple[list[tuple[int, int]], str]:
    os.environ.update({FOLDER_VARIABLE: str(folder), EVERY_VARIABLE: "8"})
    return trained(rank, 3, leave_at)


def test_a_run_goes_on_from_its_checkpoint_with_another_number_of_ranks(tmp_path: Path) -> None:
    first, _ = run_ranks(resumed, 2, args=(tmp_path, 9), timeout=60)[0]
    then, result = run_ranks(resumed, 3, args=(tmp_path, -1), timeout=60)[0]
    assert (len(first), then[0], then[-1]) == (9, (1, 8), (2, 17))
    assert result == run_ranks(trained, 1, timeout=60)[0][1]
    assert run_ranks(resumed, 1, args=(tmp_path, -1), timeout=60) == [([], result)]
    assert [path.name for path in tmp_path.iterdir()] == ["training.pt"]


def finds_other_checkpoints(rank: int, folder: Path) -> None:
    with pytest.raises(
        OptionError, match=r"ranks found different checkpoints \(steps of each rank: \[18, 0\]"
    ):
        resumed(rank, folder if rank == 0 else folder / "other", -1)


def test_ranks_that_find_different_checkpoints_refuse(tmp_path: Path) -> None:
    run_ranks(resumed, 1, args=(tmp_path, -1), timeout=60)
    run_ranks(finds_other_checkpoints, 2, args=(tmp_path,), timeout=60)


class Strange:
    """Has a state that no other process could load."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": Strange}

    def load_state_dict(self, state: Any) -> None:
        """Never called."""


def refuses(rank: int) -> None:  # noqa: ARG001
    ddp = wrapped()
    optimizer = adam(ddp)
    plain = DataLoader(TensorDataset(torch.ones(8, 4)))
    with pytest.raises(
        OptionError, match=r"the loader cannot be resumed: .* \(loader: DataLoader, batch_sampler: Batch"
    ):
        paceline.Run(ddp, optimizer, plain)
    with pytest.raises(
        OptionError, match=r"the loader cannot be resumed: .* \(loader: list, batch_sampler: NoneType"
    ):
        paceline.Run(ddp, optimizer, [])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"as many shards \(wrapper: 4, sampler: 2\)"):
        paceline.Run(ddp, optimizer, loader(shards=2))
    with pytest.raises(OptionError, match="a run needs shards"):
        paceline.Run(paceline.DistributedDataParallel(net()), optimizer, loader())
    half = torch.optim.SGD(ddp.module[0].parameters())  # type: ignore[index]
    with pytest.raises(
        OptionError, match=r"give all optimizers to Run.*\(parameters: \['1.weight', .*'3.bias'\]\)"
    ):
        paceline.Run(ddp, half, loader())
    with pytest.raises(OptionError, match="parameters that are not the wrapper's"):
        paceline.Run(ddp, [optimizer, adam(net())], loader())
    with pytest.raises(OptionError, match="the state of the average cannot be copied to another process"):
        paceline.Run(ddp, optimizer, loader(), average=Strange())
    with pytest.raises(OptionError, match=r"the scheduler must have state_dict .* \(scheduler: int\)"):
        paceline.Run(ddp, optimizer, loader(), scheduler=3)  # type: ignore[arg-type]
    others = torch.optim.SGD(list(ddp.module.parameters())[2:])
    paceline.Run(ddp, [half, others], loader())


def test_what_cannot_be_healed_is_refused_before_training_starts() -> None:
    run_ranks(refuses, 2, timeout=60)


def without_a_block(rank: int) -> None:  # noqa: ARG001
    ddp = wrapped()
    for _ in paceline.Run(ddp, adam(ddp), loader()):
        pass


def with_two_blocks(rank: int) -> None:  # noqa: ARG001
    ddp = wrapped()
    for step in paceline.Run(ddp, adam(ddp), loader()):
        for _ in range(2):
            with step:
                pass


@pytest.mark.parametrize("train", [without_a_block, with_two_blocks])
def test_each_step_has_one_block(train: Any) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(train, 1, timeout=60)
    assert isinstance(caught.value.exceptions[0], StepError)
