"""Which failure is told first, and how the others are folded."""

import signal
from typing import Any

import pytest

from paceline.tools.run.failures import Failure, folded, verdict, was_ended

GLOO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by"


def failure(rank: int, time: float, kind: str = "ValueError", message: str = "", **more: Any) -> Failure:
    bases = more.pop("bases", ["builtins.Exception"])
    roots = [{"types": bases, "message": message}] if kind else []
    trace = f"Traceback (most recent call last):\n{kind}: {message}\n" if kind else ""
    values = {"host": "h", "pid": 7, "exit_code": 1, "trace": trace, "roots": roots} | more
    return Failure(rank=rank, time=time, kind=kind, message=message, **values)


def peer(rank: int, time: float) -> Failure:
    return failure(rank, time, "PeerError", f"seen by {rank}", bases=["paceline.errors.PeerError"])


def gloo(rank: int, time: float) -> Failure:
    return failure(rank, time, "RuntimeError", GLOO, bases=["builtins.RuntimeError"])


def killed(rank: int, time: float, *, signum: int = signal.SIGKILL, **more: Any) -> Failure:
    return failure(rank, time, "", exit_code=-signum, **more)


@pytest.mark.parametrize(
    "earlier", [peer(0, 1.0), gloo(0, 1.0), killed(0, 1.0, was_ended=True)], ids=["peer", "gloo", "ended"]
)
@pytest.mark.parametrize("real", [failure(1, 2.0), killed(1, 2.0)], ids=["raised", "killed"])
def test_a_consequence_is_not_first(earlier: Failure, real: Failure) -> None:
    told = verdict([earlier, real])
    assert told is not None
    assert (told.first, told.others) == (real, (earlier,))


def test_the_earliest_is_first() -> None:
    told = verdict([failure(0, 3.0, "OSError"), failure(1, 2.0), failure(2, 4.0, "KeyError")])
    assert told is not None
    assert (told.first.rank, [other.rank for other in told.others]) == (1, [0, 2])


def test_among_consequences_the_earliest_is_first() -> None:
    told = verdict([peer(0, 3.0), gloo(1, 2.0), killed(2, 1.0, was_ended=True)])
    assert told is not None
    assert told.first.rank == 1
    assert str(told).endswith(
        "\nall of this is because of a rank that is not told of here: it may be another host's"
    )


def test_no_failures_no_verdict() -> None:
    assert verdict([]) is None


@pytest.mark.parametrize("message", ["address already in use (EADDRINUSE)", "mat1 and mat2 shapes"])
def test_not_every_runtime_error_is_a_consequence(message: str) -> None:
    assert not failure(0, 1.0, "RuntimeError", message, bases=["builtins.RuntimeError"]).is_consequence


def test_the_same_on_several_ranks_is_told_once() -> None:
    told = str(verdict([failure(rank, rank, message="same") for rank in (2, 0, 1)]))
    assert told.startswith("ranks 0, 1, 2 failed (host h, pid 7, ")
    assert told.count("ValueError: same") == 1


def test_consequences_are_folded_by_kind() -> None:
    others = [peer(0, 1.0), gloo(2, 1.0), peer(3, 1.0), killed(4, 1.0, was_ended=True)]
    others += [failure(5, 3.0, "OSError", "own\nsecond line")]
    assert str(verdict([failure(1, 2.0, message="first"), *others])).splitlines()[1:] == [
        "  Traceback (most recent call last):",
        "  ValueError: first",
        "ranks 0, 3: PeerError: seen by 0 (a consequence)",
        f"rank 2: RuntimeError: {GLOO} (a consequence)",
        "rank 4: ended",
        "rank 5: OSError: own",
    ]


def test_an_interrupted_rank_is_told_by_its_place_in_the_program() -> None:
    trace = 'File "train.py", line 3, in step\nFile "/x/lib/python3.11/threading.py", line 9, in wait\n'
    assert folded([failure(0, 1.0, "KeyboardInterrupt", trace=trace, was_ended=True)]) == [
        "rank 0: interrupted at train.py:3 in step"
    ]


@pytest.mark.parametrize(
    ("exit_code", "at", "ended"),
    [
        (-signal.SIGTERM, 2.0, True),
        (143, 2.0, True),
        (130, 2.0, True),
        (143, 0.5, False),
        (1, 2.0, False),
        (-signal.SIGSEGV, 2.0, False),
    ],
)
def test_a_rank_was_ended_if_it_was_asked_to(exit_code: int, at: float, ended: bool) -> None:
    assert was_ended(exit_code, at=at, asked_at=1.0) is ended
    assert not was_ended(exit_code, at=at, asked_at=None)


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
