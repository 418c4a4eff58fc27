"""Outer steps between two hosts: equal models, few bytes, hosts that stop, join late, or are cut off."""

import contextlib
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Join

import paceline
from paceline import DistributedDataParallel, HostOptimizer, OuterLoop, ShardedOptimizer
from paceline.hooks.compressors import Cast, TopK
from paceline.outer.round_parts import DecidedRound
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts, sent_bytes

WIDTH = 32
SECONDS = 30.0
LOW_PRECISION = paceline.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
Make = Callable[[nn.Module], torch.optim.Optimizer]


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


def train_over_a_slow_link(rank: int, hosts: Hosts) -> Any:
    """A change is on its way for 1.5 seconds, and a fragment is due every 0.2 seconds."""
    with rank_of(hosts, rank, world=2):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(1700, 1700) for _ in range(2)))
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=16, fragments=2, overlap=15, grace=1.0)
        exchange = outer._exchange
        assert exchange is not None
        members = note_members(outer)
        distributed.barrier()  # the wrapper has sent all parameters
        if rank == 0:
            hosts.limit("8mbit")
        under_way = 0
        began = time.monotonic()
        while len(members) < 3 and time.monotonic() - began < SECONDS:
            outer.step()
            under_way = max(under_way, sum(each.sent is not None for each in exchange._fragments))
            time.sleep(0.02)
        distributed.barrier()
        outer.close()
        return under_way, members


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


def test_changes_count_that_are_on_their_way_for_longer_than_grace_several_at_once() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(train_over_a_slow_link, 2, args=(hosts,), backend=None)
    for under_way, members in ranks:
        assert under_way == 2
        assert members[:3] == [[0, 1]] * 3


def is_long_back(outer: OuterLoop, members: list[list[int]], before: int) -> bool:
    """Whether a host that was away has counted a few times since, so that the other one knows, too."""
    exchange = outer._exchange
    has_finished = exchange is not None and any(each.has_finished for each in exchange.rounds.peers.values())
    return before > 0 and (has_finished or members[before:].count([0, 1]) >= 8)


def stop_a_host(rank: int, hosts: Hosts, stopped: int) -> Any:
    with rank_of(hosts, rank) as generator:
        net = make_net()
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=8, grace=1.0)
        optimizer = plain(ddp)
        members = note_members(outer)
        if rank // 2 == stopped:
            stop_for(5.0, after=1.0)
        longest, lone, before = 0.0, 0, 0
        began = start = time.monotonic()
        while not over(ddp, is_long_back(outer, members, before) or time.monotonic() - began > SECONDS):
            train_step(ddp, optimizer, *batch(generator))
            outer.step()
            longest, start = max(longest, time.monotonic() - start), time.monotonic()
            lone += bool(members) and not outer.hosts
            if (lone or longest > 4.5) and not before:
                before = len(members)
            time.sleep(0.01)
        is_back = before > 0 and [0, 1] in members[before:]
        outer.finish()
        return longest, lone, is_back, values(net)


def stop_for(seconds: float, *, after: float) -> None:
    command = f"sleep {after}; kill -STOP {os.getpid()}; sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", command])


def over(ddp: nn.Module, says: bool) -> bool:
    """Whether the first rank of this host says that training is over."""
    flag = torch.tensor([float(says and ddp.process_group.rank() == 0)])
    distributed.all_reduce(flag, group=ddp.process_group)
    return bool(flag)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_host_stalls_nobody_and_is_back_in_step(stopped: int) -> None:
    with Hosts() as hosts:
        ranks = run_ranks(stop_a_host, 4, args=(hosts, stopped), backend=None)
    other = 2 * (1 - stopped)
    longest, lone, _, after = ranks[other]
    assert lone > 20, "it trained alone for a while"
    assert longest < 4.0, "and did not wait for the other host until it was back"
    assert ranks[0][2], "a round counted both again"
    assert ranks[2][2]
    assert all(equal(rank[3], after) for rank in ranks)


def cut_the_wire(rank: int, hosts: Hosts) -> Any:
    with rank_of(hosts, rank) as generator:
        net = make_net()
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=8, grace=1.0)
        optimizer = plain(ddp)
        members = note_members(outer)
        lone, before, is_cut = 0, 0, False
        began = time.monotonic()
        while not over(ddp, is_long_back(outer, members, before) or time.monotonic() - began > SECONDS):
            train_step(ddp, optimizer, *batch(generator))
            outer.step()
            lone += bool(members) and not outer.hosts
            if lone and not before:
                before = len(members)
            want = len(members) > 4 and lone <= 20
            if rank == 0 and want != is_cut:
                set_wire(hosts, "down" if want else "up")
                is_cut = want
            time.sleep(0.01)
        is_back = before > 0 and [0, 1] in members[before:]
        outer.finish()
        return lone, is_back, values(net)


