"""The hook "auto" where there is nothing to choose, on ranks without shared memory, and its bucket caps."""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from paceline import DistributedDataParallel, hooks
from paceline.comm.group import Group
from paceline.comm.link_speed import Link
from paceline.ddp.buckets.plan import BucketCaps
from paceline.ddp.reducer import auto_tuner, link_measurement
from paceline.ddp.reducer.auto_tuner import AutoTuner, Stage, SteadySteps
from paceline.ddp.state.precision import MixedPrecision
from paceline.errors import MismatchError, OptionError, UnsupportedError
from paceline.testing import RankPool, run_ranks

WIDTH = 64
CAP = 1 << 15


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def step(ddp: nn.Module, rank: int, number: int) -> list[Tensor]:
    torch.manual_seed(100 * number + rank)
    ddp.zero_grad()
    ddp(torch.randn(2, WIDTH)).square().mean().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


class Said(logging.Handler):
    """Keeps what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("paceline").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("paceline").removeHandler(self)


def idle(rank: int, options: dict[str, Any]) -> list[str]:
    with Said() as lines:
        ddp = DistributedDataParallel(net(), hook="auto", **options)
        DistributedDataParallel(net(), **options).register_comm_hook(None, hooks.auto())
        plain = DistributedDataParallel(net(), **options)
    assert ddp._reducer.exchange.name == plain._reducer.exchange.name
    if not options:
        assert all(map(torch.equal, step(ddp, rank, 0), step(plain, rank, 0)))
    return lines


@pytest.mark.parametrize(
    ("options", "why"), [({}, "all ranks are on one host"), ({"shards": 2}, "shards are averaged in one way")]
)
def test_auto_says_in_one_line_that_it_has_nothing_to_do(
    pair: RankPool, options: dict[str, Any], why: str
) -> None:
    first, second = pair.run(idle, options)
    assert first == [f"paceline: the hook auto has nothing to do: {why}"] * 2
    assert second == []


def why_idle_on(_: int, device: str) -> str | None:
    return auto_tuner.why_idle(Group(distributed.group.WORLD), torch.device(device))


def test_auto_has_nothing_to_do_on_accelerators(pair: RankPool) -> None:
    assert pair.run(why_idle_on, "cuda") == ["parameters are on an accelerator"] * 2
    assert pair.run(why_idle_on, "cpu") == [None] * 2


def refused_with_nothing_to_choose(_: int) -> None:
    ddp = DistributedDataParallel(net())
    with pytest.raises(OptionError, match=r"keeps its own state: register it with None \(hook: auto"):
        ddp.register_comm_hook(3, hooks.auto())
    ddp.register_comm_hook(None, hooks.auto())
    for second in (hooks.auto(), hooks.int8()):
        with pytest.raises(UnsupportedError, match="can only be called once"):
            ddp.register_comm_hook(None, second)
    ddp = DistributedDataParallel(net(), hook=hooks.int8())
    with pytest.raises(UnsupportedError, match="can only be called once"):
        ddp.register_comm_hook(None, hooks.auto())
    shared = hooks.auto()
    ddp = DistributedDataParallel(net(), hook=shared)
    with pytest.raises(OptionError, match="a hook serves one wrapper"):
        DistributedDataParallel(net(), hook=shared)


def test_what_two_hosts_refuse_is_refused_where_there_is_nothing_to_choose(pair: RankPool) -> None:
    pair.run(refused_with_nothing_to_choose)


def in_two_ways(rank: int) -> None:
    DistributedDataParallel(net(), hook=["auto", hooks.auto()][rank])  # type: ignore[arg-type]


def test_ranks_may_give_auto_by_name_or_as_a_hook(pair: RankPool) -> None:
    pair.run(in_two_ways)


def refused(_: int) -> None:
    for hook in ("best", 3, hooks.int8):
        with pytest.raises(OptionError, match=re.escape(f"(hook: {hook!r})")):
            DistributedDataParallel(net(), hook=hook)  # type: ignore[arg-type]


def test_a_hook_that_is_none_is_refused(pair: RankPool) -> None:
    pair.run(refused)


def given(_: int) -> str:
    return str(DistributedDataParallel(net(), hook=hooks.int4())._reducer.exchange.name)


def test_any_hook_can_be_given_to_the_wrapper(pair: RankPool) -> None:
    assert pair.run(given) == ["int4", "int4"]


def tried(rank: int, faster: float, given_caps: dict[str, Any]) -> tuple[list[int], bool]:
    """The number of buckets in each step, and whether gradients have the bits of plain averages."""
    before = auto_tuner._WINDOW, auto_tuner._FASTER, auto_tuner.choose_caps
    auto_tuner._WINDOW, auto_tuner._FASTER = 2, faster  # type: ignore[misc]
    auto_tuner.choose_caps = lambda *_, **__: BucketCaps((CAP, CAP))  # type: ignore[assignment]
    try:
        options = {"transport": "c10d", **given_caps}
        ddp = DistributedDataParallel(net(), hook=hooks.auto(max_error=0), **options)
        plain = DistributedDataParallel(net(), hook=hooks.average(), **options)
        buckets, same = [], True
        for number in range(16):
            grads = step(ddp, rank, number), step(plain, rank, number)
            same = same and all(map(torch.equal, *grads))
            buckets.append(len(ddp._reducer.context.bucket_set.buckets))
        return buckets, same
    finally:
        auto_tuner._WINDOW, auto_tuner._FASTER, auto_tuner.choose_caps = before  # type: ignore[misc,assignment]


def run_trial(pair: RankPool, faster: float, **given_caps: float) -> Sequence[int]:
    first, second = pair.run(tried, faster, given_caps)
    assert first == second
    assert first[1]
    buckets: Sequence[int] = first[0]
    return buckets


def test_a_bucket_cap_that_makes_steps_shorter_is_kept(pair: RankPool) -> None:
    buckets = run_trial(pair, faster=-1e9)
    assert buckets[1] == 1
    assert buckets[-1] > 1


def test_a_bucket_cap_that_does_not_make_steps_shorter_is_given_up(pair: RankPool) -> None:
    buckets = run_trial(pair, faster=1.0)
    assert max(buckets) > 1
    assert buckets[-1] == 1


def test_a_bucket_cap_that_the_user_chose_stays(pair: RankPool) -> None:
    assert {*run_trial(pair, faster=-1e9, bucket_cap_mb=1)} == {1}


def chosen_on_a_slow_link(_: int, dtype: torch.dtype, options: dict[str, Any]) -> str:
    before = link_measurement.measure_links
    link_measurement.measure_links = lambda *_: {(0, 1): Link(latency=1e-4, bandwidth=1e5)}
    try:
        hook = hooks.auto()
        DistributedDataParallel(net().to(dtype), hook=hook, transport="c10d", **options)
    finally:
        link_measurement.measure_links = before
    assert hook.choice is not None
    return hook.choice.name


@pytest.mark.parametrize(
    ("dtype", "options", "chosen"),
    [
        (torch.float32, {}, {"bf16"}),
        (torch.bfloat16, {}, {"average"}),
        (torch.float32, {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}, {"average"}),
    ],
)
def test_gradients_of_16_bits_are_not_compressed_to_16_bits(
    pair: RankPool, dtype: torch.dtype, options: dict[str, Any], chosen: set[str]
) -> None:
    assert {*pair.run(chosen_on_a_slow_link, dtype, options)} <= chosen


def wrapped_with_other_bounds(rank: int) -> str:
    with pytest.raises(MismatchError) as error:
        DistributedDataParallel(net(), hook=hooks.auto(max_error=[0, 1 / 14][rank]), transport="c10d")
    return str(error.value)


def test_ranks_that_allow_different_errors_are_refused(pair: RankPool) -> None:
    first, second = pair.run(wrapped_with_other_bounds)
    assert first == second
    assert f"(rank 0: auto(max_error=0.0), rank 1: auto(max_error={1 / 14}))" in first


def registered_with_other_bounds(rank: int) -> str:
    ddp = DistributedDataParallel(net(), transport="c10d")
    with pytest.raises(MismatchError) as error:
        ddp.register_comm_hook(None, hooks.auto(max_error=[0, 1 / 14][rank]))
    return str(error.value)


def test_ranks_that_register_auto_with_different_errors_are_refused(pair: RankPool) -> None:
    first, second = pair.run(registered_with_other_bounds)
    assert first == second
    assert f"(rank 0: auto(max_error=0.0); rank 1: auto(max_error={1 / 14}))" in first


def measurements(rank: int, steps_per_measurement: float) -> int:
    """How often ranks measure in 20 steps whose communication seems to take another time in every window."""
    before = auto_tuner._WINDOW, auto_tuner._STEPS_PER_MEASUREMENT, auto_tuner.has_changed
    auto_tuner._WINDOW, auto_tuner._STEPS_PER_MEASUREMENT = 1, steps_per_measurement  # type: ignore[misc]
    auto_tuner.has_changed = lambda *_: True
    try:
        ddp = DistributedDataParallel(net(), hook=hooks.auto(max_error=0), transport="c10d", bucket_cap_mb=25)
        tuner, seen = ddp._reducer._tuner, set()
        assert tuner is not None
        for number in range(20):
            step(ddp, rank, number)
            seen.add(id(tuner._measured))
        return len(seen)
    finally:
        auto_tuner._WINDOW, auto_tuner._STEPS_PER_MEASUREMENT, auto_tuner.has_changed = before  # type: ignore[misc,assignment]


@pytest.mark.parametrize(("steps_per_measurement", "often"), [(0, True), (1e9, False)])
def test_links_are_not_measured_again_before_the_last_measurement_has_paid(
    pair: RankPool, steps_per_measurement: float, often: bool
) -> None:
    first, second = pair.run(measurements, steps_per_measurement)
    assert (first > 1, second > 1) == (often, often)


def link_that_slows_down_in_a_trial(rank: int, faster: float) -> tuple[bool, float]:
    """Whether there was a trial of a bucket cap, and the bandwidth that is believed in after it."""
    auto_tuner._WINDOW, auto_tuner._STEPS_PER_MEASUREMENT, auto_tuner._FASTER = 2, 0, faster  # type: ignore[misc]
    slow, tried = Link(1e-4, 1e6), []
    link_measurement.measure_links = lambda *_: {(0, 1): slow if tried else replace(slow, bandwidth=1e8)}
    auto_tuner.choose_caps = lambda *_, **__: None if tried else BucketCaps((CAP, CAP))

    def agree(tuner: AutoTuner, _: Group, buckets: int) -> SteadySteps:
        if tuner._stage is Stage.TRIAL:
            tried.append(True)
        took = 0.1 if tried else 0.001
        return SteadySteps(0.2, took, 0.001, [0.001] * buckets)

    AutoTuner._agree = agree  # type: ignore[method-assign,assignment]
    hook = hooks.auto(max_error=0)
    ddp = DistributedDataParallel(net(), hook=hook, transport="c10d")
    for number in range(24):
        step(ddp, rank, number)
    tuner = ddp._reducer._tuner
    assert tuner is not None
    assert tuner._measured is not None
    return bool(tried), tuner._measured.link.bandwidth


@pytest.mark.parametrize("faster", [-1e9, 1.0], ids=["kept", "given up"])
def test_a_link_that_slows_down_while_a_bucket_cap_is_tried_is_measured_again(faster: float) -> None:
    found = run_ranks(link_that_slows_down_in_a_trial, 2, args=(faster,), timeout=60.0)
    assert found == [(True, 1e6)] * 2


def link_that_slows_down_step_by_step(rank: int) -> list[float]:
    """The bandwidth of the decision in force, each time after the link has become a little slower."""
    auto_tuner._WINDOW, auto_tuner._STEPS_PER_MEASUREMENT = 1, 0  # type: ignore[misc]
    now = {"bandwidth": 1e8, "communication": 1e-3}
    link_measurement.measure_links = lambda *_: {(0, 1): Link(1e-4, now["bandwidth"])}

    def agree(_: AutoTuner, __: Group, buckets: int) -> SteadySteps:
        return SteadySteps(0.2, now["communication"], 0.001, [0.001] * buckets)

    AutoTuner._agree = agree  # type: ignore[method-assign,assignment]
    hook = hooks.auto(max_error=0)
    ddp = DistributedDataParallel(net(), hook=hook, transport="c10d", bucket_cap_mb=25)
    decided = []
    # At first, something else makes communication take twice as long.
    for bandwidth, communication in ((1e8, 1e-3), (6e7, 2.1e-3), (3.5e7, 2.9e-3)):
        now |= {"bandwidth": bandwidth, "communication": communication}
        for number in range(12):
            step(ddp, rank, number)
        assert hook.choice is not None
        decided.append(hook.choice.link.bandwidth)
    return decided


def test_small_changes_of_a_link_add_up_to_a_new_decision() -> None:
    found = run_ranks(link_that_slows_down_step_by_step, 2, timeout=60.0)
    assert found == [[1e8, 1e8, 3.5e7]] * 2


def moved_in_a_trial(rank: int) -> list[BucketCaps]:
    """The bucket caps before a trial, in it, and after the ranks have moved to another group."""
    auto_tuner._WINDOW = 2  # type: ignore[misc]
    auto_tuner.choose_caps = lambda *_, **__: BucketCaps((CAP, CAP))  # type: ignore[assignment]
    ddp = DistributedDataParallel(net(), hook=hooks.auto(max_error=0), transport="c10d")
    planner, tuner = ddp._reducer.planner, ddp._reducer._tuner
    assert tuner is not None
    caps = [planner.caps]
    for number in range(16):
        step(ddp, rank, number)
        if tuner._stage is Stage.TRIAL:
            break
    caps.append(planner.caps)
    ddp._update_process_group(distributed.new_group([0, 1]))
    step(ddp, rank, 16)
    return [*caps, planner.caps]


def test_ranks_that_move_in_a_trial_of_a_bucket_cap_get_the_caps_from_before() -> None:
    for before, tried, after in run_ranks(moved_in_a_trial, 2, timeout=60.0):
        assert tried == BucketCaps((CAP, CAP))
        assert after == before != tried


def joined(rank: int, groups: Sequence[Sequence[int]]) -> tuple[list[list[Tensor]], list[str]]:
    """Gradients and decisions, after ranks of groups that may have decided differently have become one."""
    bandwidth = 1e5 if rank < 2 else 1e12
    link_measurement.measure_links = lambda *_: {(0, 1): Link(latency=1e-4, bandwidth=bandwidth)}
    auto_tuner._WINDOW = 1  # type: ignore[misc]
    [own] = [each for each in map(distributed.new_group, groups) if not isinstance(each, int)]
    hook = hooks.auto(max_error=1 / 7)
    ddp = DistributedDataParallel(net(), process_group=own, hook=hook, transport="c10d")
    decided = [hook.name]
    for number in range(3):
        step(ddp, rank, number)
    ddp._update_process_group(distributed.group.WORLD)
    grads = []
    for number in range(8):
        grads.append(step(ddp, rank, number))
        assert hook.choice is not None
        decided.append(hook.choice.name)
    return grads, decided


@pytest.mark.parametrize(
    ("groups", "before"),
    [
        ([[0, 1], [2, 3]], ["auto: int4", "auto: int4", "auto: average", "auto: average"]),
        ([[0, 1], [2], [3]], ["auto: int4", "auto: int4", "auto", "auto"]),
    ],
)
def test_ranks_that_decided_differently_average_and_decide_together_once_they_are_in_one_group(
    groups: Sequence[Sequence[int]], before: Sequence[str]
) -> None:
    found = run_ranks(joined, 4, args=(groups,), timeout=60.0)
    first, decided = found[0]
    assert [names[0] for _, names in found] == before
    assert decided[-1] == "int4"
    for theirs, names in found:
        assert names[1:] == decided[1:]
        for ours, other in zip(first, theirs, strict=True):
            assert all(map(torch.equal, ours, other))


def there_and_back(rank: int) -> list[tuple[bool, bool]]:
    """For each step, whether the report travels in a bucket, and whether gradients are plain averages.

    The hook changes to int8 after the second step, and back after the fourth.
    """
    hook = hooks.auto(max_error=0.01)
    ddp = DistributedDataParallel(net(), hook=hook, transport="c10d", audit="off")
    plain = DistributedDataParallel(net(), transport="c10d", audit="off")
    ddp._reducer._tuner._stage = Stage.IDLE
    decided = hook.choice
    found = []
    for number in range(8):
        hook.take(replace(decided, name="int8" if 2 <= number < 4 else "average"))
        ours, theirs = step(ddp, rank, number), step(plain, rank, number)
        found.append((ddp._reducer.context.bucket_set.report_in_bucket, all(map(torch.equal, ours, theirs))))
    return found


def test_while_auto_takes_averages_a_step_has_the_collectives_of_one_without_a_hook(pair: RankPool) -> None:
    first, second = pair.run(there_and_back)
    assert first == second
    by_hook = [(False, False)] * 3  # int8 twice, then the average with what it has left out
    assert first == [(True, True)] * 2 + by_hook + [(True, True)] * 3


def recorded(rank: int, folder: Path) -> str:
    ddp = DistributedDataParallel(net(), hook="auto", transport="c10d")
    for number in range(3):
        step(ddp, rank, number)
    ddp.recorder.write(folder)
    return str(ddp._reducer.exchange.description)


def test_the_recording_says_what_was_chosen_and_why(pair: RankPool, tmp_path: Path) -> None:
    first, second = pair.run(recorded, tmp_path)
    assert first == second
    assert re.fullmatch(r"auto: \w+ is predicted to take .*, the slowest link has .*", first)
    [last] = {json.loads(each.read_text())["exchange"] for each in tmp_path.glob("*.json")}
    assert last == first
