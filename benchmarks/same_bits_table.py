"""Whether trainings on other numbers of ranks end with the same bits, by sha256 of parameters and state.

python benchmarks/same_bits_table.py [--cases NAME ...] [--worlds N ...] [--steps N] [--figures FILE]

Each case trains a small model with ``DistributedDataParallel(net, shards=8)``, on 1, 2, 3, 4 and 8 ranks. One
more row changes the number of ranks three times, with a saved state in between. torch's wrapper trains the
same batches, each rank its part of them, as a control.
"""

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody
from figures import load, merge
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.testing import run_ranks
from paceline.tools.bench.measure import processor, versions

SHARDS = 8
WORLDS = (1, 2, 3, 4, 8)
CHANGING = (4, 3, 8, 1)
STEPS = 6
BATCH = 29  # shards of three and of four samples
TIMEOUT_SECONDS = 120.0


class ConvNet(nn.Module):
    """With batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.out = nn.Linear(6 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.conv(x.view(-1, 1, 6, 6)))), 2)
        result: Tensor = self.out(F.dropout(x.flatten(1), 0.3, self.training))
        return result


class Transformer(nn.Module):
    """With dropout, and layers that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 2, 24, dropout=0.2, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 12)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        result: Tensor = self.out(x.mean(1))
        return result


class SparseEmbedding(nn.Module):
    """Whose rows are touched by several shards."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, 8, sparse=True)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.rows((x[:, :6] * 100).long() % 11).mean(1))
        return result


class Unused(nn.Module):
    """One layer is used by some shards only, and one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.never = nn.Linear(36, 12), nn.Linear(12, 12), nn.Linear(2, 2)
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        result: Tensor = self.out(self.some(hidden) if x[0, 0] > 0 else hidden)
        return result


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(36, 40), nn.GELU(), nn.Dropout(0.1), nn.Linear(40, 5))


def plain_backward(ddp: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(ddp(x), y).backward()


def two_passes(ddp: Any, x: Tensor, y: Tensor) -> None:
    with ddp.no_sync():
        (F.cross_entropy(ddp(x[:1]), y[:1]) / 2).backward()
    (F.cross_entropy(ddp(x[1:]), y[1:]) / 2).backward()


def weighted(ddp: Any, x: Tensor, y: Tensor) -> None:
    tokens = int(y.sum()) + 1
    if isinstance(ddp, paceline.DistributedDataParallel):
        ddp.backward(F.cross_entropy(ddp(x), y), weight=tokens)
    else:
        (F.cross_entropy(ddp(x), y) * tokens).backward()


adam = partial(torch.optim.Adam, lr=1e-2)
sgd = partial(torch.optim.SGD, lr=0.1)


@dataclass(frozen=True)
class Case:
    """A model, and how one shard is trained."""

    make: Callable[[], nn.Module]
    backward: Callable[[Any, Tensor, Tensor], None] = plain_backward
    optimizer: Callable[..., torch.optim.Optimizer] = adam


CASES = {
    "MLP": Case(mlp),
    "conv net, BatchNorm, dropout": Case(ConvNet),
    "transformer, dropout, checkpoints": Case(Transformer),
    "sparse embedding": Case(SparseEmbedding, optimizer=sgd),
    "two passes per shard": Case(mlp, two_passes),
    "weights by tokens": Case(mlp, weighted),
    "unused parameters": Case(Unused),
}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(200, 36, generator=generator), torch.randint(0, 5, (200,), generator=generator)
    )


