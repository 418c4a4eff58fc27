"""Module buffers: what is made equal, when, and by whom."""

import contextlib
import threading
import time
from typing import Any

import pytest
import torch
from batches import rows
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel.distributed import _BufferCommHookLocation
from wrappers import TORCHS_OPTIONS, WIDTH, WRAPPERS, Net, equal_on_all, grads, options_for, refusal, train

from paceline import DistributedDataParallel
from paceline.testing import RankPool, run_ranks

TIMEOUT = 10.0


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = norm
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh())


class OwnNorm(nn.Module):
    """Normalises by a function, with running statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.mean, self.var, training=self.training)


class ByData(nn.Module):
    """Writes to its buffer behind autograd's back, as much old code does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        return x - self.mean


class Reassigning(ByData):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return x - self.mean


class Instance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.t().unsqueeze(0)).squeeze(0).t()


NORMS = {
    "BatchNorm": lambda: nn.BatchNorm1d(WIDTH),
    "BatchNorm by cumulative mean": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "InstanceNorm": Instance,
    "functional": OwnNorm,
    "through .data": ByData,
    "reassigned": Reassigning,
}


def statistics(rank: int, wrapper: str, norm: str, options: dict[str, bool]) -> list[list[torch.Tensor]]:
    """Parameters and buffers after each of ten steps and a look in between and at the end."""
    ddp = WRAPPERS[wrapper](Normed(NORMS[norm]()), **options_for(wrapper, options))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(10):
        train(ddp, rank, step)
        optimizer.step()
        seen.append([tensor.detach().clone() for tensor in [*ddp.parameters(), *ddp.buffers()]])
        if step in (3, 8, 9):
            ddp.eval()
            with torch.no_grad():
                ddp(rows(rank, 50 + step))
            ddp.train()
            seen.append([buffer.clone() for buffer in ddp.buffers()])
    return seen


@pytest.mark.parametrize("options", [{}, {"forward_sync_buffers": False}], ids=["synced", "own"])
@pytest.mark.parametrize("norm", NORMS)
def test_parameters_and_buffers_are_torchs_bit_for_bit(
    norm: str, options: dict[str, bool], pool: RankPool
) -> None:
    ours, theirs = (pool.run(statistics, wrapper, norm, options) for wrapper in ("paceline", "torch"))
    for rank in range(2):
        for moment, (mine, others) in enumerate(zip(ours[rank], theirs[rank], strict=True)):
            for one, other in zip(mine, others, strict=True):
                assert one.equal(other), f"rank {rank}, moment {moment}"


KINDS = {
    "int64": lambda rank: torch.full((3,), rank),
    "bool": lambda rank: torch.tensor([rank == 0, True]),
    "complex64": lambda rank: torch.full((2,), complex(rank, 1)),
    "uint8": lambda rank: torch.full((2,), rank, dtype=torch.uint8),
    "bfloat16": lambda rank: torch.full((2, 2), rank, dtype=torch.bfloat16),
    "no elements": lambda rank: torch.zeros(0, rank + 1 - rank),
    "no dimensions": lambda rank: torch.tensor(float(rank)),
    "transposed": lambda rank: torch.arange(6.0).view(2, 3).t() + rank,
    "with a gradient": lambda rank: torch.full((2,), float(rank), requires_grad=True),
}


def of_kind(rank: int, wrapper: str, kind: str) -> tuple[object, list[bool]]:
    net = Net()
    net.register_buffer("odd", KINDS[kind](rank))
    ddp = WRAPPERS[wrapper](net)
    equal = [equal_on_all([net.odd])]

    def act() -> None:
        for step in range(3):
            with torch.no_grad():
                net.odd.copy_(KINDS[kind](rank))
            train(ddp, rank, step)
            equal.append(equal_on_all([net.odd]))

    return refusal(act), equal


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_every_kind_are_made_equal(kind: str) -> None:
    ours = run_ranks(of_kind, args=("paceline", kind), timeout=TIMEOUT)
    assert ours == run_ranks(of_kind, args=("torch", kind), timeout=TIMEOUT)
    assert ours == [(None, [True] * 4)] * 2


def hooked(rank: int, wrapper: str, location: str, wait: bool) -> list[Any]:
    ddp = WRAPPERS[wrapper](Net())
    seen: list[Any] = []

    def hook(state: object, buffers: dict[str, torch.Tensor]) -> Any:
        seen.append((state, list(buffers), len(forwards)))
        future: torch.futures.Future[None] = torch.futures.Future()

        def finish() -> None:
            time.sleep(0.1)
            seen.append("finished")
            future.set_result(None)

        if not wait:
            for buffer in buffers.values():
                distributed.broadcast(buffer, 0)
            return None
        threading.Thread(target=finish).start()
        return [future]

    forwards: list[int] = []
    ddp.module.register_forward_hook(lambda *_: forwards.append(1))
    ddp._register_buffer_comm_hook("state", hook, _BufferCommHookLocation[location])
    for step in range(2):
        with torch.no_grad():
            ddp.module.scale.fill_(1.0 + rank)
        train(ddp, rank, step)
        seen.append("backward")
    seen.append(equal_on_all([*ddp.buffers()]))
    with ddp.no_sync():
        train(ddp, rank)
        train(ddp, rank)
    return seen


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("location", ["PRE_FORWARD", "POST_FORWARD"])
def test_a_buffer_hook_is_called_as_by_torch_and_its_futures_are_waited_for(
    location: str, wait: bool, pool: RankPool
) -> None:
    ours = pool.run(hooked, "paceline", location, wait)
    theirs = pool.run(hooked, "torch", location, wait)
    assert [each[: 8 if wait else None] for each in ours] == [each[: 8 if wait else None] for each in theirs]


