"""Replicas that drift apart are found within 16 steps, by name and rank; healthy ones are left in peace."""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint
from wrappers import collectives

from paceline import DistributedDataParallel, ShardedOptimizer
from paceline.ddp.audit.rotation import PARTS
from paceline.errors import OptionError, PeerError, ReplicaError
from paceline.hooks import post_local_sgd
from paceline.testing import RankPool, run_ranks, toy

WIDTH = 6
CULPRIT = 1
BEFORE = 20  # steps before the fault, so that it comes in the midst of a round


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


class Net(nn.Module):
    """Parameters of several sizes and types, batch norm, a constant buffer, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.wide = nn.Linear(WIDTH, 20_000)
        self.frozen = nn.Linear(20_000, WIDTH).requires_grad_(False)
        self.long = nn.Linear(WIDTH, WIDTH).double()
        self.short = nn.Parameter(torch.randn(WIDTH).bfloat16())
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)) * self.mask
        x = self.frozen(self.wide(x).relu()) + self.short
        return self.long(x.double())


class Training:
    """Trains a wrapped net with Adam and a schedule, and keeps the warnings."""

    def __init__(self, rank: int, net: Any = None, **options: Any) -> None:
        self.rank = rank
        self.net = net or Net()
        self.ddp = DistributedDataParallel(self.net, **options)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.generator = torch.Generator().manual_seed(rank)
        self.warned: list[str] = []

    def inputs(self) -> torch.Tensor:
        return torch.randn(4, WIDTH, generator=self.generator)

    def step(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.ddp(self.inputs()).square().mean().backward()
        self.warned += [str(each.message) for each in caught]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()

    def is_equal(self) -> bool:
        """Whether parameters and their optimizer state are equal on all ranks."""
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        flat = torch.cat([each.detach().double().flatten() for each in (*self.net.parameters(), *state)])
        everyone = [torch.empty_like(flat) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(everyone, flat)
        return all(torch.equal(flat, each) for each in everyone)


def flip_bit(tensor: torch.Tensor, at: int = 3, bit: int = 4) -> None:
    """Flip one bit of a tensor's memory, unnoticed by autograd."""
    memory = tensor.detach().view(-1).view(torch.uint8).numpy()
    memory[at] ^= 1 << bit


def load_other_checkpoint(training: Training) -> None:
    torch.manual_seed(77)
    training.net.load_state_dict({key: value + 1 for key, value in training.net.state_dict().items()})


def change_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.5
    training.schedule.base_lrs = [0.5]


FAULTS: dict[str, tuple[Callable[[Training], None], str]] = {
    "small parameter": (lambda it: flip_bit(it.net.first.bias), "first.bias"),
    "large parameter": (lambda it: flip_bit(it.net.wide.weight, 333_333), "wide.weight"),
    "frozen parameter": (lambda it: flip_bit(it.net.frozen.weight, 400_001), "frozen.weight"),
    "float64 parameter": (lambda it: flip_bit(it.net.long.weight, 9, 7), "long.weight"),
    "bfloat16 parameter": (lambda it: flip_bit(it.net.short, 1, 0), "short"),
    "Adam moment": (
        lambda it: flip_bit(it.optimizer.state[it.net.first.weight]["exp_avg_sq"]),
        "first.weight.exp_avg_sq",
    ),
    "batch norm": (lambda it: flip_bit(it.net.norm.running_var), "norm.running_var"),
    "constant buffer": (lambda it: it.net.mask.logical_not_(), "mask"),
    "learning rate": (change_rate, "lr of optimizer group 0"),
    "checkpoint on one rank": (load_other_checkpoint, "norm.running_mean"),
}


def faulty_run(rank: int, fault: str, culprit: int, options: dict[str, Any]) -> list[list[str]]:
    """The warnings before a fault, and within 16 steps after it."""
    training = Training(rank, **options)
    training.steps(BEFORE)
    before, training.warned = training.warned, []
    if rank == culprit:
        with torch.no_grad():
            FAULTS[fault][0](training)
    training.steps(PARTS)
    return [before, training.warned]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_within_16_steps_with_its_rank(three: RankPool, fault: str) -> None:
    name = FAULTS[fault][1]
    for before, after in three.run(faulty_run, fault, CULPRIT, {}):
        assert before == []
        told = " ".join(after)
        assert name in told
        assert "on rank 1" in told
        assert "on rank 0" not in told.replace("rank 0, 2", "").replace("(here: rank 0)", "")