def digest(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters, module buffers and optimizer state."""
    state = [*module.state_dict().values()]
    for each in optimizer.state.values():
        state += [value for _, value in sorted(each.items()) if isinstance(value, Tensor)]
    total = hashlib.sha256()
    for tensor in state:
        total.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return total.hexdigest()


def train(
    _: int, name: str, steps: int, resume: Path | None = None, then_save: Path | None = None
) -> tuple[str, str]:
    """Digests after so many steps: of everything, which is rank 0's to keep, and of the parameters alone."""
    case = CASES[name]
    torch.manual_seed(0)
    ddp = paceline.DistributedDataParallel(case.make(), shards=SHARDS)
    optimizer = case.optimizer(ddp.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    samples = data()
    sampler = paceline.ShardedBatchSampler(samples, shards=SHARDS, batch_size=BATCH)
    loader = DataLoader(samples, batch_sampler=sampler)
    state = paceline.TrainingState(ddp, optimizer, sampler=sampler, scheduler=scheduler)
    if resume is not None:
        paceline.load(resume, state)
    done = 0
    while done < steps:
        for batch in loader:
            optimizer.zero_grad()
            for x, y in ddp.shards(batch):
                case.backward(ddp, x, y)
            optimizer.step()
            scheduler.step()
            done += 1
            if done == steps:
                break
        else:
            sampler.set_epoch(sampler.epoch + 1)
    if then_save is not None:
        paceline.save(then_save, state)
    parameters = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())).hexdigest()
    return digest(ddp.module, optimizer), parameters


def train_with_torch(_: int, name: str, steps: int) -> tuple[str, str]:
    """The same batches with torch's wrapper: each rank has one part of them."""
    case = CASES[name]
    torch.manual_seed(0)
    module = case.make()
    ddp = nn.parallel.DistributedDataParallel(module, find_unused_parameters=case.make is Unused)
    optimizer = case.optimizer(ddp.parameters())
    samples = data()
    sampler = paceline.ShardedBatchSampler(samples, shards=SHARDS, batch_size=BATCH)
    torch.set_num_threads(1)
    for number, (x, y) in enumerate(DataLoader(samples, batch_sampler=sampler)):
        if number == steps:
            break
        torch.manual_seed(number)
        optimizer.zero_grad()
        case.backward(ddp, x, y)
        optimizer.step()
    return digest(module, optimizer), ""


def changing_worlds(name: str, steps: int, worlds: Sequence[int] = CHANGING) -> str:
    """The digest of a training whose number of ranks changes, with a saved state in between."""
    each = -(-steps // len(worlds))
    saved: Path | None = None
    found = ""
    with tempfile.TemporaryDirectory() as folder:
        for number, world in enumerate(worlds):
            count = min(each, steps - number * each)
            target = Path(folder) / f"{number}.pt"
            ranks = run_ranks(train, world, args=(name, count, saved, target), timeout=TIMEOUT_SECONDS)
            saved, found = target, ranks[0][0]
    return found


def compare(name: str, worlds: Sequence[int], steps: int) -> dict[str, Any]:
    """Digests by the number of ranks."""
    ours = {w: run_ranks(train, w, args=(name, steps), timeout=TIMEOUT_SECONDS) for w in worlds}
    torchs = {
        w: run_ranks(train_with_torch, w, args=(name, steps), timeout=TIMEOUT_SECONDS)[0][0] for w in worlds
    }
    return {
        "paceline": {str(w): ranks[0][0][:12] for w, ranks in ours.items()},
        "ranks agree": all(len({rank[1] for rank in ranks}) == 1 for ranks in ours.values()),
        "changing": changing_worlds(name, steps)[:12],
        "torch": {str(w): each[:12] for w, each in torchs.items()},
    }


def is_same(found: dict[str, Any]) -> bool:
    return found["ranks agree"] and len({*found["paceline"].values(), found["changing"]}) == 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the bits of trainings on several numbers of ranks.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], metavar="NAME")
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS, metavar="N")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--figures", type=Path, metavar="FILE", help="write the digests here too")
    arguments = parser.parse_args()
    found = {}
    for name in arguments.cases:
        found[name] = compare(name, arguments.worlds, arguments.steps)
        others = len({*found[name]["torch"].values()})
        print(
            f"{name}: {'same bits' if is_same(found[name]) else 'DIFFERENT'} {found[name]['paceline']}, "
            f"changing {CHANGING}: {found[name]['changing']}; torch's wrapper: {others} different results"
        )
    if arguments.figures is not None:
        before = load(arguments.figures).get("same_bits", {}).get("cases", {})
        source = {"command": "python benchmarks/same_bits_table.py", "machine": processor(), **versions()}
        merge(arguments.figures, "same_bits", {**source, "cases": {**before, **found}})
    sys.exit(0 if all(map(is_same, found.values())) else 1)


if __name__ == "__main__":
    main()
