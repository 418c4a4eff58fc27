"""The namespaces that stand for hosts."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import distributed

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