@pytest.mark.parametrize("fault", ["large parameter", "Adam moment", "batch norm", "learning rate"])
def test_faults_of_rank_0_are_found_over_a_process_group_too(three: RankPool, fault: str) -> None:
    for before, after in three.run(faulty_run, fault, 0, {"transport": "c10d"}):
        assert before == []
        assert FAULTS[fault][1] in " ".join(after)
        assert "on rank 0" in " ".join(after)


def test_of_two_ranks_both_hashes_are_named_and_no_culprit(two: RankPool) -> None:
    for before, after in two.run(faulty_run, "small parameter", CULPRIT, {}):
        assert before == []
        (told,) = after
        assert "first.bias differs, and no value is that of most ranks (hash " in told
        assert " on rank 0, hash " in told
        assert " on rank 1; " in told


def test_nothing_is_looked_at_if_the_audit_is_off(three: RankPool) -> None:
    assert three.run(faulty_run, "small parameter", CULPRIT, {"audit": "off"}) == [[[], []]] * 3


def test_the_step_range_begins_where_the_part_was_last_equal(three: RankPool) -> None:
    for _, (told, *_) in three.run(faulty_run, "large parameter", CULPRIT, {}):
        _, _, steps = told.partition("since steps ")
        first, last = steps.split(")")[0].split(" to ")
        assert int(last) - int(first) == PARTS
        assert int(first) < BEFORE <= int(last)


def repeated(rank: int) -> list[str]:
    training = Training(rank)
    training.steps(BEFORE)
    if rank == CULPRIT:
        flip_bit(training.net.frozen.bias)
    training.steps(100)
    return training.warned


def test_a_difference_that_stays_is_told_again_at_growing_intervals(three: RankPool) -> None:
    for warned in three.run(repeated):
        assert len(warned) == 2
        assert all("frozen.bias differs on rank 1 alone; ranks 0, 2 agree" in each for each in warned)


def raising(rank: int, fault: str) -> tuple[list[str], bool, bool]:
    training = Training(rank, audit="raise")
    training.steps(BEFORE)
    if rank == CULPRIT:
        with torch.no_grad():
            FAULTS[fault][0](training)
    raised = []
    for _ in range(PARTS):
        try:
            training.step()
        except ReplicaError as error:
            raised.append(str(error))
            break
    without_grads = all(each.grad is None for each in training.net.parameters())
    training.optimizer.param_groups[0]["lr"] = 0.0  # the user has repaired it
    training.step()
    return raised, without_grads, all(each.grad is None for each in training.net.parameters())


@pytest.mark.parametrize("fault", ["small parameter", "large parameter", "learning rate", "batch norm"])
def test_raise_loses_the_step_on_every_rank_and_the_next_is_fine(three: RankPool, fault: str) -> None:
    found = three.run(raising, fault)
    for raised, without_grads, zeroed_after_step in found:
        assert FAULTS[fault][1] in raised[0]
        assert without_grads
        assert zeroed_after_step
    assert len({raised[0].partition("; the step is lost")[0] for raised, _, _ in found}) == 1


def healing(rank: int, fault: str, audit: str, culprit: int) -> tuple[bool, bool, list[str]]:
    training = Training(rank, audit=audit)
    training.steps(BEFORE)
    reference = {name: each.clone() for name, each in training.net.state_dict().items()}
    if rank == culprit:
        with torch.no_grad():
            FAULTS[fault][0](training)
    for group in training.optimizer.param_groups:  # so that nothing but the fault changes parameters
        group["initial_lr"] = 0.0
    training.schedule.base_lrs = [0.0]
    for group in training.optimizer.param_groups:
        group["lr"] = 0.5 if fault == "learning rate" and rank == culprit else 0.0
    training.steps(PARTS)
    kept = all(
        torch.equal(each, reference[name])
        for name, each in training.net.state_dict().items()
        if "norm" not in name
    )
    return training.is_equal(), kept, training.warned


@pytest.mark.parametrize("fault", ["small parameter", "large parameter", "frozen parameter", "Adam moment"])
def test_heal_takes_over_what_most_ranks_have(three: RankPool, fault: str) -> None:
    for is_equal, kept, (told,) in three.run(healing, fault, "heal", 0):
        assert is_equal
        assert kept
        assert f"all ranks have taken over {FAULTS[fault][1]} from rank 1" in told


