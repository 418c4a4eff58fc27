"""run_ranks: results, errors, deadlines, and that no process is left."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.testing import RankDiedError, RanksError, RemoteError, run_ranks
from paceline.testing.rank_process import END_SIGNAL

pytestmark = pytest.mark.usefixtures("nothing_left")


@dataclass
class Point:
    x: int


class CustomError(Exception):
    pass


class TwoPartError(Exception):
    """Pickles, but cannot be rebuilt: its constructor wants more than its args."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"a is {a}, b is {b}")


class LockError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def own_rank(rank: int) -> int:
    return rank


def sum_of_ranks(rank: int) -> torch.Tensor:
    value = torch.tensor([float(rank), 1.0])
    dist.all_reduce(value)
    return value


def surroundings(_: int) -> dict[str, object]:
    return {
        "threads": torch.get_num_threads(),
        "group": dist.is_initialized(),
        "server threads": len(list(Path(f"/proc/{os.getppid()}/task").iterdir())),
        "directory": str(Path.cwd()),
        "variable": os.environ.get("RANK_TEST_VARIABLE"),
        "blas": os.environ.get("OPENBLAS_NUM_THREADS"),
    }


def moved(rank: int, point: Point, step: int) -> Point:
    return Point(point.x + rank * step)


def large(rank: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor + rank


def returned(_: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors


def say(rank: int) -> None:
    sys.stdout.write(f"rank {rank} says hello\n")
    sys.stderr.write(f"rank {rank} says alas\n")


def start_helper(_: int) -> int:
    return subprocess.Popen(["sleep", "300"]).pid


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise CustomError("the number was 17")


def fail_on_both(rank: int) -> None:
    raise (KeyError if rank else CustomError)(f"from {rank}")


def fail_while_others_wait(rank: int) -> None:
    dist.barrier()  # both are here
    if rank == 0:
        raise CustomError("left the others waiting")
    dist.all_reduce(torch.ones(1))


def fail_unpicklably(rank: int) -> None:
    raise LockError("held a lock") if rank else TwoPartError(1, 2)


def leave_early(_: int) -> None:
    sys.exit("enough")


def return_a_lock(_: int) -> object:
    return threading.Lock()


def exit_at_once(rank: int) -> None:
    if rank == 1:
        os._exit(3)


def kill_itself(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def crash(_: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hang_in_a_thread(_: int) -> None:
    thread = threading.Thread(target=hang_by_name, daemon=True)
    thread.start()
    thread.join()


def hang_by_name() -> None:
    time.sleep(300)


def hang_on_one(rank: int) -> None:
    if rank == 1:
        hang_by_name()


def stop_itself(_: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def answer_nothing(_: int) -> None:
    signal.signal(END_SIGNAL, signal.SIG_IGN)
    time.sleep(300)


def hang_at_the_end(_: int) -> None:
    dist.destroy_process_group = hang_by_name


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_in_rank_order(world: int) -> None:
    assert run_ranks(own_rank, world) == list(range(world))


@pytest.mark.parametrize("world", [1, 3])
def test_collectives_reach_every_rank(world: int) -> None:
    expected = [float(sum(range(world))), float(world)]
    assert [value.tolist() for value in run_ranks(sum_of_ranks, world)] == [expected] * world


def test_a_rank_has_its_callers_directory_environment_and_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_ranks(own_rank)
    monkeypatch.setenv("RANK_TEST_VARIABLE", "here")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    (got,) = run_ranks(surroundings, 1)
    assert got == {
        "threads": 1,
        "group": True,
        "server threads": 1,
        "directory": str(tmp_path),
        "variable": "here",
        "blas": None,
    }


def test_no_backend_means_no_group() -> None:
    assert [got["group"] for got in run_ranks(surroundings, backend=None)] == [False, False]


def test_arguments_and_results_may_be_instances_of_the_test_modules_classes() -> None:
    assert run_ranks(moved, args=(Point(5), 2)) == [Point(5), Point(7)]


def test_fn_may_be_in_a_module_that_is_not_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "outer_of_test" / "inner"
    package.mkdir(parents=True)
    (package / "helper.py").write_text("class Value:\n    pass\n")
    (package / "module.py").write_text(
        "from outer_of_test.inner.helper import Value\n\ndef make(rank):\n    return Value()\n"
    )
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        module = importlib.import_module("outer_of_test.inner.module")
    (value,) = run_ranks(module.make, 1)
    assert type(value) is module.Value


def test_large_tensors_can_be_passed_and_returned() -> None:
    tensor = torch.arange(300_000)
    got = run_ranks(large, args=(tensor,))
    assert all(torch.equal(value, tensor + rank) for rank, value in enumerate(got))


def test_tensors_of_every_kind_arrive_unchanged() -> None:
    given = [
        torch.empty(0),
        torch.tensor(True),
        torch.arange(12).view(3, 4).t(),
        torch.arange(5.0)[2:],
        torch.arange(3).to(torch.bfloat16),
        torch.randn(2, dtype=torch.cdouble).conj(),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(3).to_sparse(),
    ]
    (got,) = run_ranks(returned, 1, args=(given,), backend=None)
    for here, there in zip(given, got, strict=True):
        kinds = [
            (type(each), each.dtype, each.layout, each.requires_grad, each.is_conj())
            for each in (here, there)
        ]
        assert kinds[0] == kinds[1]
        assert torch.equal(here.to_dense(), there.to_dense())
        assert here.is_sparse or here.stride() == there.stride()


def test_ranks_print_where_the_caller_prints(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(say, backend=None)  # gloo prints too, in some versions of torch
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["rank 0 says hello", "rank 1 says hello"]
    assert sorted(err.splitlines()) == ["rank 0 says alas", "rank 1 says alas"]


def test_a_ranks_own_processes_end_with_it(wait_until_gone: Callable[[list[int]], None]) -> None:
    wait_until_gone(run_ranks(start_helper))


def test_an_error_keeps_its_type_and_shows_where_it_was_raised() -> None:
    with pytest.raises(RanksError, match="fail_on_one failed on rank 1") as caught:
        run_ranks(fail_on_one)
    assert isinstance(caught.value, PacelineError)
    (error,) = caught.value.exceptions
    assert type(error) is CustomError
    assert str(error) == "the number was 17"
    text = shown(caught.value)
    assert "raised on rank 1" in text
    assert 'raise CustomError("the number was 17")' in text
    assert "in fail_on_one" in text


def test_every_ranks_error_comes_back_in_rank_order() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(fail_on_both)
    assert [type(error) for error in caught.value.exceptions] == [CustomError, KeyError]


def test_splitting_the_error_group_keeps_its_type() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(fail_on_both)
    picked, rest = caught.value.split(KeyError)
    assert isinstance(picked, RanksError)
    assert isinstance(rest, RanksError)
    assert [type(error) for error in rest.exceptions] == [CustomError]


def test_a_rank_that_waits_for_a_failed_rank_is_ended_soon() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError, match="rank 1 was still busy, and ended because of rank 0") as caught:
        run_ranks(fail_while_others_wait)
    assert time.monotonic() - start < 20
    assert [type(error) for error in caught.value.exceptions] == [CustomError]
    assert "in fail_while_others_wait" in "".join(caught.value.__notes__)


def test_a_rank_that_is_ended_after_others_still_tells_where_it_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = signal.pidfd_send_signal

    def slow_send(pidfd: int, number: signal.Signals) -> None:
        send(pidfd, number)
        time.sleep(0.3)  # as on a busy machine: rank 1 could notice that rank 0 is gone

    monkeypatch.setattr("paceline.testing.rank_pool.signal.pidfd_send_signal", slow_send)
    with pytest.raises(RanksError) as caught:
        run_ranks(fail_while_others_wait)
    assert "in fail_while_others_wait" in "".join(caught.value.__notes__)


def test_errors_that_cannot_be_pickled_are_named() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(fail_unpicklably)
    first, second = caught.value.exceptions
    assert isinstance(first, RemoteError)
    assert isinstance(second, RemoteError)
    assert "TwoPartError: a is 1, b is 2" in str(first)
    assert "LockError: held a lock" in str(second)
    assert 'raise LockError("held a lock")' in shown(second)


def test_an_exit_is_an_error() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(leave_early, 1)
    assert "SystemExit: enough" in str(caught.value.exceptions[0])


def test_a_result_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(return_a_lock, 1)
    assert "the result cannot be pickled (type: lock)" in str(caught.value.exceptions[0])


@pytest.mark.parametrize(
    ("fn", "cause"),
    [(exit_at_once, "exit code: 3"), (kill_itself, "signal: SIGKILL")],
)
def test_a_dead_rank_is_reported_with_its_cause(fn: Callable[[int], None], cause: str) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(fn)
    (error,) = caught.value.exceptions
    assert type(error) is RankDiedError
    assert str(error) == f"rank 1 died ({cause})"


def test_a_crash_shows_its_stack() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(crash, 1)
    assert "signal: SIGSEGV" in str(caught.value.exceptions[0])
    assert "in crash" in shown(caught.value)


def test_the_deadline_shows_every_ranks_stacks() -> None:
    with pytest.raises(RanksError, match="hang_in_a_thread did not finish") as caught:
        run_ranks(hang_in_a_thread, timeout=1.0)
    (error,) = caught.value.exceptions
    assert isinstance(error, TimeoutError)
    assert "ranks 0, 1 did not finish in time (timeout: 1.0 s)" in str(error)
    assert "rank 0 was here" in str(error)
    assert "rank 1 was here" in str(error)
    assert str(error).count("in hang_by_name") == 2
    assert str(error).count("in hang_in_a_thread") == 2


def test_the_deadline_names_the_ranks_that_had_finished() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(hang_on_one, timeout=1.0)
    text = str(caught.value.exceptions[0])
    assert "rank 1 did not finish" in text
    assert "rank 0 had finished" in text


def test_the_deadline_shows_where_a_rank_was_stopped() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(stop_itself, 1, timeout=1.0)
    assert "in stop_itself" in str(caught.value.exceptions[0])


def test_the_deadline_ends_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.testing.rank_pool.END_SECONDS", 0.2)
    with pytest.raises(RanksError) as caught:
        run_ranks(answer_nothing, 1, timeout=1.0)
    assert "left no stacks" in str(caught.value.exceptions[0])


def test_a_rank_that_cannot_leave_its_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.testing.rank_pool.CLOSE_SECONDS", 0.5)
    with pytest.raises(RanksError, match="leaving the group did not finish") as caught:
        run_ranks(hang_at_the_end, 1)
    assert "in hang_by_name" in str(caught.value.exceptions[0])


def test_an_unknown_backend_is_the_ranks_error() -> None:
    with pytest.raises(RanksError, match="joining the group failed") as caught:
        run_ranks(own_rank, 1, backend="carrier pigeon")
    assert "carrier pigeon" in str(caught.value.exceptions[0])


def test_an_interrupted_caller_ends_its_ranks() -> None:
    is_over = threading.Event()

    def interrupt() -> None:
        # Again if it was lost: Python only prints an exception that is raised inside a finalizer. Not soon,
        # because a second interrupt while the ranks are being ended would end pytest.
        seconds = 2.0
        while not is_over.wait(seconds):
            os.kill(os.getpid(), signal.SIGINT)
            seconds = 30.0

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ranks(hang_on_one)
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("world", [0, -1])
def test_world_must_be_positive(world: int) -> None:
    with pytest.raises(ValueError, match=rf"world must be positive \(world: {world}\)"):
        run_ranks(own_rank, world)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_timeout_must_be_positive(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be positive"):
        run_ranks(own_rank, timeout=timeout)


def test_fn_must_be_importable() -> None:
    def nested(rank: int) -> None: ...

    for fn in (nested, lambda _: None, Point(1).__repr__, "own_rank"):
        with pytest.raises(TypeError, match="fn must be a function at the top level of a module"):
            run_ranks(fn)


def test_args_must_be_picklable() -> None:
    with pytest.raises(TypeError, match="args must be picklable"):
        run_ranks(own_rank, args=(threading.Lock(),))


PROGRAM = """
import os, sys, time
from paceline.testing import RanksError, forkserver, run_ranks

class Here:
    pass

def make(rank):
    return Here()

def hang(rank):
    print(os.getpid(), flush=True)
    time.sleep(300)

if __name__ == "__main__":
    forkserver.PRELOADED = ("torch",)  # without a group no rank needs more
    assert all(type(value) is Here for value in run_ranks(make, backend=None))
    print(forkserver.current().directory, forkserver.current().pid, flush=True)
    try:
        run_ranks(hang, backend=None)
    except RanksError as error:
        print("caught", len(error.exceptions), flush=True)
    run_ranks(make, backend=None)
    print(forkserver.current().directory, forkserver.current().pid, flush=True)
    run_ranks(hang, backend=None)
"""


def test_a_program_whose_server_and_then_itself_are_killed_leaves_nothing(
    tmp_path: Path, wait_until_gone: Callable[[list[int]], None]
) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, text=True) as program:
        lines = program.stdout
        assert lines is not None
        first, server = lines.readline().split()
        ranks = [int(lines.readline()), int(lines.readline())]
        os.kill(int(server), signal.SIGKILL)
        assert lines.readline() == "caught 2\n"
        wait_until_gone([int(server), *ranks])
        second, server = lines.readline().split()
        ranks = [int(lines.readline()), int(lines.readline())]
        assert Path(second).is_dir()
        program.kill()
        wait_until_gone([int(server), *ranks])
    assert not Path(first).exists()
    assert not Path(second).exists()
