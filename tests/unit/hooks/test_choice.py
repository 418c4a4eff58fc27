"""Which hook is chosen, by links and costs."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from paceline import hooks
from paceline.comm.group import Group
from paceline.comm.link_speed import Link
from paceline.errors import OptionError
from paceline.hooks import hook_cost
from paceline.hooks.auto import _KNOWN
from paceline.hooks.choice import Choice, HookCost, ReadyBucket, StepWork, choose, has_changed, predict
from paceline.hooks.grad_bucket import GradBucket
from paceline.hooks.hook import Hook, Reduction
from paceline.hooks.hook_cost import CountingGroup, SampleBucket, measure_cost

MB = 1_000_000
AVERAGE = HookCost(before=0.0, after=0.0, sent=1.0, rounds=2)
# A nanosecond per byte in all.
HALF = HookCost(before=0.5e-9, after=0.5e-9, sent=0.5, rounds=1)
COSTS = {"average": AVERAGE, "fp16": HALF}


def link(mbit: float, latency: float = 0.0) -> Link:
    return Link(latency, mbit * 1e6 / 8)


def at_once(*sizes: int) -> StepWork:
    return StepWork([ReadyBucket(size, 0.0) for size in sizes])


def test_a_step_takes_the_work_before_the_messages_and_the_work_after() -> None:
    took = predict(at_once(8 * MB), HALF, link(80, latency=0.1))
    assert took == pytest.approx(0.004 + 0.1 + 0.4 + 0.004)


def test_messages_are_sent_while_backward_runs() -> None:
    work = StepWork([ReadyBucket(MB, 0.2), ReadyBucket(MB, 1.0)], backward=1.0)
    assert predict(work, AVERAGE, link(80)) == pytest.approx(1.1)


def test_a_bucket_waits_until_the_link_is_free() -> None:
    work = StepWork([ReadyBucket(20 * MB, 0.2), ReadyBucket(MB, 1.0)], backward=1.0)
    assert predict(work, AVERAGE, link(80)) == pytest.approx(0.2 + 2.1)


def test_compression_delays_backward() -> None:
    slow = HookCost(before=1e-7, after=0.0, sent=0.0, rounds=0)
    work = StepWork([ReadyBucket(MB, 0.5), ReadyBucket(MB, 1.0)], backward=1.0)
    assert predict(work, slow, link(80)) == pytest.approx(1.2)


@pytest.mark.parametrize(("mbit", "chosen"), [(10, "fp16"), (100, "fp16"), (100_000, "average")])
def test_a_slow_link_is_worth_compression(mbit: float, chosen: str) -> None:
    assert choose(at_once(8 * MB), COSTS, link(mbit)).name == chosen


def test_of_hooks_that_are_about_as_fast_the_most_precise_is_chosen() -> None:
    costs = {"fp16": HALF, "bf16": HookCost(before=0.4e-9, after=0.5e-9, sent=0.5, rounds=1)}
    assert choose(at_once(8 * MB), costs, link(100)).name == "fp16"


def test_the_hook_in_force_stays_if_another_is_about_as_fast() -> None:
    costs = {"fp16": HALF, "bf16": HookCost(before=0.4e-9, after=0.5e-9, sent=0.5, rounds=1)}
    assert choose(at_once(8 * MB), costs, link(100), now="bf16").name == "bf16"
    assert choose(at_once(8 * MB), COSTS, link(10), now="average").name == "fp16"


@pytest.mark.parametrize(
    ("mbit", "seconds", "said"),
    [
        (999.7, 0.9996, "take 1,000 ms, the slowest link has 1,000 Mbit/s and 1,000 ms"),
        (2_000_000, 1234.0, "take 1,234 s, the slowest link has 2,000 Gbit/s and 1,234 s"),
        (0.00001, 2e-9, "take 0.000002 ms, the slowest link has 0.00001 Mbit/s and 0.000002 ms"),
    ],
)
def test_numbers_are_no_powers_of_ten(mbit: float, seconds: float, said: str) -> None:
    assert str(Choice("int8", {"int8": seconds}, link(mbit, latency=seconds))).endswith(said)


def test_the_choice_says_why_in_one_line() -> None:
    said = str(choose(at_once(8 * MB), COSTS, link(10, latency=0.002)))
    assert said == (
        "fp16 is predicted to take 3.21 s, average 6.4 s, the slowest link has 10 Mbit/s and 2 ms"
    )


@pytest.mark.parametrize(("now", "changed"), [(0.49, True), (0.51, False), (1.9, False), (2.1, True)])
def test_a_speed_has_changed_by_more_than_a_factor_of_two(now: float, changed: bool) -> None:
    assert has_changed(1.0, now) is changed


# What is allowed.


@pytest.mark.parametrize(
    ("max_error", "allowed"),
    [
        (0, ["average"]),
        (2**-11, ["average", "fp16"]),
        (2**-8 - 1e-9, ["average", "fp16"]),
        (2**-8, ["average", "bf16"]),
        (1 / 254, ["average", "bf16", "int8"]),
        (1 / 14, ["average", "bf16", "int8", "int4"]),
        (math.inf, ["average", "bf16", "int8", "int4", "top_k", "power_sgd"]),
    ],
)
def test_the_bound_decides_which_hooks_there_are_to_choose_from(max_error: float, allowed: list[str]) -> None:
    assert hooks.auto(max_error=max_error).allowed(2) == allowed
    # Then hooks round twice.
    assert hooks.auto(max_error=2 * max_error).allowed(3) == allowed


def test_an_error_that_is_small_enough_on_two_hosts_may_be_too_large_on_three() -> None:
    assert hooks.auto(max_error=1 / 254).allowed(3) == ["average", "fp16"]
    assert hooks.auto(max_error=2**-11).allowed(3) == ["average"]


@pytest.mark.parametrize("members", [2, 3, 1_000])
def test_by_default_gradients_keep_the_range_of_float32(members: int) -> None:
    hook, parameter = hooks.auto(), Parameter(torch.zeros(3))
    assert hook.allowed(members) == ["average", "bf16"]
    hook.take(choice_of(hook.allowed(members)[-1]))
    values = torch.tensor([1e5, 1e-6, -3e-30])
    torch.testing.assert_close(reduced(hook, parameter, values), values, rtol=2**-8, atol=0)


@pytest.mark.parametrize("max_error", [-1, -1e-9, math.nan, "0.1", True])
def test_a_bound_that_is_no_bound_is_refused(max_error: object) -> None:
    with pytest.raises(OptionError, match=r"max_error must be a number that is not negative.*\(max_error: "):
        hooks.auto(max_error=max_error)  # type: ignore[arg-type]


# What hooks cost.


def like(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


@pytest.mark.parametrize(
    ("make", "members", "sent"),
    [
        (hooks.average, 2, 1.0),
        (hooks.average, 4, 1.5),
        (hooks.fp16, 2, 0.5),
        (hooks.fp16, 4, 0.75),
        (hooks.int8, 2, (1 + 4 / 256) / 4),
        (hooks.int4, 2, (0.5 + 4 / 256) / 4),
        (hooks.top_k, 2, 0.02),
        (_KNOWN["power_sgd"][1], 2, (256 + 512 + 512) / (256 * 512 + 512)),
    ],
)
def test_hooks_are_found_to_send_what_they_state(make: object, members: int, sent: float) -> None:
    cost = measure_cost(make(), like((256, 512), (512,)), members)  # type: ignore[operator]
    assert cost.sent == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "sent"),
    [(torch.float64, 0.25), (torch.complex64, 0.5), (torch.bfloat16, 1.0), (torch.float16, 1.0)],
)
def test_what_a_hook_saves_is_less_for_gradients_that_are_short_already(
    dtype: torch.dtype, sent: float
) -> None:
    cost = measure_cost(hooks.fp16(), like((64, 64), (), dtype=dtype), 2)
    assert cost.sent == pytest.approx(sent)


def test_gradients_of_several_types_count_by_their_bytes() -> None:
    gradients = like((96,)) + like((64,), dtype=torch.bfloat16)
    assert measure_cost(hooks.fp16(), gradients, 2).sent == pytest.approx(0.5 * 0.75 + 1.0 * 0.25)


@pytest.mark.parametrize("gradients", [[], like((0,))])
def test_nothing_to_send_costs_no_messages(gradients: list[Tensor]) -> None:
    assert measure_cost(hooks.average(), gradients, 2).sent == 0


class TimedHook(Hook):
    """Takes 3 s before its all-reduce and 5 s after it, by a clock of its own, and longer at first."""

    def __init__(self) -> None:
        self.now, self._slow = 0.0, 7.0

    def reduce(self, bucket: GradBucket, group: Group) -> Reduction:
        self.now += 3.0 + self._slow
        yield group.all_reduce(bucket.buffer())
        self.now += 5.0 + self._slow
        self._slow = 0.0
        return bucket.buffer()


def test_what_a_hook_does_before_and_after_its_collective_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook = TimedHook()
    monkeypatch.setattr(hook_cost.time, "perf_counter", lambda: hook.now)
    cost = measure_cost(hook, like((25, 10)), 2)
    assert (cost.before, cost.after) == (pytest.approx(3.0 / 1000), pytest.approx(5.0 / 1000))


@pytest.mark.parametrize(
    "shapes", [[()], [(3, 0), (5,)], [(40_000_000, 2)], [(2, 30_000_000)], [(7, 3, 2)] * 9]
)
def test_a_sample_has_the_shapes_of_parameters_and_is_not_large(shapes: list[tuple[int, ...]]) -> None:
    bucket = SampleBucket(like(*shapes))
    assert 0 < bucket.gradients.numel() <= max(1 << 20, 2 * 30_000_000)
    for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
        assert parameter.shape == view.shape


@pytest.mark.parametrize("name", _KNOWN)
def test_measuring_a_hook_leaves_the_global_generator_as_it_is(name: str) -> None:
    before = torch.get_rng_state()
    measure_cost(_KNOWN[name][1](), like((64, 64), (64,)), 3)
    assert torch.get_rng_state().equal(before)


# The hook that delegates.


class Values:
    """A bucket of one parameter."""

    def __init__(self, parameter: Parameter, values: Tensor) -> None:
        self.parameters = [parameter]
        self.gradients = values
        self.views = [values.view(parameter.shape)]


def reduced(hook: Hook, parameter: Parameter, values: Tensor, *, ends_well: bool = True) -> Tensor:
    """A step of two ranks with the same gradients."""
    hook.begin(None)
    result = reduced_once(hook, parameter, values)
    if ends_well:
        hook.finish([parameter], [2], None)
    return result


def reduced_once(hook: Hook, parameter: Parameter, values: Tensor) -> Tensor:
    """One of perhaps several reductions in a step."""
    reduction = hook.reduce(GradBucket(Values(parameter, values.clone()), 0, is_last=True), CountingGroup(2))  # type: ignore[arg-type]
    result: object = None
    try:
        while True:
            result = reduction.send(result).wait(lambda: None)  # type: ignore[attr-defined]
    except StopIteration as stop:
        result = stop.value
    assert isinstance(result, Tensor)
    # The group adds nothing up, so an average by all_reduce is half of what two ranks would get.
    return result


def choice_of(name: str) -> Choice:
    return Choice(name, {name: 1.0}, link(10))


@pytest.mark.parametrize(
    ("name", "factor"),
    [("fp16", 1), ("bf16", 1), ("int8", 1), ("int4", 1), ("top_k", 1), ("power_sgd", 2)],
)
def test_what_one_hook_has_left_out_is_sent_once_when_another_is_taken(name: str, factor: int) -> None:
    parameter, values = Parameter(torch.zeros(16, 16)), torch.randn(256)
    hook = hooks.auto(max_error=2**-11 if name == "fp16" else math.inf)
    hook.take(choice_of(name))
    first = factor * reduced(hook, parameter, values)
    assert not first.equal(values)
    hook.take(choice_of("average"))
    lost = reduced(hook, parameter, values, ends_well=False)
    second = reduced(hook, parameter, values)
    torch.testing.assert_close(lost, second)
    torch.testing.assert_close(first + 2 * second, 2 * values)
    assert reduced(hook, parameter, values).equal(values / 2)


@pytest.mark.parametrize("name", ["int4", "top_k", "power_sgd"])
def test_gradients_that_come_late_in_the_step_of_a_change_get_nothing_of_what_was_left_out(name: str) -> None:
    parameter, values, late = Parameter(torch.zeros(16, 16)), torch.randn(256), torch.randn(256)
    hook = hooks.auto(max_error=math.inf)
    hook.take(choice_of(name))
    reduced(hook, parameter, values)
    hook.take(choice_of("average"))
    hook.begin(None)
    assert not reduced_once(hook, parameter, values).equal(values / 2)
    assert reduced_once(hook, parameter, late).equal(late / 2)
