"""What hooks send, counted at a link between two network namespaces."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed, nn

from paceline import DistributedDataParallel, hooks
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts, sent_bytes

STEPS = 4
PERIOD = 4
WIDTH = 512
HOOKS: dict[str, Callable[[], hooks.Hook]] = {
    "average": hooks.average,
    "fp16": hooks.fp16,
    "bf16": hooks.bf16,
    "int8": hooks.int8,
    "int4": hooks.int4,
    "top_k": lambda: hooks.top_k(0.01),
    "power_sgd": lambda: hooks.power_sgd(4, start_step=2),
    "post_local_sgd": lambda: hooks.post_local_sgd(start_step=2, period=PERIOD),
}
# Of what average sends: elements of four bytes, at two ranks.
STATED = {
    "fp16": 2 / 4,
    "bf16": 2 / 4,
    "int8": (1 + 4 / 256) / 4,
    "int4": (0.5 + 4 / 256) / 4,
    "top_k": 0.01 * 8 / 4,
    "power_sgd": (4 * (WIDTH + WIDTH) + WIDTH) / (WIDTH * WIDTH + WIDTH),
    "post_local_sgd": 1 / PERIOD,
}


def bytes_a_step(rank: int, hosts: Hosts) -> dict[str, float]:
    with hosts.group(rank, world=2, host=rank):
        return {name: counted(make()) for name, make in HOOKS.items()} | {"nothing": counted(None)}


def counted(hook: hooks.Hook | None) -> float:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    batch = torch.randn(2, WIDTH) + distributed.get_rank()
    for step in range(2 + STEPS):
        if step == 2:  # the plan is settled
            distributed.barrier()
            before = sent_bytes()
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        if isinstance(hook, hooks.PostLocalSGD):
            hook.average_parameters(ddp.parameters())
    distributed.barrier()
    return (sent_bytes() - before) / STEPS


@pytest.fixture(scope="module")
def sent() -> Iterator[dict[str, float]]:
    with Hosts() as hosts:
        yield run_ranks(bytes_a_step, 2, args=(hosts,), timeout=60.0, backend=None)[0]


def test_an_averaging_hook_sends_as_much_as_no_hook(sent: dict[str, float]) -> None:
    gradients = 4 * 4 * (WIDTH * WIDTH + WIDTH)
    # How many acknowledgements there are depends on how busy the host is.
    for name in ("average", "nothing"):
        assert gradients < sent[name] < 1.05 * gradients


@pytest.mark.parametrize("name", STATED)
def test_each_hook_sends_as_many_bytes_as_stated(sent: dict[str, float], name: str) -> None:
    assert sent[name] / sent["average"] == pytest.approx(STATED[name], rel=0.08, abs=0.002)
