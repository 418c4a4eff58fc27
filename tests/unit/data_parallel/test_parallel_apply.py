"""parallel_apply: one thread per module, in the caller's context; errors keep their type."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import TWO
from torch import nn

from paceline import CountError, parallel_apply


class Call(nn.Module):
    """A module from a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def apply_all(function: Callable[..., Any], count: int = 3) -> list[Any]:
    return parallel_apply([Call(function)] * count, [()] * count)


def failing_at(failures: dict[int, BaseException]) -> list[nn.Module]:
    """Three modules, some of which raise."""

    def one(index: int) -> Callable[[], int]:
        def run() -> int:
            if index in failures:
                raise failures[index]
            return index

        return run

    return [Call(one(index)) for index in range(3)]


def run_failing(failures: dict[int, BaseException]) -> list[Any]:
    return parallel_apply(failing_at(failures), [()] * 3, devices=["cpu"] * 3)


@pytest.fixture(autouse=True)
def same_threads_after() -> Iterator[None]:
    before = {*threading.enumerate()}
    yield
    assert {*threading.enumerate()} == before


def test_each_module_gets_its_own_input_and_results_keep_the_order() -> None:
    modules = [nn.Linear(2, 2) for _ in range(4)]
    inputs = [torch.randn(3, 2) for _ in range(4)]
    outputs = parallel_apply(modules, inputs)
    torch.testing.assert_close(outputs, [m(x) for m, x in zip(modules, inputs, strict=True)])


def test_all_modules_run_at_the_same_time() -> None:
    everyone = threading.Barrier(3, timeout=30)
    assert {*apply_all(everyone.wait)} == {0, 1, 2}


def test_no_modules_give_no_results() -> None:
    assert parallel_apply([], []) == []


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ((1, 2), (1, 2)),
        ([1, 2], (1, 2)),
        ((), ()),
        (7, (7,)),
        (None, (None,)),
        ({"a": 1}, ({"a": 1},)),
        ("ab", ("ab",)),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_tuple_or_list_holds_the_arguments_and_anything_else_is_the_only_one(
    given: object, seen: tuple[object, ...], count: int
) -> None:
    assert parallel_apply([Call(lambda *args: args)] * count, [given] * count) == [seen] * count


def test_a_tensor_is_one_argument_and_not_its_rows() -> None:
    (seen,) = parallel_apply([Call(lambda *args: args)], [torch.ones(2, 2)])
    assert len(seen) == 1


def test_each_module_gets_its_own_keyword_arguments() -> None:
    modules = [Call(lambda x, *, by: x * by)] * 2
    assert parallel_apply(modules, [2, 3], [{"by": 10}, {"by": 100}]) == [20, 300]


@pytest.mark.parametrize(
    "arguments",
    [
        {"inputs": [1]},
        {"inputs": [1, 2, 3]},
        {"inputs": [1, 2], "kwargs_tup": [{}]},
        {"inputs": [1, 2], "kwargs_tup": []},
        {"inputs": [1, 2], "devices": ["cpu"]},
        {"inputs": [1, 2], "devices": ["cpu"] * 3},
    ],
)
def test_counts_that_differ_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=r"modules: 2") as caught:
        parallel_apply([nn.Identity()] * 2, **arguments)
    assert caught.type is CountError


@pytest.mark.parametrize("devices", [None, TWO, [torch.device("cpu"), None], ("cpu", "cpu:0")])
def test_devices_may_be_named_in_any_way_or_left_out(devices: Any) -> None:
    assert parallel_apply([nn.Identity()] * 2, [1, 2], devices=devices) == [1, 2]


