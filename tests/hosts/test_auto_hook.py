"""What the hook "auto" chooses on links of different rates, and when a link changes."""

import logging
import os
import signal
import statistics
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

from paceline import DistributedDataParallel, OuterLoop, hooks
from paceline.comm.group import Group
from paceline.comm.link_speed import Link, measure_links, open_measuring_group
from paceline.ddp.reducer import auto_tuner, link_measurement
from paceline.errors import PacelineError
from paceline.testing import RanksError, rank_answers, run_ranks
from paceline.testing.hosts import Hosts
from paceline.watch import watcher

# Of four layers: such that a step at 10 Mbit/s takes less than a second, and more than a megabyte per layer.
SMALL, LARGE = 256, 1024
# Not measured: on a busy machine, no link between two of its processes is fast.
FAST = Link(latency=1e-5, bandwidth=1e10)


def net(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def step(ddp: nn.Module, width: int, rank: int, number: int) -> list[Tensor]:
    torch.manual_seed(100 * number + rank)
    ddp.zero_grad()
    ddp(torch.randn(2, width)).square().mean().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


def chosen_and_gradients(
    rank: int, hosts: Hosts, width: int, ranks_per_host: int, max_error: float, link: Link | None
) -> tuple[str, str, list[Tensor], list[Tensor]]:
    if link is not None:
        link_measurement.measure_links = lambda *_: {(0, 1): link}
    with hosts.group(rank, world=2 * ranks_per_host, host=rank // ranks_per_host):
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("paceline").addHandler(handler)
        hook = hooks.auto(max_error=max_error)
        ddp = DistributedDataParallel(net(width), hook=hook)
        assert hook.choice is not None
        make = {"average": hooks.average, "bf16": hooks.bf16, "int4": hooks.int4}
        fixed = make[hook.choice.name]()
        if hook.choice.name == "bf16":
            fixed = hooks.with_error_feedback(fixed)
        other = DistributedDataParallel(net(width), hook=fixed)
        ours, theirs = [], []
        for number in range(3):
            ours += step(ddp, width, rank, number)
            theirs += step(other, width, rank, number)
        return hook.choice.name, "; ".join(said), ours, theirs


def run(
    hosts: Hosts, width: int, ranks_per_host: int, max_error: float = 2**-8, link: Link | None = None
) -> list[str]:
    found = run_ranks(
        chosen_and_gradients,
        2 * ranks_per_host,
        args=(hosts, width, ranks_per_host, max_error, link),
        timeout=60.0,
        backend=None,
    )
    for name, _, ours, theirs in found:
        assert name == found[0][0]
        assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
    assert f"the hook auto: {found[0][0]} is predicted to take" in found[0][1]
    assert not any(said for _, said, _, _ in found[1:])
    return [name for name, _, _, _ in found]


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_a_slow_link_is_compressed_for_with_the_gradients_of_that_hook(ranks_per_host: int) -> None:
    with Hosts() as hosts:
        hosts.limit("10mbit")
        assert {*run(hosts, SMALL, ranks_per_host)} == {"bf16"}


def test_a_larger_error_is_used_where_it_is_allowed() -> None:
    with Hosts() as hosts:
        hosts.limit("10mbit")
        assert {*run(hosts, SMALL, 1, max_error=1 / 14)} == {"int4"}


def measured(rank: int, hosts: Hosts) -> list[Link]:
    """The link of this rank, measured five times: a busy machine disturbs some of them."""
    with hosts.group(rank, world=2, host=rank):
        group, device = Group(distributed.group.WORLD), torch.device("cpu")
        opened = open_measuring_group(group, device, "test")
        return [link for _ in range(5) for link in measure_links(group, opened, device).values()]


def test_a_link_that_is_slow_in_one_direction_has_the_bandwidth_of_that_direction() -> None:
    with Hosts() as hosts:
        hosts.limit("100mbit")
        hosts.limit("10mbit", only=hosts.names[1])
        for links in run_ranks(measured, 2, args=(hosts,), timeout=60.0, backend=None):
            assert 1.25e6 / 2 < statistics.median(link.bandwidth for link in links) < 1.25e6 * 2


def test_a_fast_link_is_not_compressed_for() -> None:
    with Hosts() as hosts:
        assert {*run(hosts, LARGE, 1, link=FAST)} == {"average"}


def decisions_over_time(rank: int, hosts: Hosts) -> list[tuple[str, float]]:
    """The decisions of 12 steps on a link that seems to be fast, and of later ones until there is another."""
    auto_tuner._WINDOW, auto_tuner._STEPS_PER_MEASUREMENT = 3, 0  # type: ignore[misc]
    measure = link_measurement.measure_links
    link_measurement.measure_links = lambda *_: {(0, 1): FAST}
    with hosts.group(rank, world=2, host=rank):
        hook = hooks.auto(max_error=1 / 14)
        # With caps of its own, a wrapper needs no steps to try others.
        ddp = DistributedDataParallel(net(SMALL), hook=hook, bucket_cap_mb=25)
        decisions: list[tuple[str, float]] = []
        while len({*decisions}) < 2:
            if len(decisions) == 12:
                link_measurement.measure_links = measure
                if rank == 0:
                    hosts.limit("10mbit")
            step(ddp, SMALL, rank, len(decisions))
            assert hook.choice is not None
            decisions.append((hook.choice.name, hook.choice.link.bandwidth))
        return decisions


def test_all_ranks_decide_again_at_the_same_step_when_the_link_changes() -> None:
    with Hosts() as hosts:
        first, second = run_ranks(decisions_over_time, 2, args=(hosts,), timeout=90.0, backend=None)
    assert first == second
    assert {*first[:-1]} == {("average", FAST.bandwidth)}
    assert len(first) > 12
    name, bandwidth = first[-1]
    assert name == "int4"
    assert bandwidth < 2.5e6


def killed_in_a_measurement(rank: int, hosts: Hosts, notes: Path) -> None:
    auto_tuner._WINDOW, auto_tuner._STEPS_PER_MEASUREMENT = 1, 0  # type: ignore[misc]
    with hosts.group(rank, world=4, host=rank // 2):
        ddp = DistributedDataParallel(net(SMALL), hook=hooks.auto(max_error=0), bucket_cap_mb=25)
        auto_tuner.has_changed = lambda *_: True
        if rank == 2:
            link_measurement.measure_links = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
        try:
            for number in range(20):
                time.sleep(0.3)  # hosts tell each other every second what their ranks do
                step(ddp, SMALL, rank, number)
        except PacelineError as error:
            (notes / str(rank)).write_text(str(error))
            # As a program stays that ends by this error. Some ranks learn of it only when others have ended.
            time.sleep(watcher._HEAR_SECONDS)
            os._exit(0)


def test_a_rank_that_is_killed_while_links_are_measured_is_named_on_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_answers, "GRACE_SECONDS", 40.0)
    with Hosts() as hosts, pytest.raises(RanksError):
        run_ranks(killed_in_a_measurement, 4, args=(hosts, tmp_path), timeout=90.0, backend=None)
    for rank in (0, 1, 3):
        told = (tmp_path / str(rank)).read_text()
        assert "waited in vain for the other ranks to measure links for the hook auto before step" in told
        assert "rank 2 is missing: it has ended" in told


def moved_to_one_host(rank: int, hosts: Hosts, by_outer_loop: bool) -> tuple[str, list[Tensor], list[Tensor]]:
    link_measurement.measure_links = lambda *_: {(0, 1): Link(latency=1e-4, bandwidth=1e5)}
    with hosts.group(rank, world=4, host=rank // 2):
        hook = hooks.auto()
        ddp = DistributedDataParallel(net(SMALL), hook=hook)
        assert hook.choice is not None
        assert hook.choice.name != "average"
        groups = [distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        if by_outer_loop:
            OuterLoop(ddp)
        else:
            ddp._update_process_group(groups[rank // 2])
        plain = DistributedDataParallel(net(SMALL), process_group=groups[rank // 2])
        ours, theirs = [], []
        for number in range(3):
            ours += step(ddp, SMALL, rank, number)
            theirs += step(plain, SMALL, rank, number)
        return hook.description, ours, theirs


@pytest.mark.parametrize("by_outer_loop", [False, True])
def test_a_wrapper_that_moves_to_the_ranks_of_one_host_averages_without_a_hook(by_outer_loop: bool) -> None:
    with Hosts() as hosts:
        found = run_ranks(moved_to_one_host, 4, args=(hosts, by_outer_loop), timeout=60.0, backend=None)
    for description, ours, theirs in found:
        assert description == "auto"
        assert all(map(torch.equal, ours, theirs))
