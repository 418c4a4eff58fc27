"""Samples shared out over ranks: trained on once each, resumed at another world size, evaluated in order."""

import dataclasses
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from paceline import DistributedDataParallel, OptionError, SamplesError, ShardedSampler, gather_in_order
from paceline.data.gather import _pack
from paceline.testing import RankPool, run_ranks, toy

SAMPLES = 10_007


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    with RankPool(3, timeout=20.0) as pool:
        yield pool


class Numbered(TensorDataset):
    """Rows with their own numbers."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(count, 4, dtype=torch.float64, generator=generator)
        super().__init__(torch.arange(count), rows)


def refused(act: Any) -> str:
    with pytest.raises(SamplesError) as caught:
        act()
    return str(caught.value)


def evaluation(_: int, shuffle: bool) -> tuple[int, int, Tensor, Tensor, str]:
    data = Numbered(SAMPLES)
    counts, results = [], []
    for sampler in (ShardedSampler(data, shuffle=shuffle), DistributedSampler(data, shuffle=shuffle)):
        batches = [*DataLoader(data, 256, sampler=sampler)]
        indices, rows = (torch.cat(parts) for parts in zip(*batches, strict=True))
        total = torch.tensor(len(indices))
        distributed.all_reduce(total)
        counts.append(int(total))
        results.append((rows.square().sum(1), indices))
    ours, theirs = results
    # Behind the loader, our sampler itself knows which samples they were.
    in_order = gather_in_order(ours[0], ShardedSampler(data, shuffle=shuffle))
    complaint = refused(lambda: gather_in_order(*theirs))
    return *counts, in_order, gather_in_order(*theirs, duplicates="drop"), complaint


@pytest.mark.parametrize("shuffle", [False, True], ids=["in turn", "shuffled"])
def test_evaluation_counts_each_sample_once_and_restores_the_order(three: RankPool, shuffle: bool) -> None:
    want = Numbered(SAMPLES).tensors[1].square().sum(1)
    for ours, torchs, in_order, dropped, complaint in three.run(evaluation, shuffle):
        assert ours == SAMPLES
        assert torchs == SAMPLES + 1
        assert torch.equal(in_order, want)
        assert torch.equal(dropped, want)
        assert complaint.startswith("samples came more than once (samples: 1, repetitions: 1")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def trained_alone(count: int, batch: int, world: int) -> list[Tensor]:
    """One process on all ranks' batches at once, in the order of the epoch."""
    model, data = net(), Numbered(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in data.tensors[1][[*ShardedSampler(count, 1, 0)]].split(batch * world):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def trained_under_join(_: int, count: int, batch: int) -> tuple[int, list[Tensor]]:
    data = Numbered(count)
    ddp = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    steps = 0
    with ddp.join():
        for _indices, rows in DataLoader(data, batch, sampler=ShardedSampler(data)):
            optimizer.zero_grad()
            with ddp.weigh(len(rows)):
                ddp(rows).square().mean().backward()
            optimizer.step()
            steps += 1
    return steps, [parameter.detach() for parameter in ddp.parameters()]


@pytest.mark.parametrize(
    ("count", "steps"),
    [(11, (2, 2, 2)), (13, (3, 2, 2)), (14, (3, 3, 2)), (2, (1, 1, 0)), (1, (1, 0, 0))],
)
def test_uneven_numbers_of_samples_train_as_one_process_does(
    three: RankPool, count: int, steps: tuple[int, ...]
) -> None:
    want = trained_alone(count, 2, 3)
    results = three.run(trained_under_join, count, 2)
    assert tuple(taken for taken, _ in results) == steps
    for _, got in results:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def loader(count: int, workers: int) -> StatefulDataLoader[Any]:
    sampler = ShardedSampler(count, seed=5)
    return StatefulDataLoader(range(count), 2, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]


def resumed(_: int, state: dict[str, Any] | None, workers: int, steps: int) -> tuple[list[int], Any]:
    loading = loader(50, workers)
    if state is not None:
        loading.load_state_dict(state)
    batches = [*islice(loading, steps)]
    return [int(index) for batch in batches for index in batch], loading.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_resumes_at_two_other_world_sizes(pair: RankPool, three: RankPool, workers: int) -> None:
    order = [*ShardedSampler(50, 1, 0, seed=5)]
    first = three.run(resumed, None, workers, 3)
    second = pair.run(resumed, first[0][1], workers, 4)
    third = three.run(resumed, second[0][1], workers, 50)
    legs = [[index for indices, _ in leg for index in indices] for leg in (first, second, third)]
    assert [*map(sorted, legs)] == [sorted(order[:18]), sorted(order[18:34]), sorted(order[34:])]
    assert [len(indices) for indices, _ in third] == [6, 5, 5]


class Result(NamedTuple):
    """What a model says of samples."""

    scores: Tensor
    words: list[str]


@dataclasses.dataclass
class Report:
    """Results in a structure."""

    result: Result
    more: dict[str, Any]


def report(indices: list[int]) -> Report:
    column = torch.tensor(indices, dtype=torch.int64)
    more = {"flags": column % 2 == 0, "pair": (column.to(torch.bfloat16), [{"number": i} for i in indices])}
    return Report(Result(column[:, None, None].expand(-1, 2, 3).float(), [f"<{i}>" for i in indices]), more)


def structures(rank: int, to: int | None) -> Any:
    # Rank 1 has nothing, and so no idea of what the others have.
    indices = {0: [4, 0, 2], 1: [], 2: [3, 1]}[rank]
    return gather_in_order(report(indices) if indices else None, indices, to=to)


@pytest.mark.parametrize("to", [None, 1])
def test_structures_are_ordered_also_on_ranks_without_samples(three: RankPool, to: int | None) -> None:
    want = report([0, 1, 2, 3, 4])
    for rank, got in enumerate(three.run(structures, to)):
        if to is not None and rank != to:
            assert got is None
            continue
        assert type(got) is Report
        assert type(got.result) is Result
        assert got.result.words == want.result.words
        assert got.more["pair"][1] == want.more["pair"][1]
        torch.testing.assert_close(
            (got.result.scores, got.more["flags"], got.more["pair"][0]),
            (want.result.scores, want.more["flags"], want.more["pair"][0]),
            rtol=0,
            atol=0,
        )


def graphs_views_subsets(rank: int) -> None:
    large = torch.arange(1000.0, requires_grad=True)
    got = gather_in_order(large[rank::2] * 2, range(rank, 1000, 2))
    assert torch.equal(got, torch.arange(1000.0) * 2)
    assert not got.requires_grad
    subset = gather_in_order([rank, rank + 10], torch.tensor([70 + rank, 7 + rank]), count=4)
    assert subset == [10, 11, 0, 1]
    assert gather_in_order([], []) == []
    assert gather_in_order([rank], [0], duplicates="drop") == [0]
    group = distributed.new_group([1])
    if rank == 1:
        assert gather_in_order([5], [0], group=group) == [5]
        assert [*ShardedSampler(3, shuffle=False, process_group=group)] == [0, 1, 2]


def test_results_are_detached_subsets_allowed_and_groups_respected(pair: RankPool) -> None:
    pair.run(graphs_views_subsets)


def on_a_device(rank: int) -> tuple[str, list[float]]:
    toy.register()
    got = gather_in_order(torch.arange(float(rank), 5, 2).to("toy:1"), range(rank, 5, 2))
    return str(got.device), got.cpu().tolist()


def test_results_are_on_the_device_where_the_rank_had_its_own() -> None:
    want = ("toy:1", [0.0, 1.0, 2.0, 3.0, 4.0])
    assert run_ranks(on_a_device, 2, timeout=20.0) == [want, want]


def test_a_view_is_sent_without_the_rest_of_its_memory() -> None:
    assert len(_pack(torch.zeros(100_000)[:1], [0])[1]) < 10_000


class Unpicklable:
    """Like an open file."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def mistake(rank: int, name: str) -> str:
    row = torch.ones(2)
    cases: dict[str, Any] = {
        "dtype": lambda: gather_in_order({"x": row.double() if rank else row}, [2 * rank, 2 * rank + 1]),
        "shape": lambda: gather_in_order(torch.ones(2, 2 + rank), [2 * rank, 2 * rank + 1]),
        "keys": lambda: gather_in_order(
            {"x": row} if rank else {"x": row, "y": row}, [2 * rank, 2 * rank + 1]
        ),
        "length": lambda: gather_in_order((row,), [0, 1, 2] if rank else [3, 4]),
        "values without indices": lambda: gather_in_order(row, [] if rank else [0, 1]),
        "not a column": lambda: gather_in_order({"loss": 0.5} if rank else {"loss": row}, [0, 1]),
        "no rows": lambda: gather_in_order(row.sum() if rank else row[:1], [rank]),
        "index": lambda: gather_in_order(row, [0.5, 1] if rank else [2, 3]),  # type: ignore[list-item]
        "negative": lambda: gather_in_order(row, [-1, 1] if rank else [2, 3]),
        "unpicklable": lambda: gather_in_order([Unpicklable()] if rank else [0], [rank]),
        "twice": lambda: gather_in_order(row, [0, 1]),
        "missing": lambda: gather_in_order(row, [3 * rank, 3 * rank + 1]),
        "fewer": lambda: gather_in_order(row, [2 * rank, 2 * rank + 1], count=5),
    }
    complaint = refused(cases[name])
    assert gather_in_order([rank], [rank]) == [0, 1], "the ranks are out of step"
    return complaint


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("dtype", "values['x'] differs between ranks (rank 0: torch.float32, rows (); rank 1: torch.float64"),
        (
            "shape",
            "values differs between ranks (rank 0: torch.float32, rows (2,); rank 1: torch.float32, ro",
        ),
        ("keys", "values['y'] differs between ranks (rank 0: torch.float32, rows (); rank 1: nothing)"),
        ("length", "rank 1 cannot be gathered: SamplesError: values[0] must have one row or entry per index"),
        ("values without indices", "must have one row or entry per index (rows: 2, indices: 0)"),
        ("not a column", "values['loss'] must be a tensor with one row per sample, or a list with one entry"),
        ("no rows", "values must be a tensor with one row per sample"),
        ("index", "rank 1 cannot be gathered: TypeError: 'float' object cannot be interpreted as an integer"),
        ("negative", "a sample's index must not be negative (index: -1)"),
        ("unpicklable", "rank 1 cannot be gathered: TypeError: cannot be pickled"),
        ("twice", "samples came more than once (samples: 2, repetitions: 2, the first of them: [0, 1])"),
        ("missing", "samples are missing (samples: 1, the first of them: [2])"),
        ("fewer", "the number of samples is not the expected one (found: 4, expected: 5)"),
    ],
    ids=lambda value: value.split(" (")[0][:22],
)
def test_an_error_on_one_rank_is_raised_on_all_and_leaves_them_in_step(
    pair: RankPool, name: str, complaint: str
) -> None:
    for told in pair.run(mistake, name):
        assert complaint in told


def options(_: int) -> None:
    with pytest.raises(OptionError, match=r"\(to: 2, ranks: 2\)"):
        gather_in_order([], [], to=2)
    with pytest.raises(OptionError, match=r'must be "error" or "drop" \(duplicates: \'first\'\)'):
        gather_in_order([], [], duplicates="first")  # type: ignore[arg-type]


def test_wrong_options_are_refused(pair: RankPool) -> None:
    pair.run(options)
