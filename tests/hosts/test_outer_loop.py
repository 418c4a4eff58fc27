"""Outer steps between two hosts: equal models, few bytes, and what outer loops work with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from outer_training import WIDTH, batch, equal, make_net, plain, rank_of, train_step, values
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Join

import paceline
from paceline import DistributedDataParallel, HostOptimizer, OuterLoop, ShardedOptimizer
from paceline.hooks.compressors import Cast, TopK
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts, sent_bytes

LOW_PRECISION = paceline.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
Make = Callable[[nn.Module], torch.optim.Optimizer]


def sharded(ddp: nn.Module) -> torch.optim.Optimizer:
    return ShardedOptimizer(ddp, torch.optim.AdamW, lr=1e-2)


def once_per_host(ddp: nn.Module) -> torch.optim.Optimizer:
    return HostOptimizer(ddp, torch.optim.AdamW, lr=1e-2)


def train(rank: int, hosts: Hosts, make: Make, steps: int, options: dict[str, Any]) -> Any:
    with rank_of(hosts, rank) as generator:
        net = make_net()
        ddp = DistributedDataParallel(net, **options.get("wrapper", {}))
        outer = OuterLoop(ddp, period=8, **options.get("outer", {}))
        optimizer = make(ddp)
        losses = []
        for _ in range(steps):
            losses.append(train_step(ddp, optimizer, *batch(generator)))
            outer.step()
        before = [parameter.detach().clone() for parameter in net.parameters()]
        outer.finish()
        return losses, before, values(net)


@pytest.mark.parametrize("make", [plain, sharded, once_per_host])
def test_all_ranks_end_with_the_same_bits_and_learn(make: Make) -> None:
    with Hosts() as hosts:
        ranks = run_ranks(train, 4, args=(hosts, make, 100, {"outer": {"momentum": 0.5}}), backend=None)
    for losses, _, after in ranks:
        assert equal(after, ranks[0][2])
        assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert equal(ranks[0][1], ranks[1][1]), "ranks of one host are equal in every step"
    assert not equal(ranks[0][1], ranks[2][1]), "hosts train apart in between"


@pytest.mark.parametrize(
    "options",
    [
        {"outer": {"overlap": 0, "fragments": 1}},
        {"outer": {"overlap": 7, "fragments": 2}},  # several rounds are under way at once
        {"outer": {"compressor": TopK(0.1)}},
        {"outer": {"compressor": Cast(torch.bfloat16), "momentum": 0.0, "lr": 1.0}},
        {"wrapper": {"mixed_precision": LOW_PRECISION}},
        {"wrapper": {"transport": "c10d"}},
    ],
)
def test_hosts_agree_with_other_options(options: dict[str, Any]) -> None:
    with Hosts() as hosts:
        ranks = run_ranks(train, 4, args=(hosts, plain, 24, options), backend=None)
    assert all(equal(after, ranks[0][2]) for _, _, after in ranks)


def use_a_move_of_each_fragment(rank: int, hosts: Hosts, make: Make, options: dict[str, Any]) -> Any:
    """Hosts train apart, and then step without training: all of their moves make them equal."""
    with rank_of(hosts, rank) as generator:
        net = make_net()
        ddp = DistributedDataParallel(net, **options)
        exact = {"compressor": Cast(torch.float32), "lr": 1.0, "momentum": 0.0}
        outer = OuterLoop(ddp, period=4, fragments=4, overlap=0, **exact)
        optimizer = make(ddp)
        for _ in range(3):
            train_step(ddp, optimizer, *batch(generator))
        before = [parameter.detach().clone() for parameter in net.parameters()]
        for _ in range(5):  # a fragment is sent in each step, and moved in the next
            outer.step()
            settle(outer)
        after = [parameter.detach().clone() for parameter in net.parameters()]
        distributed.barrier()
        outer.close()
        return before, after


@pytest.mark.parametrize(
    ("make", "options"),
    [(plain, {}), (sharded, {}), (once_per_host, {}), (plain, {"mixed_precision": LOW_PRECISION})],
)
def test_the_moves_of_all_fragments_bring_hosts_to_their_mean_before_they_finish(
    make: Make, options: dict[str, Any]
) -> None:
    with Hosts() as hosts:
        ranks = run_ranks(use_a_move_of_each_fragment, 4, args=(hosts, make, options), backend=None)
    for first, second, *after in zip(ranks[0][0], ranks[2][0], *(rank[1] for rank in ranks), strict=True):
        assert not torch.allclose(first, second, rtol=0, atol=1e-3)
        for each in after:
            torch.testing.assert_close(each, (first + second) / 2, rtol=0, atol=1e-6)


def average_without_overlap(rank: int, hosts: Hosts) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    with rank_of(hosts, rank, world=2) as generator:
        net = nn.Linear(4, 4).double()
        ddp = DistributedDataParallel(net)
        options = {"overlap": 0, "fragments": 1, "momentum": 0.0, "lr": 1.0}
        outer = OuterLoop(ddp, period=1, compressor=Cast(torch.float64), **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        start = values(net)
        optimizer.zero_grad()
        ddp(torch.randn(8, 4, dtype=torch.float64, generator=generator)).square().mean().backward()
        optimizer.step()
        moved = values(net)
        outer.step()
        assert outer._exchange.wait_for(lambda rounds, _: rounds.decided == 1, 10)
        distributed.barrier()
        outer.step()
        outer.close()
        return start, moved, values(net)


def test_one_outer_step_of_rate_one_without_momentum_is_the_mean_of_the_hosts() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(average_without_overlap, 2, args=(hosts,), backend=None)
    for first, second, result in zip(ranks[0][1], ranks[1][1], ranks[0][2], strict=True):
        torch.testing.assert_close(result, (first + second) / 2, rtol=0, atol=1e-12)
    assert not equal(ranks[0][0], ranks[0][2])


def count_bytes(rank: int, hosts: Hosts) -> tuple[int, int]:
    with rank_of(hosts, rank) as generator:
        net = nn.Sequential(nn.Linear(WIDTH, 2048), nn.ReLU(), nn.Linear(2048, 64))
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=16)
        optimizer = plain(ddp)
        before = sent_bytes()
        for _ in range(64):
            train_step(ddp, optimizer, *batch(generator))
            outer.step()
        outer.finish()
        sent = sent_bytes() - before
        return sent, sum(each.numel() for each in net.parameters())


def test_a_host_sends_half_a_byte_per_parameter_and_period() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(count_bytes, 4, args=(hosts,), backend=None)
    sent, parameters = ranks[0]
    rounds = 64 / 16 + 1  # and one at the end
    assert 0.5 * rounds * parameters < sent < 0.65 * rounds * parameters + 100_000


def settle(outer: OuterLoop) -> None:
    """Wait until nothing is under way, so that results are used in the same steps in every run."""
    if (exchange := outer._exchange) is not None:
        assert exchange.wait_for(lambda rounds, _: rounds.decided >= exchange._next_round, 10)


def resume(rank: int, hosts: Hosts, folder: Path, steps: tuple[int, int], overlap: int) -> Any:
    with rank_of(hosts, rank) as generator:
        net = make_net()
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=8, overlap=overlap)
        optimizer = plain(ddp)
        first, last = steps
        state = paceline.TrainingState(ddp, optimizer, outer=outer)
        path = folder / f"host{rank // 2}.pt"
        for _ in range(first):
            batch(generator)
        if first:
            paceline.load(path, state)
        for _ in range(first, last):
            train_step(ddp, optimizer, *batch(generator))
            outer.step()
            settle(outer)
        assert outer._exchange is None or outer._exchange.state_dict()["moves"], "a move is still to be made"
        paceline.save(path, state)
        distributed.barrier()
        outer.close()
        return values(net)


@pytest.mark.parametrize("overlap", [0, 3])
def test_a_resumed_training_has_the_bits_of_one_that_went_on(tmp_path: Path, overlap: int) -> None:
    cut, last = 12 + overlap // 2, 24
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    with Hosts() as hosts:
        whole = run_ranks(resume, 4, args=(hosts, tmp_path / "whole", (0, last), overlap), backend=None)
    for steps in ((0, cut), (cut, last)):
        with Hosts() as hosts:
            parts = run_ranks(resume, 4, args=(hosts, tmp_path / "parts", steps, overlap), backend=None)
    assert all(equal(one, other) for one, other in zip(whole, parts, strict=True))


def uneven(rank: int, hosts: Hosts) -> Any:
    with rank_of(hosts, rank) as generator:
        net = nn.Linear(WIDTH, 4)
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=4)
        optimizer = plain(ddp)
        with Join([ddp, outer]):
            for _ in range(20 + 3 * rank):
                x = torch.randn(8, WIDTH, generator=generator)
                train_step(ddp, optimizer, x, x[:, :4].argmax(1))
                outer.step()
        outer.finish()
        return values(net)


def test_hosts_and_ranks_may_have_different_numbers_of_inputs() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(uneven, 4, args=(hosts,), backend=None)
    assert all(equal(rank, ranks[0]) for rank in ranks)


def in_shards(rank: int, hosts: Hosts) -> Any:
    with rank_of(hosts, rank) as generator:
        net = nn.Linear(WIDTH, 4)
        ddp = DistributedDataParallel(net, shards=4)
        outer = OuterLoop(ddp, period=4)
        optimizer = plain(ddp)
        for _ in range(12):
            optimizer.zero_grad()
            for x in ddp.shards(torch.randn(16, WIDTH, generator=generator)):
                nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1)).backward()
            optimizer.step()
            outer.step()
        outer.finish()
        return values(net)


def test_shards_work_inside_a_host() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(in_shards, 4, args=(hosts,), backend=None)
    assert all(equal(rank, ranks[0]) for rank in ranks)
