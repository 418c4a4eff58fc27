"""Which failure is shown as the root cause, and how the others are summed up."""

import signal
from typing import Any

import pytest
import torch

from paceline.ddp import wrapper
from paceline.tools.run.failures import RankFailure, in_lines, summarise, was_stopped

GLOO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by"


def failure(rank: int, time: float, kind: str = "ValueError", message: str = "", **more: Any) -> RankFailure:
    bases = more.pop("bases", ["builtins.Exception"])
    origins = [{"types": bases, "message": message}] if kind else []
    trace = f"Traceback (most recent call last):\n{kind}: {message}\n" if kind else ""
    values = {"host": "h", "pid": 7, "exit_code": 1, "trace": trace, "origins": origins} | more
    return RankFailure(rank=rank, time=time, kind=kind, message=message, **values)


def peer(rank: int, time: float) -> RankFailure:
    return failure(rank, time, "PeerError", f"seen by {rank}", bases=["paceline.errors.PeerError"])


def gloo(rank: int, time: float) -> RankFailure:
    return failure(rank, time, "RuntimeError", GLOO, bases=["builtins.RuntimeError"])


def killed(rank: int, time: float, *, signum: int = signal.SIGKILL, **more: Any) -> RankFailure:
    return failure(rank, time, "", exit_code=-signum, **more)


@pytest.mark.parametrize(
    "earlier", [peer(0, 1.0), gloo(0, 1.0), killed(0, 1.0, was_stopped=True)], ids=["peer", "gloo", "stopped"]
)
@pytest.mark.parametrize("real", [failure(1, 2.0), killed(1, 2.0)], ids=["raised", "killed"])
def test_a_secondary_failure_is_not_the_root_cause(earlier: RankFailure, real: RankFailure) -> None:
    summary = summarise([earlier, real])
    assert summary is not None
    assert (summary.root_cause, summary.others) == (real, (earlier,))


def test_the_earliest_failure_is_the_root_cause() -> None:
    summary = summarise([failure(0, 3.0, "OSError"), failure(1, 2.0), failure(2, 4.0, "KeyError")])
    assert summary is not None
    assert (summary.root_cause.rank, [other.rank for other in summary.others]) == (1, [0, 2])


def test_among_secondary_failures_the_earliest_comes_first() -> None:
    summary = summarise([peer(0, 3.0), gloo(1, 2.0), killed(2, 1.0, was_stopped=True)])
    assert summary is not None
    assert summary.root_cause.rank == 1
    assert str(summary).endswith(
        "\na rank that is not listed here caused these failures: it may be on another host"
    )


@pytest.mark.parametrize(
    ("failed", "ended_before", "last_line"),
    [
        (peer(0, 1.0), [1, 2], "ranks 1, 2 had ended before, with exit code 0"),
        (peer(0, 1.0), [], "PeerError: seen by 0"),
        (failure(0, 1.0), [1], "ValueError: "),
    ],
    ids=["because others ended", "nobody knows why", "by itself"],
)
def test_on_one_host_ranks_that_ended_before_are_named(
    failed: RankFailure, ended_before: list[int], last_line: str
) -> None:
    summary = str(summarise([failed], ended_before=ended_before, is_one_host=True))
    assert summary.splitlines()[-1].strip() == last_line.strip()


def test_without_failures_there_is_no_summary() -> None:
    assert summarise([]) is None


@pytest.mark.parametrize("message", ["address already in use (EADDRINUSE)", "mat1 and mat2 shapes"])
def test_not_every_runtime_error_is_secondary(message: str) -> None:
    assert not failure(0, 1.0, "RuntimeError", message, bases=["builtins.RuntimeError"]).is_secondary


def test_the_same_on_several_ranks_is_told_once() -> None:
    summary = str(summarise([failure(rank, rank, message="same") for rank in (2, 0, 1)]))
    assert summary.startswith("ranks 0, 1, 2 failed (host h, pid 7, ")
    assert summary.count("ValueError: same") == 1


def test_secondary_failures_of_one_type_share_a_line() -> None:
    others = [peer(0, 1.0), gloo(2, 1.0), peer(3, 1.0), killed(4, 1.0, was_stopped=True)]
    others += [failure(5, 3.0, "OSError", "own\nsecond line")]
    assert str(summarise([failure(1, 2.0, message="first"), *others])).splitlines()[1:] == [
        "  Traceback (most recent call last):",
        "  ValueError: first",
        "ranks 0, 3: PeerError: seen by 0 (because another rank failed)",
        f"rank 2: RuntimeError: {GLOO} (because another rank failed)",
        "rank 4: stopped",
        "rank 5: OSError: own",
    ]


@pytest.mark.parametrize(
    "library",
    ["/x/lib/python3.11/threading.py", torch.__file__, wrapper.__file__],
    ids=["python", "torch", "ours"],
)
def test_an_interrupted_rank_is_told_by_its_place_in_the_program(library: str) -> None:
    trace = f'File "train.py", line 3, in step\nFile "{library}", line 9, in wait\n'
    assert in_lines([failure(0, 1.0, "KeyboardInterrupt", trace=trace, was_stopped=True)]) == [
        "rank 0: interrupted at train.py:3 in step"
    ]


@pytest.mark.parametrize(
    ("exit_code", "at", "stopped"),
    [
        (-signal.SIGTERM, 2.0, True),
        (143, 2.0, True),
        (130, 2.0, True),
        (143, 0.5, False),
        (1, 2.0, False),
        (-signal.SIGSEGV, 2.0, False),
    ],
)
def test_a_rank_was_stopped_if_it_was_asked_to(exit_code: int, at: float, stopped: bool) -> None:
    assert was_stopped(exit_code, at=at, asked_at=1.0) is stopped
    assert not was_stopped(exit_code, at=at, asked_at=None)


@pytest.mark.parametrize(
    ("exit_code", "words", "shell"),
    [
        (3, "exited with code 3", 3),
        (-signal.SIGSEGV, "killed by SIGSEGV", 139),
        (-40, "killed by signal 40", 168),
    ],
)
def test_exit_codes_are_told_as_shells_know_them(exit_code: int, words: str, shell: int) -> None:
    ended = failure(0, 1.0, "", exit_code=exit_code)
    assert (ended.in_a_line(), ended.shell_code) == (words, shell)
