"""torch's ZeroRedundancyOptimizer on our wrapper, as on torch's."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from batches import rows
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from wrappers import WIDTH, WRAPPERS, assert_equal_bits, equal_on_all

from paceline.testing import RankPool

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of TorchScript
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

STEPS = 6


class Deep(nn.Sequential):
    """Enough layers for several buckets."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(
            nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 2)
        )


def make(wrapper: str = "paceline", **options: Any) -> Any:
    return WRAPPERS[wrapper](Deep(), bucket_cap_mb=0.002, **options)


def train(ddp: Any, optimizer: Any, rank: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(rows(rank, step)).square().mean().backward()
        optimizer.step()


def values(ddp: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def as_plain(rank: int, kind: type[torch.optim.Optimizer], view: bool, grad_view: bool) -> None:
    plain, ours = make(), make(gradient_as_bucket_view=grad_view)
    train(plain, kind(plain.parameters(), lr=0.05), rank)
    zero = ZeroRedundancyOptimizer(ours.parameters(), kind, parameters_as_bucket_view=view, lr=0.05)
    train(ours, zero, rank)
    assert_equal_bits(values(ours), values(plain))
    assert equal_on_all(values(ours))


@pytest.mark.parametrize("grad_view", [False, True], ids=["", "gradients as views"])
@pytest.mark.parametrize("view", [False, True], ids=["", "parameters as views"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_parameters_are_those_of_the_plain_optimizer(
    ranks: RankPool, kind: type[torch.optim.Optimizer], view: bool, grad_view: bool
) -> None:
    ranks.run(as_plain, kind, view, grad_view)


def consolidated(rank: int) -> None:
    plain, ours = make(), make()
    adam = torch.optim.Adam(plain.parameters(), lr=0.05)
    train(plain, adam, rank)
    zero = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, lr=0.05)
    train(ours, zero, rank)
    zero.consolidate_state_dict(to=0)
    if rank == 0:
        ours_state, plain_state = zero.state_dict()["state"], adam.state_dict()["state"]
        assert ours_state.keys() == plain_state.keys()
        for number, state in plain_state.items():
            assert_equal_bits([*ours_state[number].values()], [*state.values()])


def test_state_is_consolidated(ranks: RankPool) -> None:
    ranks.run(consolidated)


# The step overlapped with backward.


def waited_for(state: Any, bucket: Any) -> Any:
    """What follows a future that is done runs at once: over gloo every rank then does all in one order."""
    future = allreduce_hook(state, bucket)
    future.wait()
    return future


def gloo_allowed() -> Any:
    """torch refuses these hooks over gloo, whose ranks may come to their collectives in different orders."""
    return mock.patch.object(distributed, "get_backend", return_value="as good as nccl")


def overlapped(
    rank: int, wrapper: str, make_hook: Callable[..., Any], inner: Callable[..., Any], shards: bool
) -> list[Tensor]:
    ddp = make(wrapper)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.05)
    with gloo_allowed():
        ddp.register_comm_hook(None, make_hook(inner, ddp, zero, shard_buckets=shards))
    seen = [values(ddp)]
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(rows(rank, step)).square().mean().backward()
        seen.append(values(ddp))
    moved = [not torch.equal(before[0], after[0]) for before, after in itertools.pairwise(seen)]
    assert moved == [False, False, True, True, True, True], f"steps that changed parameters: {moved}"
    assert equal_on_all(seen[-1])
    return seen[-1]


@pytest.mark.parametrize("shards", [False, True], ids=["whole buckets", "shards of buckets"])
@pytest.mark.parametrize(
    ("hook", "inner"),
    [
        ("hook_with_zero_step", allreduce_hook),
        ("hook_with_zero_step", fp16_compress_hook),
        ("hook_with_zero_step_interleaved", waited_for),
    ],
)
def test_overlapped_steps_are_those_on_torchs_wrapper(
    pair: RankPool, hook: str, inner: Callable[..., Any], shards: bool
) -> None:
    make_hook = getattr(ddp_zero_hook, hook)
    theirs, ours = (
        pair.run(overlapped, wrapper, make_hook, inner, shards) for wrapper in ("torch", "paceline")
    )
    assert_equal_bits(ours[0], theirs[0])


def test_overlapped_steps_work_on_three_ranks() -> None:
    with RankPool(3, timeout=20.0) as three:
        three.run(overlapped, "paceline", ddp_zero_hook.hook_with_zero_step, allreduce_hook, False)
