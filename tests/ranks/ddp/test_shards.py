"""Steps in shards: the same bits for every number of ranks, and what is refused."""

import contextlib
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import same_bits_table
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.utils.data import DataLoader

import paceline
from paceline.errors import (
    MismatchError,
    OptionError,
    PeerError,
    RanksError,
    StepError,
    StructureError,
    UnsupportedError,
    WeightsError,
)
from paceline.testing import run_ranks

SHARDS = same_bits_table.SHARDS


def trained(case: str, world: int, steps: int = 4) -> str:
    ranks = run_ranks(same_bits_table.train, world, args=(case, steps), timeout=60)
    assert len({parameters for _, parameters in ranks}) == 1
    everything: str = ranks[0][0]
    return everything


@pytest.mark.parametrize("case", same_bits_table.CASES)
def test_the_number_of_ranks_changes_no_bit(case: str) -> None:
    assert len({trained(case, world) for world in (1, 2, 3)}) == 1


def test_four_and_eight_ranks_change_no_bit_either() -> None:
    assert len({trained("conv net, BatchNorm, dropout", world) for world in (1, 4, 8)}) == 1


def test_nor_does_a_change_of_their_number_in_the_middle_of_a_run() -> None:
    case = "conv net, BatchNorm, dropout"
    assert same_bits_table.changing_worlds(case, 9, (2, 3, 1)) == trained(case, 1, 9)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def wrapped(**options: Any) -> paceline.DistributedDataParallel:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "shards: each rank calculates with")
        return paceline.DistributedDataParallel(net(), **{"shards": 4, **options})