def set_wire(hosts: Hosts, state: str) -> None:
    command = ["ip", "-n", hosts.names[0], "link", "set", "wire", state]
    subprocess.run(command, check=True, timeout=10)


def test_hosts_that_cannot_reach_each_other_go_on_and_end_with_one_model() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(cut_the_wire, 4, args=(hosts,), backend=None)
    for lone, is_back, _ in (ranks[0], ranks[2]):
        assert lone > 0
        assert is_back, "a round counted both again"
    assert all(equal(rank[2], ranks[0][2]) for rank in ranks)


def meet(rank: int, hosts: Hosts, folder: Path) -> Any:
    """Each host is a job of its own; the second comes when the first one has trained for a while."""
    host = rank // 2
    has_learned = folder / "has learned"
    began = time.monotonic()
    while host == 1 and not has_learned.exists() and time.monotonic() - began < SECONDS:
        time.sleep(0.01)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from paceline.comm.rendezvous import file_store_group
    from paceline.comm.shm.local_ranks import HOST_VARIABLE
    from paceline.testing.hosts import enter

    enter(hosts.names[host])
    os.environ[HOST_VARIABLE] = hosts.names[host]
    with file_store_group(folder / str(host), rank=rank % 2, world=2, backend="gloo"):
        torch.set_num_threads(1)
        torch.manual_seed(host)  # the latecomer's own start does not matter
        net = nn.Linear(WIDTH, 4)
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=8, grace=2.0, meet=f"{hosts.addresses[0]}:29777")
        optimizer = plain(ddp)
        generator = torch.Generator().manual_seed(rank)
        losses: list[float] = []
        steps_alone = 0  # the latecomer's, before it has the state
        members = note_members(outer)
        while not over(ddp, members.count([0, 1]) >= 8 or time.monotonic() - began > SECONDS):
            x = torch.randn(16, WIDTH, generator=generator)
            losses.append(train_step(ddp, optimizer, x, x[:, :4].argmax(1)))
            outer.step()
            if len(losses) == 100:
                has_learned.touch()
            if outer._exchange is not None and not outer._exchange.rounds.is_current:
                steps_alone = len(losses)
            time.sleep(0.01)
        outer.finish()
        return losses, steps_alone, members.count([0, 1]) >= 4, values(net)


def test_a_host_that_joins_late_takes_the_current_state(tmp_path: Path) -> None:
    with Hosts() as hosts:
        ranks = run_ranks(meet, 4, args=(hosts, tmp_path), backend=None)
    (first, _, counts, after), (late, steps_alone, counts_too, _) = ranks[0], ranks[2]
    assert counts
    assert counts_too
    assert all(equal(rank[3], after) for rank in ranks)
    taught = late[steps_alone + 2 :][:8]
    assert len(taught) == 8
    assert sum(taught) < 0.8 * sum(first[:8]), "it goes on from what the other host has learned"


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


def lose_a_host(rank: int, hosts: Hosts) -> Any:
    with rank_of(hosts, rank) as generator:
        net = nn.Linear(WIDTH, 4)
        ddp = DistributedDataParallel(net)
        outer = OuterLoop(ddp, period=4, grace=1.0)
        optimizer = plain(ddp)
        members = note_members(outer)
        steps = 0
        began = time.monotonic()
        while not over(ddp, members.count([0]) > 5 or time.monotonic() - began > SECONDS):
            if rank >= 2 and steps == 10:
                if outer._exchange is not None:
                    outer._exchange._links.close()  # without a goodbye, as when its processes are killed
                distributed.barrier()
                return None
            x = torch.randn(8, WIDTH, generator=generator)
            train_step(ddp, optimizer, x, x[:, :4].argmax(1))
            outer.step()
            steps += 1
            time.sleep(0.01)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            outer.finish()
        distributed.barrier()
        return members, [str(each.message) for each in told]


def test_the_others_end_their_training_when_a_host_is_lost_and_say_so() -> None:
    with Hosts() as hosts:
        ranks = run_ranks(lose_a_host, 4, args=(hosts,), backend=None)
    members, told = ranks[0]
    assert members.count([0]) > 5
    assert any("hosts are away at the end of training" in each and "hosts: [1]" in each for each in told)