def test_heal_takes_over_what_rank_0_has_if_asked(three: RankPool) -> None:
    for is_equal, kept, (told,) in three.run(healing, "small parameter", "heal-from-rank-0", 0):
        assert is_equal
        assert not kept
        assert "all ranks have taken over first.bias from rank 0" in told


def test_heal_sets_an_option_to_that_of_most_ranks(three: RankPool) -> None:
    for _, _, (told, *_) in three.run(healing, "learning rate", "heal", 2):
        assert "lr of optimizer group 0 is 0.0 on ranks 0, 1; 0.5 on rank 2" in told
        assert "all ranks have taken over lr of optimizer group 0 from rank 0" in told


def healthy_run(rank: int) -> list[str]:
    """200 steps with everything that may look like a fault and is none."""
    training = Training(rank)
    for step in range(200):
        if step % 4 == 3:
            with training.ddp.no_sync():
                training.ddp(training.inputs()).square().mean().backward()
        training.step()
        if step == 60:
            training.net.frozen.requires_grad_(True)
        if step == 90:  # on every rank
            training.net.load_state_dict({key: value * 1 for key, value in training.net.state_dict().items()})
            training.optimizer.load_state_dict(training.optimizer.state_dict())
        if step == 120:
            training.optimizer = torch.optim.SGD(training.net.parameters(), lr=1e-3, momentum=0.9)
            training.schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 10)
        if step % 25 == 0:
            evaluate(training)
        if step == 150:  # as update_bn does
            with torch.no_grad():
                training.net(training.inputs())
    assert training.is_equal()
    return training.warned


def evaluate(training: Training) -> None:
    training.ddp.eval()
    with torch.no_grad():
        training.ddp(training.inputs())
        if training.rank == 0:
            training.net(training.inputs())
    training.ddp.train()


def test_nothing_is_found_in_200_healthy_steps(three: RankPool) -> None:
    assert three.run(healthy_run) == [[]] * 3


def sharded_run(rank: int, kind: str) -> list[str]:
    """Training with an optimizer whose state is split over the ranks."""
    # Frozen, because the optimizer broadcasts those that it trains.
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    training = Training(rank, nn.Sequential(nn.Linear(WIDTH, 20_000), nn.Linear(20_000, WIDTH), frozen))
    if kind == "paceline":
        optimizer: Any = ShardedOptimizer(training.ddp, torch.optim.Adam, lr=1e-3)
    else:
        optimizer = ZeroRedundancyOptimizer(training.net[:2].parameters(), torch.optim.Adam, lr=1e-3)
    training.optimizer = optimizer
    training.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    training.steps(40)
    assert training.ddp._reducer.context.audit._catalogue.excluded
    if rank == CULPRIT:
        flip_bit(frozen.bias)
    training.steps(PARTS)
    return training.warned


@pytest.mark.parametrize("kind", ["paceline", "torch"])
def test_sharded_state_is_left_out_and_parameters_are_not(three: RankPool, kind: str) -> None:
    for warned in three.run(sharded_run, kind):
        assert "2.bias" in warned[0]
        assert all("exp_avg" not in each for each in warned)


def without_state_for_one_step(rank: int) -> list[str]:
    """One rank makes its optimizer anew: its state is gone, and then differs."""
    training = Training(rank)
    training.steps(BEFORE)
    if rank == CULPRIT:
        training.optimizer.state.clear()
    training.steps(200)
    return training.warned


def test_state_that_one_rank_had_lost_is_compared_again(three: RankPool) -> None:
    for warned in three.run(without_state_for_one_step):
        assert "exp_avg" in " ".join(warned)


def uneven_run(rank: int) -> list[str]:
    training = Training(rank)
    training.schedule = torch.optim.lr_scheduler.StepLR(
        training.optimizer, 10**6
    )  # join does not copy schedules
    for _ in range(2):
        with training.ddp.join():
            training.steps(10 + 5 * rank)
    training.steps(20)
    assert training.is_equal()
    return training.warned


def test_nothing_is_found_under_join_nor_after_it(three: RankPool) -> None:
    assert three.run(uneven_run) == [[]] * 3


def local_run(rank: int) -> list[str]:
    training = Training(rank)
    hook = post_local_sgd(start_step=4, period=8)
    training.ddp.register_comm_hook(None, hook)
    for _ in range(30):
        training.step()
        hook.average_parameters(training.net.parameters())
    return training.warned