def batch_of(ddp: paceline.DistributedDataParallel, step: int = 0, rows: int = 8) -> Tensor:
    """This rank's rows."""
    everyone = torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))
    share = ddp.shards.own
    return everyone[share[0] * rows // 4 : (share[-1] + 1) * rows // 4]


def grads(ddp: nn.Module) -> list[Any]:
    return [None if each.grad is None else each.grad.tolist() for each in ddp.parameters()]


def gradients_in_float64(rank: int) -> bool:  # noqa: ARG001
    ddp = wrapped()
    ddp.module.double()
    for _ in range(3):
        ddp.zero_grad()
        for x in ddp.shards(batch_of(ddp).double()):
            ddp(x).square().mean().backward()
        alone = net().double()
        everyone = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double()
        alone(everyone).square().mean().backward()
        pairs = zip(ddp.parameters(), alone.parameters(), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    return True


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process_on_the_whole_batch(world: int) -> None:
    assert all(run_ranks(gradients_in_float64, world, timeout=60))


def accumulates_over_steps(rank: int, transport: str) -> list[Any]:  # noqa: ARG001
    ddp = wrapped(transport=transport)
    for step in range(3):
        for x in ddp.shards(batch_of(ddp, step)):
            ddp(x).square().mean().backward()
    return grads(ddp)


@pytest.mark.parametrize("transport", ["auto", "c10d"])
def test_gradients_of_several_steps_add_up_to_the_same_bits(transport: str) -> None:
    found = [run_ranks(accumulates_over_steps, world, args=(transport,), timeout=60) for world in (1, 2, 3)]
    assert all(each == found[0][0] for ranks in found for each in ranks)


def random_numbers(rank: int) -> tuple[list[float], list[float]]:  # noqa: ARG001
    ddp = wrapped()
    torch.manual_seed(5)
    random.seed(5)
    before = [torch.rand(()).item(), random.random()]
    inside = []
    for x in ddp.shards(batch_of(ddp)):
        inside += [torch.rand(()).item(), random.random()]
        ddp(x).sum().backward()
    after = [torch.rand(()).item(), random.random()]
    torch.manual_seed(5)
    random.seed(5)
    assert before == [torch.rand(()).item(), random.random()]
    assert after == [torch.rand(()).item(), random.random()]
    return inside[::2], inside[1::2]


def test_random_numbers_belong_to_the_shard_and_go_on_outside_as_if_there_were_none() -> None:
    [alone] = run_ranks(random_numbers, 1, timeout=60)
    ranks = run_ranks(random_numbers, 2, timeout=60)
    for kind in (0, 1):
        assert [*ranks[1][kind], *ranks[0][kind]] == alone[kind]
        assert len({*alone[kind]}) == 4


def leaves_out_a_backward(rank: int, shard: int) -> list[Any]:  # noqa: ARG001
    ddp = wrapped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, x in zip(reversed(ddp.shards.own), ddp.shards(batch_of(ddp)), strict=True):
            loss = ddp(x).square().mean()
            if number != shard:
                loss.backward()
    return grads(ddp)


@pytest.mark.parametrize("shard", [0, 1, 3])
def test_a_shard_without_a_backward_adds_zeros(shard: int) -> None:
    found = [run_ranks(leaves_out_a_backward, world, args=(shard,), timeout=60) for world in (1, 2, 3)]
    assert all(each == found[0][0] for ranks in found for each in ranks)


def leaves_the_loop(rank: int, how: str) -> tuple[str, list[Any]]:
    ddp = wrapped()
    said = ""
    for step in range(3):
        ddp.zero_grad()
        try:
            for x in ddp.shards(batch_of(ddp, step)):
                if rank == 1 and step == 1:
                    if how == "break":
                        break
                    raise ValueError("a bad sample")
                ddp(x).square().mean().backward()
        except (ValueError, PeerError) as error:
            said += f"{step}: {error}"
    return said, grads(ddp)


@pytest.mark.parametrize("how", ["break", "raise"])
def test_a_rank_that_leaves_the_loop_loses_the_step_on_all_ranks_and_all_go_on(how: str) -> None:
    (told, first), (_, second) = run_ranks(leaves_the_loop, 2, args=(how,), timeout=60)
    assert told.startswith("1: rank 1")
    assert "left the loop over its shards" in told
    assert first == second


def weigh_the_second_of_two(ddp: paceline.DistributedDataParallel) -> None:
    for number, x in enumerate(ddp.shards(batch_of(ddp))):
        with ddp.weigh(2) if number else contextlib.nullcontext():
            ddp(x).square().mean().backward()


def syncs_twice(rank: int) -> None:  # noqa: ARG001
    ddp = wrapped()
    for x in ddp.shards(batch_of(ddp)):
        ddp(x).square().mean().backward()
        if ddp.require_backward_grad_sync:
            with pytest.raises(StepError, match=r"all but the last of them belong under no_sync\(\)"):
                ddp(x).square().mean().backward()
    with pytest.raises(StepError, match=r"inside `for ... in ddp.shards\(batch\)`"):
        ddp(batch_of(ddp)).sum().backward()
    with pytest.raises(StepError, match=r"must not be inside no_sync\(\)"), ddp.no_sync():
        next(ddp.shards(batch_of(ddp)))
    with pytest.raises(StructureError, match="each shard needs a row"):
        ddp.shards(torch.zeros(1, 4))
    with pytest.raises(StructureError, match=r"same number of rows \(rows: \[2, 4\]\)"):
        ddp.shards((torch.zeros(4), torch.zeros(2)))
    with pytest.raises(OptionError, match="weights must be whole numbers"), ddp.weigh(0.5):
        pass
    with pytest.raises(WeightsError, match="weigh all or none"):
        weigh_the_second_of_two(ddp)
    for refused in (ddp.skip, ddp.join, lambda: ddp.register_comm_hook(None, paceline.hooks.average())):
        with pytest.raises(UnsupportedError, match=r"shards and .* exclude each other"):
            refused()  # type: ignore[operator]
    for x in ddp.shards(batch_of(ddp)):  # and all is well after that
        ddp(x).square().mean().backward()


def test_mistakes_are_told_and_leave_a_wrapper_that_works() -> None:
    run_ranks(syncs_twice, 2, timeout=60)


def wraps_too_few(rank: int) -> None:  # noqa: ARG001
    with pytest.raises(OptionError, match=r"choose more shards, or fewer ranks \(shards: 1, ranks: 2\)"):
        wrapped(shards=1)


def disagrees(rank: int) -> None:
    with pytest.raises(MismatchError, match="shards"):
        wrapped(shards=4 + rank)


def test_too_few_shards_and_ranks_that_disagree_are_told_when_the_module_is_wrapped() -> None:
    run_ranks(wraps_too_few, 2, timeout=60)
    run_ranks(disagrees, 2, timeout=60)


def says_threads(rank: int) -> tuple[int, int]:  # noqa: ARG001
    torch.set_num_threads(2)
    with pytest.warns(UserWarning, match="each rank calculates with 1 thread, here instead of 2"):
        paceline.DistributedDataParallel(net(), shards=4)
    return torch.get_num_threads(), 1


def test_threads_are_fixed_and_that_is_said() -> None:
    assert run_ranks(says_threads, 1, timeout=60) == [(1, 1)]


def drifts(rank: int) -> None:
    ddp = wrapped(shards=4, audit="raise")
    for step in range(40):
        ddp.zero_grad()
        for x in ddp.shards(batch_of(ddp, step)):
            ddp(x).square().mean().backward()
        if rank == 1 and step == 5:
            with torch.no_grad():
                next(ddp.parameters()).add_(1)


def test_replicas_are_compared() -> None:
    with pytest.raises(RanksError) as raised:
        run_ranks(drifts, 2, timeout=60)
    assert "0.weight differs" in str(raised.value.exceptions[0])


class Statistics(nn.Module):
    """Has buffers that it changes in place, and one that it replaces."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x))
        self.mean = 0.9 * self.mean + 0.1 * (out.detach() ** 2).mean(0)
        return out - self.mean


def keeps_statistics(rank: int) -> list[Any]:
    torch.manual_seed(0)
    ddp = paceline.DistributedDataParallel(Statistics(), shards=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(20):
            ddp.zero_grad()
            for x in ddp.shards(batch_of(ddp, step)):
                ddp(x).pow(3).mean().backward()
    return [*grads(ddp), ddp.module.mean.tolist() if rank == 0 else None]


def test_module_buffers_begin_alike_in_each_shard_also_if_they_are_replaced_and_nobody_warns() -> None:
    found = [run_ranks(keeps_statistics, world, timeout=60)[0] for world in (1, 2, 3)]
    assert found[0] == found[1] == found[2]


def ends_the_loop(rank: int, how: str) -> list[Any]:
    ddp = wrapped()
    for step in range(3):
        own = ddp.shards.own
        if how == "zip":
            for _, x in zip(own, ddp.shards(batch_of(ddp, step)), strict=False):
                ddp(x).square().mean().backward()
            continue
        for number, x in enumerate(ddp.shards(batch_of(ddp, step)), 1):
            ddp(x).square().mean().backward()
            if number == len(own) and rank == 0 and how == "break":
                break
    return grads(ddp)


def test_a_loop_that_is_left_after_its_last_backward_has_taken_the_step() -> None:
    [wanted] = run_ranks(ends_the_loop, 1, args=("to the end",), timeout=60)
    for how in ("break", "zip"):
        assert run_ranks(ends_the_loop, 2, args=(how,), timeout=60) == [wanted] * 2


def two_loops(rank: int) -> float:  # noqa: ARG001
    ddp, other = wrapped(), wrapped()
    first = ddp.shards(batch_of(ddp))
    with pytest.raises(StepError, match="one loop over shards at a time"):
        ddp.shards(batch_of(ddp))
    torch.manual_seed(3)
    expected = torch.rand(()).item()
    torch.manual_seed(3)
    for x, y in zip(first, other.shards(batch_of(other)), strict=True):
        (ddp(x).square().mean() + other(y).square().mean()).backward()
    assert torch.rand(()).item() == expected
    return expected


def test_two_wrappers_may_have_loops_at_once_and_one_wrapper_may_not() -> None:
    run_ranks(two_loops, 2, timeout=60)


def strided_batches(rank: int) -> list[Any]:  # noqa: ARG001
    ddp = wrapped()
    rows = batch_of(ddp)
    for x in ddp.shards(torch.stack([rows, rows], -1)[..., 0]):
        (ddp(x).square().mean() * x.sum(1).mean()).backward()
    return grads(ddp)


def test_how_a_batch_lies_in_memory_changes_no_bit() -> None:
    found = [run_ranks(strided_batches, world, timeout=60)[0] for world in (1, 3, 4)]
    assert found[0] == found[1] == found[2]


def refuses_options(rank: int) -> None:  # noqa: ARG001
    with pytest.raises(UnsupportedError, match="module buffers that forward does not make equal"):
        paceline.DistributedDataParallel(Statistics(), shards=4, forward_sync_buffers=False)
    low = paceline.MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="travel in another type"):
        wrapped(mixed_precision=low)
    wrapped(mixed_precision=paceline.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def test_options_that_would_change_bits_are_refused() -> None:
    run_ranks(refuses_options, 2, timeout=60)


def resumes_from_torchs_checkpoint(rank: int, folder: Path, steps: int) -> list[Any]:  # noqa: ARG001
    ddp = wrapped()
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    sampler = paceline.ShardedBatchSampler(64, shards=4, batch_size=8)
    samples = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    state = {"training": paceline.TrainingState(ddp, optimizer, sampler=sampler)}
    if folder.exists():
        checkpoint.load(state, checkpoint_id=folder)
    for _, indices in zip(range(steps), DataLoader(range(64), batch_sampler=sampler), strict=False):  # type: ignore[arg-type]
        optimizer.zero_grad()
        for x in ddp.shards(samples[indices]):
            ddp(nn.functional.dropout(x)).square().mean().backward()
        optimizer.step()
    checkpoint.save(state, checkpoint_id=folder)
    return [each.tolist() for each in ddp.parameters()]


def test_torchs_checkpoints_carry_it_over_to_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(resumes_from_torchs_checkpoint, 2, args=(tmp_path / "a", 3), timeout=60)
    resumed = run_ranks(resumes_from_torchs_checkpoint, 3, args=(tmp_path / "a", 3), timeout=60)
    [whole] = run_ranks(resumes_from_torchs_checkpoint, 1, args=(tmp_path / "b", 6), timeout=60)
    assert all(each == whole for each in resumed)


def refuses_states(rank: int, folder: Path) -> None:  # noqa: ARG001
    ddp = wrapped()
    optimizer = torch.optim.Adam(ddp.parameters())
    with pytest.raises(OptionError, match=r"the sampler must have state_dict .* \(sampler: list\)"):
        paceline.TrainingState(ddp, optimizer, sampler=[])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"parameters that are not the wrapper's \(number: 4"):
        paceline.TrainingState(ddp, torch.optim.Adam(net().parameters()))
    state = paceline.TrainingState(ddp, optimizer)
    with pytest.raises((FileNotFoundError, PeerError), match="No such file"):
        paceline.save(folder / "missing" / "a.pt", state)
    paceline.save(folder / "a.pt", state)
    sampler = paceline.ShardedBatchSampler(64, shards=4, batch_size=8)
    with pytest.raises(OptionError, match=r"lacks parts of this training \(missing: \['sampler'\]\)"):
        paceline.load(folder / "a.pt", paceline.TrainingState(ddp, optimizer, sampler=sampler))
    other = wrapped(shards=8)
    with pytest.raises(OptionError, match=r"\(shards: 8, in the state: 4\)"):
        paceline.load(folder / "a.pt", paceline.TrainingState(other, torch.optim.Adam(other.parameters())))


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run_ranks(refuses_states, 2, args=(tmp_path,), timeout=60)


def compiled(rank: int) -> list[Any]:  # noqa: ARG001
    ddp = wrapped()
    run = torch.compile(ddp, backend="aot_eager")
    for step in range(2):
        ddp.zero_grad()
        for x in ddp.shards(batch_of(ddp, step)):
            run(x).square().mean().backward()
    return grads(ddp)


def test_compiled_modules_have_the_same_bits_too() -> None:
    found = [run_ranks(compiled, world, timeout=100) for world in (1, 2)]
    assert found[1] == [found[0][0]] * 2