@pytest.mark.parametrize("enabled", [False, True])
def test_grad_mode_holds_in_every_thread(enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        assert apply_all(torch.is_grad_enabled) == [enabled] * 3


@pytest.mark.parametrize("enabled", [False, True])
def test_inference_mode_holds_in_every_thread(enabled: bool) -> None:
    with torch.inference_mode(enabled):
        assert apply_all(torch.is_inference_mode_enabled) == [enabled] * 3
        assert apply_all(lambda: torch.ones(1).is_inference()) == [enabled] * 3


def test_grad_enabled_inside_inference_mode_holds_in_every_thread() -> None:
    def state() -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode(), torch.enable_grad():
        assert apply_all(state) == [state()] * 3


def autocast_state() -> tuple[bool, torch.dtype, bool]:
    enabled = torch.is_autocast_enabled("cpu")
    return enabled, torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [False, True])
def test_autocast_and_its_dtype_hold_in_every_thread(dtype: torch.dtype, cache: bool) -> None:
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
        assert apply_all(autocast_state) == [(True, dtype, cache)] * 3
        assert {y.dtype for y in parallel_apply([linear] * 2, [x, x])} == {dtype}


def test_autocast_turned_off_inside_autocast_is_off_in_every_thread() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert [state[0] for state in apply_all(autocast_state)] == [False] * 3


def test_default_device_context_holds_in_every_thread() -> None:
    with torch.device("meta"):
        assert {y.device.type for y in apply_all(lambda: torch.ones(1))} == {"meta"}
        assert torch.get_default_device().type == "meta"


def test_default_device_set_globally_holds_in_every_thread() -> None:
    torch.set_default_device("meta")
    try:
        assert {y.device.type for y in apply_all(lambda: torch.ones(1))} == {"meta"}
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)


def test_a_context_overrides_the_default_device_in_every_thread() -> None:
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            assert {y.device.type for y in apply_all(lambda: torch.ones(1))} == {"cpu"}
    finally:
        torch.set_default_device(None)


def test_the_number_of_threads_set_for_torch_holds_in_every_thread() -> None:
    everyone, counts = threading.Barrier(3, timeout=30), []
    matrix = torch.ones(64, 64)

    def multiply() -> None:
        everyone.wait()
        counts.append(len([*Path("/proc/self/task").iterdir()]))
        everyone.wait()
        matrix @ matrix
        everyone.wait()
        counts.append(len([*Path("/proc/self/task").iterdir()]))
        everyone.wait()

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        apply_all(multiply)
    finally:
        torch.set_num_threads(before)
    assert len({*counts}) == 1


def state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_state(),
        torch.get_default_device(),
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
    ],
    ids=["grad mode", "autocast", "autocast dtype"],
)
def test_what_a_replica_changes_does_not_leak_into_the_caller(change: Callable[[], object]) -> None:
    before = state()
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            inside = state()
            apply_all(change)
            assert state() == inside
        apply_all(change)
        assert state() == before
    finally:
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", torch.bfloat16)


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_thread_context_is_restored(fails: bool) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16), torch.device("meta"):
        before = state()
        if fails:
            with pytest.raises(KeyError):
                run_failing({0: KeyError("x"), 2: KeyError("y")})
        else:
            apply_all(lambda: None)
        assert state() == before


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("kind", [KeyError, ValueError, RuntimeError, ZeroDivisionError, StopIteration])
def test_an_error_keeps_its_type_and_says_where_it_was_caught(index: int, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        run_failing({index: kind("the reason")})
    message = str(caught.value)
    assert caught.type is kind
    assert message.startswith(
        f"Caught {kind.__name__} in replica {index} on device cpu.\nOriginal Traceback (most recent call"
    )
    assert "in run\n" in message
    assert "the reason" in message


def test_an_error_in_a_single_module_has_the_same_message() -> None:
    with pytest.raises(KeyError, match="Caught KeyError in replica 0 on device cpu"):
        parallel_apply(failing_at({0: KeyError("x")})[:1], [()])


def test_the_original_error_is_the_cause() -> None:
    error = KeyError("x")
    with pytest.raises(KeyError) as caught:
        run_failing({1: error})
    assert caught.value.__cause__ is error


def test_the_first_error_by_replica_order_wins_even_if_it_comes_last() -> None:
    later_failed = threading.Event()

    def first() -> None:
        assert later_failed.wait(30)
        raise KeyError("first")

    def second() -> None:
        later_failed.set()
        raise ValueError("second")

    with pytest.raises(KeyError, match="replica 0"):
        parallel_apply([Call(first), Call(second)], [(), ()])


def test_the_others_finish_before_the_error_is_raised() -> None:
    failed, finished = threading.Event(), []

    def first() -> None:
        failed.set()
        raise KeyError

    def second() -> None:
        assert failed.wait(30)
        finished.append(True)

    with pytest.raises(KeyError):
        parallel_apply([Call(first), Call(second)], [(), ()])
    assert finished


class PickyError(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code + 1})")
        self.code = code