def changed_by_hand(rank: int, wrapper: str, at: int, how: str) -> list[bool]:
    net = Net()
    ddp = WRAPPERS[wrapper](net)
    equal = []
    for step in range(10):
        if step == at and rank == 0:
            if how == "in place":
                net.scale.add_(1)
            elif how == "replaced":
                net.scale = net.scale + 1
            elif how == "loaded":
                ddp.load_state_dict({**ddp.state_dict(), "module.scale": net.scale + 1})
            else:
                net.scale.data = net.scale + 1
        train(ddp, rank, step)
        equal.append(equal_on_all([net.scale]))
    return equal


@pytest.mark.parametrize("how", ["in place", "replaced", "loaded", "through .data"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 7])
def test_a_change_on_rank_0_reaches_the_others(at: int, how: str, pool: RankPool) -> None:
    for equal in pool.run(changed_by_hand, "paceline", at, how):
        # Constant for three steps, so it is seen at the end of its step: one step later.
        assert [step for step, same in enumerate(equal) if not same] in ([[]] if at < 3 else [[], [at]])


def added_later(rank: int, wrapper: str, how: str) -> bool:
    net = Net()
    ddp = WRAPPERS[wrapper](net)
    for step in range(5):
        train(ddp, rank, step)
    if how == "buffer":
        net.register_buffer("more", torch.full((2,), float(rank)))
    else:
        net.last.register_buffer("more", torch.full((2,), float(rank)))
        net.first.add_module("part", nn.BatchNorm1d(WIDTH))
        net.first.part.running_mean.fill_(rank)
    for step in range(3):
        train(ddp, rank, step)
    return equal_on_all([*ddp.buffers()])


@pytest.mark.parametrize("how", ["buffer", "module"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_buffers_that_are_added_after_wrapping_are_made_equal(wrapper: str, how: str, pool: RankPool) -> None:
    assert pool.run(added_later, wrapper, how) == [True] * 2


def answers(rank: int, wrapper: str) -> list[object]:
    ddp = WRAPPERS[wrapper](Net())
    said: list[object] = [ddp.will_sync_module_buffers()]
    moments = [contextlib.nullcontext, ddp.no_sync, ddp.no_sync, contextlib.nullcontext, torch.no_grad]
    for step, moment in enumerate([*moments, contextlib.nullcontext]):
        with moment():
            out = ddp(rows(rank, step))
            said.append((ddp.will_sync_module_buffers(), ddp._check_sync_bufs_pre_fwd()))
            if out.requires_grad:
                out.sum().backward()
    if "forward_sync_buffers" in TORCHS_OPTIONS:
        ddp.forward_sync_buffers = False
    else:
        ddp.broadcast_buffers = False
    said.append((ddp.will_sync_module_buffers(), ddp.broadcast_buffers))
    bare = WRAPPERS[wrapper](nn.Linear(2, 2))
    return [*said, bare.will_sync_module_buffers()]


def test_whether_the_next_forward_syncs_is_told_as_by_torch(pool: RankPool) -> None:
    assert pool.run(answers, "paceline") == pool.run(answers, "torch")


def looks(rank: int, looker: int, looks: int) -> tuple[bool, bool]:
    """A forward without gradients on one rank only, in every step."""
    ddp = DistributedDataParallel(Normed(nn.BatchNorm1d(WIDTH)))
    for step in range(8):
        if rank == looker:
            ddp.eval()
            with torch.no_grad():
                for _ in range(looks):
                    ddp(rows(rank, 70))
            ddp.train()
        train(ddp, rank, step)
    return equal_on_all(grads(ddp)), equal_on_all([*ddp.parameters()])


@pytest.mark.parametrize(("looker", "count"), [(0, 1), (0, 3), (1, 1), (1, 3)])
def test_one_rank_may_look_at_its_model_alone(looker: int, count: int) -> None:
    assert run_ranks(looks, args=(looker, count), timeout=TIMEOUT) == [(True, True)] * 2


def evaluate_first(rank: int) -> None:
    ddp = DistributedDataParallel(Normed(nn.BatchNorm1d(WIDTH)))
    with torch.inference_mode():
        ddp(rows(rank))
    for _ in range(3):
        ddp(rows(rank)).square().sum().backward()
    assert equal_on_all(grads(ddp))


def test_training_may_follow_an_evaluation_in_inference_mode(pair: RankPool) -> None:
    pair.run(evaluate_first)
