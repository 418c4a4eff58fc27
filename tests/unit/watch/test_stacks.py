import faulthandler
import gc
import tempfile
import threading
import weakref
from pathlib import Path

import torch

from paceline.watch import stacks
from paceline.watch.stacks import (
    CodeLine,
    decode,
    encode,
    kind_of,
    own_stack,
    parse_dump,
    place_of,
    users_line,
)

DUMP = """Thread 0x00007f1111111111 [watcher] (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f2222222222 (most recent call first):
  File "/home/me/train.py", line 31 in load
  File "/home/me/train.py", line ??? in main
"""
LOAD = CodeLine("/home/me/train.py", 31, "load")
MAIN = CodeLine("/home/me/train.py", 50, "main")
TORCH = CodeLine("/venv/lib/python3.11/site-packages/torch/serialization.py", 900, "save")


def test_the_asked_threads_stack_is_found_in_a_dump() -> None:
    assert parse_dump(DUMP, 0x7F2222222222) == [LOAD, CodeLine("/home/me/train.py", 0, "main")]
    assert parse_dump(DUMP, 0x7F1111111111) == [CodeLine("/usr/lib/python3.11/threading.py", 327, "wait")]


def test_a_real_dump_is_understood() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stack = parse_dump(file.read(), threading.get_ident())
    assert stack[0].function == "test_a_real_dump_is_understood"
    assert Path(stack[0].file).name == "test_stacks.py"


def test_half_a_dump_is_no_error() -> None:
    for length in range(len(DUMP)):
        parse_dump(DUMP[:length], 0x7F2222222222)


def test_a_stack_survives_its_text_and_a_cut_one_loses_its_last_line() -> None:
    text = encode([TORCH, LOAD, MAIN])
    assert decode(text) == [TORCH, LOAD, MAIN]
    assert decode(text[: -len("main") - 3]) == [TORCH, LOAD]
    assert decode("") == []


def test_a_deep_stack_keeps_both_ends() -> None:
    deep = [CodeLine("x.py", line, "f") for line in range(1000)]
    kept = stacks.shorten(deep)
    assert kept[0] == deep[0]
    assert kept[-1] == deep[-1]
    assert len(kept) < 100


def test_the_users_line_is_the_innermost_outside_of_libraries() -> None:
    assert users_line([TORCH, LOAD, MAIN]) == LOAD
    assert users_line([TORCH]) == TORCH
    assert users_line([]) is None
    assert not CodeLine(torch.__file__, 1, "f").is_users
    assert not CodeLine("<string>", 0, "<module>").is_users
    assert not CodeLine("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed").is_users
    assert CodeLine("<stdin>", 1, "train").is_users
    assert CodeLine("<ipython-input-3-7f2d>", 1, "train").is_users
    assert not CodeLine(stacks.__file__, 1, "f").is_users


def test_what_a_rank_does_in_a_library_is_named() -> None:
    assert kind_of([TORCH, MAIN]) == "reads or writes a checkpoint"
    loader = TORCH._replace(file="/x/site-packages/torch/utils/data/dataloader.py")
    assert kind_of([LOAD, loader, MAIN]) == "is in the data loader"  # in a dataset of the user's
    assert kind_of([LOAD, MAIN]) is None


def test_running_a_compiled_function_is_not_compiling() -> None:
    dynamo = TORCH._replace(file="/x/site-packages/torch/_dynamo/eval_frame.py")
    assert kind_of([LOAD, dynamo, MAIN]) is None
    compiler = TORCH._replace(file="/x/site-packages/torch/_dynamo/convert_frame.py")
    assert kind_of([compiler, dynamo, MAIN]) == "compiles"


def test_a_place_is_the_line_of_the_loop_that_both_ranks_are_in() -> None:
    waiting = [TORCH, MAIN._replace(line=46)]
    for inside in ([LOAD], [LOAD._replace(line=33)], [TORCH, LOAD]):
        assert place_of([*inside, MAIN], waiting) == MAIN
    assert place_of([MAIN], []) == MAIN
    assert place_of([], waiting) is None


def test_own_stack_is_that_of_the_first_thread_that_runs() -> None:
    [first, *_] = own_stack([0, threading.get_ident()])
    assert first.function in ("<genexpr>", "own_stack")
    assert own_stack([0]) == []


def test_taking_a_stack_keeps_nothing_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        assert _taken_beside_an_object()() is None
    finally:
        gc.enable()


class Kept:
    pass


def _taken_beside_an_object() -> "weakref.ref[Kept]":
    kept = Kept()
    own_stack([threading.get_ident()])
    return weakref.ref(kept)
