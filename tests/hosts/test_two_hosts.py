"""Two hosts of several ranks: what is sent between them, and which errors name a rank that dies."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from paceline import DistributedDataParallel, hooks
from paceline.testing import RanksError, run_ranks
from paceline.testing.hosts import Hosts, sent_bytes

WIDTH = 512
STEPS = 4
# For one exchange a host: 2 N (H-1)/H.
GRADIENTS = 4 * 4 * (WIDTH * WIDTH + WIDTH)
BUFFER = 1_000_000


class Counting(nn.Module):
    """A large buffer that changes in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(BUFFER // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum()
        return x * self.weight


def bytes_between_hosts(rank: int, hosts: Hosts, layout: str) -> dict[str, float]:
    """Bytes a step that this rank's host sends."""
    with hosts.group(rank, world=len(layout), host="ab".index(layout[rank])):
        linear = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        compressed = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        return {
            "gradients": counted(linear),
            "int8": counted(compressed, hooks.int8()),
            "buffers": counted(Counting()),
        }


def counted(module: nn.Module, hook: hooks.Hook | None = None) -> float:
    ddp = DistributedDataParallel(module)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    for step in range(2 + STEPS):
        if step == 2:  # the plan is settled
            distributed.barrier()
            before = sent_bytes()
        ddp.zero_grad()
        ddp(torch.ones(2, WIDTH)).square().mean().backward()
    distributed.barrier()
    return (sent_bytes() - before) / STEPS


@pytest.mark.parametrize("layout", ["aabb", "aaab"])
def test_gradients_and_buffers_are_sent_between_hosts_once_per_host(layout: str) -> None:
    with Hosts() as hosts:
        sent = run_ranks(bytes_between_hosts, len(layout), args=(hosts, layout), timeout=60.0, backend=None)
    first, last = sent[0], sent[-1]
    # With the headers of TCP and its answers to what has come, of which there are more on a busy machine.
    assert GRADIENTS < first["gradients"] < 1.05 * GRADIENTS
    assert GRADIENTS < last["gradients"] < 1.05 * GRADIENTS
    assert first["int8"] / GRADIENTS == pytest.approx((1 + 4 / 256) / 4, rel=0.04)
    assert BUFFER < first["buffers"] < 1.05 * BUFFER
    assert last["buffers"] < 0.05 * BUFFER


def dying(rank: int, hosts: Hosts, notes: Path) -> None:
    with hosts.group(rank, world=4, host=rank // 2):
        ddp = DistributedDataParallel(nn.Linear(256, 256))
        ddp(torch.ones(1, 256)).sum().backward()
        distributed.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            ddp(torch.ones(1, 256)).sum().backward()
        seconds = time.monotonic() - began
        # Written before the end of this process, which the others would hear of.
        notes.joinpath(str(rank)).write_text(f"{seconds}\n{caught.value}")
        while len([*notes.iterdir()]) < 3:
            time.sleep(0.05)
        # Those of a host that has lost a rank cannot leave the group in order.
        os._exit(0)


def test_a_rank_that_dies_is_named_on_both_hosts(tmp_path: Path) -> None:
    with Hosts() as hosts, pytest.raises(RanksError):
        run_ranks(dying, 4, args=(hosts, tmp_path), timeout=20.0, backend=None)
    notes = {int(note.name): note.read_text().partition("\n") for note in tmp_path.iterdir()}
    assert notes.keys() == {0, 2, 3}
    assert float(notes[0][0]) < 2
    # The host leader that it reduced with gets an error of gloo, and tells the other rank of its host.
    for _, _, said in notes.values():
        assert "rank 1 is missing: it has ended" in said
        assert not re.search("rank [^1] is missing", said)