def test_hooks_that_let_replicas_differ_are_not_audited(three: RankPool) -> None:
    assert three.run(local_run) == [[]] * 3


def failing_run(rank: int) -> list[str]:
    """Steps that are lost, on every rank."""
    training = Training(rank)
    for step in range(60):
        if step % 7 == 3:
            try:
                output = training.ddp(training.inputs() if rank else torch.randn(4, WIDTH + 1))
                output.sum().backward()
            except (PeerError, RuntimeError):
                training.optimizer.zero_grad()
            continue
        if step == 31:  # on every rank, and the step after it is lost
            training.net.norm.reset_running_stats()
        training.step()
    return training.warned


def test_nothing_is_found_around_lost_steps(three: RankPool) -> None:
    assert three.run(failing_run) == [[]] * 3


class Choosy(nn.Module):
    """Each rank uses another norm, in a part that is computed again in backward."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.norms[self.rank], self.first(x), use_reentrant=False)


def choosy_run(rank: int, options: dict[str, Any]) -> list[str]:
    ddp = DistributedDataParallel(Choosy(rank), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            ddp(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("options", [{}, {"forward_sync_buffers": False}])
def test_norms_that_one_rank_alone_uses_are_no_fault(three: RankPool, options: dict[str, Any]) -> None:
    assert three.run(choosy_run, options) == [[]] * 3


def collectives_of_steps(rank: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Of one healthy step, of a whole round of them, and of one in which replicas differ."""
    training = Training(rank, transport="c10d", forward_sync_buffers=False)
    training.steps(BEFORE)
    one, many = collectives(training.step), collectives(partial(training.steps, PARTS))
    if rank == CULPRIT:
        training.optimizer.param_groups[0]["lr"] = 7.0
    return dict(one), dict(many), dict(collectives(training.step))


def test_only_a_step_in_which_replicas_differ_has_more_collectives(three: RankPool) -> None:
    for one, many, faulty in three.run(collectives_of_steps):
        assert {*one} == {"gloo:all_reduce"}
        assert many == {"gloo:all_reduce": PARTS * one["gloo:all_reduce"]}
        assert "gloo:all_gather" in faulty


def run_on_accelerator(rank: int, audit: str) -> list[str]:
    toy.register()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 20_000), nn.Linear(20_000, WIDTH)).to("toy:0")
    ddp = DistributedDataParallel(net, process_group=toy.new_group(), audit=audit)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5, momentum=0.9, foreach=False)
    inputs = torch.randn(4, WIDTH).to("toy:0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(BEFORE + PARTS):
            if step == BEFORE and rank == CULPRIT:
                with torch.no_grad():
                    net[0].weight[5, 0] += 1
            ddp(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    everyone: list[Any] = [None] * 3
    torch.distributed.all_gather_object(everyone, net[0].weight.detach().cpu())
    equal = all(torch.equal(everyone[0], each) for each in everyone)
    return [*(str(each.message) for each in caught if "replica" in str(each.message)), str(equal)]


def test_an_accelerators_replicas_are_compared_and_healed_if_asked() -> None:
    for *warned, equal in run_ranks(run_on_accelerator, 3, args=("heal",)):
        assert "0.weight" in warned[0]
        assert "on rank 1 alone" in warned[0]
        assert equal == "True"


def copied_wrapper_run(rank: int) -> list[str]:
    ddp = copy.deepcopy(DistributedDataParallel(nn.Linear(WIDTH, WIDTH), audit="warn"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(PARTS + 4):
            if step == 4 and rank == CULPRIT:
                flip_bit(ddp.module.bias)
            ddp(torch.ones(2, WIDTH)).sum().backward()
    return [str(each.message) for each in caught]


def test_copies_of_a_wrapper_have_an_audit_of_their_own(three: RankPool) -> None:
    for (told,) in three.run(copied_wrapper_run):
        assert "bias differs on rank 1 alone" in told


def test_another_word_for_the_audit_is_refused(three: RankPool) -> None:
    assert three.run(wrapping_error) == ["audit must be one of"] * 3


def wrapping_error(_: int) -> str:
    try:
        DistributedDataParallel(nn.Linear(1, 1), audit="repair")  # type: ignore[arg-type]
    except OptionError as error:
        return str(error)[:20]
    return ""