@pytest.mark.parametrize(
    "error",
    [
        PickyError(3, reason="no"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
        ExceptionGroup("several", [KeyError()]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_cannot_be_built_from_a_message_is_raised_itself(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        run_failing({1: error})
    assert caught.value is error
    assert any("in replica 1 on device cpu" in note for note in caught.value.__notes__)


def test_attributes_of_an_error_are_kept() -> None:
    error = RuntimeError("x")
    error.hint = "try again"
    with pytest.raises(RuntimeError, match="replica 2") as caught:
        run_failing({2: error})
    assert caught.value.hint == "try again"


def test_number_and_file_of_an_os_error_are_kept() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        run_failing({1: FileNotFoundError(2, "no such file", "data.bin")})
    assert caught.value.errno == 2
    assert caught.value.filename == "data.bin"


def test_notes_of_an_error_are_kept() -> None:
    error = ValueError("x")
    error.add_note("a note")
    with pytest.raises(ValueError, match="replica 1") as caught:
        run_failing({1: error})
    assert "a note" in caught.value.__notes__


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("index", [0, 1])
def test_interrupts_are_raised_unchanged(kind: type[BaseException], index: int) -> None:
    error = kind()
    with pytest.raises(kind) as caught:
        run_failing({index: error})
    assert caught.value is error


def test_the_next_call_works_after_an_error() -> None:
    with pytest.raises(KeyError):
        run_failing({1: KeyError()})
    assert run_failing({}) == [0, 1, 2]


class Thing:
    pass


@pytest.mark.parametrize("fails", [False, True])
def test_no_reference_cycle_is_left_behind(fails: bool) -> None:
    def call() -> weakref.ref[Thing]:
        thing = Thing()

        def run(held: Thing) -> None:
            if fails:
                raise KeyError(held)

        try:
            parallel_apply([Call(run)] * 2, [thing, thing])
        except KeyError:
            assert fails
        return weakref.ref(thing)

    call()
    gc.collect()
    gc.disable()
    try:
        assert call()() is None
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_gradients_flow_through_every_replica() -> None:
    linear, x = nn.Linear(2, 2).double(), torch.randn(4, 2, dtype=torch.double)
    expected = torch.autograd.grad(linear(x).sum(), [*linear.parameters()])
    outputs = parallel_apply([linear, linear], x.chunk(2))
    torch.testing.assert_close(
        torch.autograd.grad(torch.cat(outputs).sum(), [*linear.parameters()]), expected
    )


def test_calls_may_be_nested() -> None:
    inner = Call(lambda n: parallel_apply([nn.Identity()] * 2, [n, n + 1]))
    assert parallel_apply([inner, inner], [0, 10]) == [[0, 1], [10, 11]]


def test_an_error_from_a_nested_call_names_both_replicas() -> None:
    outer = [Call(lambda: None), Call(lambda: run_failing({2: KeyError("deep")}))]
    with pytest.raises(
        KeyError, match=r"(?s)Caught KeyError in replica 1.*Caught KeyError in replica 2.*deep"
    ):
        parallel_apply(outer, [(), ()])
