"""The namespaces that stand for hosts."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import distributed

from paceline.errors import OptionError
from paceline.testing import RanksError, run_ranks
from paceline.testing.hosts import Hosts, sent_bytes

NAMESPACES = Path("/run/netns")


def there(hosts: Hosts) -> list[bool]:
    return [NAMESPACES.joinpath(name).exists() for name in hosts.names]


def bytes_on_the_link(rank: int, hosts: Hosts, numel: int) -> int:
    with hosts.group(rank, world=3, host=min(rank, 1)):
        before = sent_bytes()
        distributed.broadcast(torch.ones(numel, dtype=torch.uint8), src=0)
        distributed.barrier()
        return sent_bytes() - before


def test_only_bytes_on_the_link_are_counted() -> None:
    with Hosts() as hosts:
        first, second, third = run_ranks(bytes_on_the_link, 3, args=(hosts, 1_000_000), backend=None)
    # To one of two ranks on the other host, which passes it on, or to both.
    assert 1_000_000 < first < 2_200_000
    assert max(second, third) < 200_000


def failing(rank: int, hosts: Hosts) -> None:
    with hosts.group(rank, world=2, host=rank):
        raise ZeroDivisionError


def test_namespaces_are_removed_also_after_an_error() -> None:
    with Hosts() as hosts:
        assert there(hosts) == [True, True]
        with pytest.raises(RanksError):
            run_ranks(failing, 2, args=(hosts,), backend=None)
    assert there(hosts) == [False, False]


def test_namespaces_of_a_killed_process_are_removed() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    name = f"paceline-{process.pid}-0-a"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with Hosts():
        assert not NAMESPACES.joinpath(name).exists()


def test_two_pairs_of_hosts_can_exist_at_once() -> None:
    with Hosts() as one, Hosts() as two:
        assert there(one) + there(two) == [True] * 4


def sent_while_one_host_sends(rank: int, hosts: Hosts, numel: int) -> int:
    with hosts.group(rank, world=4, host=rank):
        before = sent_bytes()
        if rank == 1:
            distributed.send(torch.ones(numel, dtype=torch.uint8), dst=3)
        elif rank == 3:
            distributed.recv(torch.empty(numel, dtype=torch.uint8), src=1)
        distributed.barrier()
        return sent_bytes() - before


def test_four_hosts_reach_each_other_and_each_counts_what_it_sends() -> None:
    with Hosts(count=4) as hosts:
        assert there(hosts) == [True] * 4
        sent = run_ranks(sent_while_one_host_sends, 4, args=(hosts, 1_000_000), backend=None)
    assert 1_000_000 < sent[1] < 1_200_000
    assert max(sent[0], sent[2], sent[3]) < 200_000
    assert not [*NAMESPACES.glob(f"{hosts.names[0].removesuffix('0')}*")]


@pytest.mark.parametrize("count", [1, 255])
def test_a_count_that_one_network_cannot_have_is_refused(count: int) -> None:
    with pytest.raises(OptionError, match=rf"2 to 254 hosts \(count: {count}\)"):
        Hosts(count=count)
