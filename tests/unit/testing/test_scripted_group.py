import inspect
import math
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import peer_notes
from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.errors import LateRankError
from paceline.testing import NEVER, ScriptedCall, ScriptedGroup, ScriptedReply

METHODS = [name for name, _ in inspect.getmembers(Group, inspect.isfunction) if not name.startswith("_")]


def do_nothing() -> None: ...


def summed(group: ScriptedGroup, tensor: Tensor) -> list[float]:
    return group.all_reduce(tensor).wait(do_nothing).tolist()


@pytest.mark.parametrize("name", METHODS)
def test_it_has_every_method_of_a_group(name: str) -> None:
    parameters = inspect.signature(getattr(ScriptedGroup, name)).parameters
    assert list(parameters.values()) == list(inspect.signature(getattr(Group, name)).parameters.values())


def test_it_has_every_attribute_of_a_group() -> None:
    wanted = [name for name, _ in inspect.getmembers(Group) if not name.startswith("_")]
    named = ["process_group", "rank", "size", "name", "shared", "peer_notes"]  # set when a group is made
    assert [name for name in (*wanted, *named) if not hasattr(ScriptedGroup(), name)] == []


def test_other_ranks_add_nothing_to_a_sum_by_default() -> None:
    assert summed(ScriptedGroup(rank=1, size=3), torch.arange(3.0)) == [0, 1, 2]


def test_the_script_gives_the_other_ranks_values_in_rank_order() -> None:
    group = ScriptedGroup(rank=1, size=3, others=lambda _: [torch.full((1, 2), 7), torch.full((1, 2), 9)])
    assert group.all_gather(torch.tensor([[1, 2]])).wait(do_nothing).tolist() == [[7, 7], [1, 2], [9, 9]]


def test_a_sum_is_written_in_place_and_no_earlier_than_it_is_waited_for() -> None:
    tensor = torch.ones(2)
    pending = ScriptedGroup(others=lambda call: [call.given * 3]).all_reduce(tensor)
    assert tensor.tolist() == [1, 1]
    assert pending.wait(do_nothing) is tensor
    assert tensor.tolist() == [4, 4]


def test_what_is_written_to_a_tensor_in_flight_is_lost() -> None:
    tensor = torch.ones(2)
    pending = ScriptedGroup().all_reduce(tensor)
    tensor.fill_(5)
    assert pending.wait(do_nothing).tolist() == [1, 1]


def test_a_sparse_tensor_is_added_up() -> None:
    tensor = torch.eye(2).to_sparse()
    group = ScriptedGroup(others=lambda _: [torch.ones(2, 2).to_sparse()])
    assert group.all_reduce(tensor).wait(do_nothing).to_dense().tolist() == [[2, 1], [1, 2]]


def test_results_can_be_awaited_in_any_order_and_twice() -> None:
    group = ScriptedGroup(others=lambda call: [torch.tensor([10.0 * call.number])])
    first, second, third = (group.all_reduce(torch.ones(1)) for _ in range(3))
    found = [pending.wait(do_nothing).item() for pending in (third, first, second, third)]
    assert found == [21, 1, 11, 21]
    assert group.waits == [2, 0, 1]


def test_calls_are_recorded_in_order_with_copies_of_what_was_given() -> None:
    group = ScriptedGroup(rank=1)
    tensor = torch.ones(2)
    group.all_reduce(tensor)
    tensor.zero_()
    group.make_progress()
    group.broadcast([tensor], source=0, bytes_at_once=1)
    group.gather_objects_to("mine", to=0)
    assert [(call.number, call.kind, call.root) for call in group.calls] == [
        (0, "all_reduce", None),
        (1, "broadcast", 0),
        (2, "gather_objects_to", 0),
    ]
    assert group.calls[0].given.tolist() == [1, 1]
    assert group.calls[2].given == "mine"
    assert group.local_calls == ["make_progress"]


def test_a_late_result_is_there_when_it_has_been_asked_for_often_enough() -> None:
    tensor = torch.ones(1)
    pending = ScriptedGroup(others=lambda call: ScriptedReply([call.given], asks=3)).all_reduce(tensor)
    assert [pending.done(), pending.done(), tensor.item()] == [False, False, 1]
    assert pending.done()
    assert tensor.item() == 2


def test_waiting_for_a_late_result_calls_on_slow() -> None:
    called: list[None] = []
    pending = ScriptedGroup(others=lambda _: ScriptedReply(asks=3)).all_reduce(torch.ones(1))
    pending.wait(lambda: called.append(None))
    assert len(called) == 2


def test_a_result_that_never_comes_times_out_after_on_slow_was_called() -> None:
    called: list[None] = []
    pending = ScriptedGroup(others=lambda _: NEVER).all_reduce(torch.ones(1))
    for _ in range(2):
        with pytest.raises(LateRankError, match=r"timeout of 1800 s \(call: 0, all_reduce, here: rank 0\)"):
            pending.wait(lambda: called.append(None))
    assert len(called) == 6
    assert not pending.done()


def test_what_on_slow_raises_comes_through() -> None:
    def raise_error() -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        ScriptedGroup(others=lambda _: NEVER).all_reduce(torch.ones(1)).wait(raise_error)


def test_a_script_can_fail_a_call_or_its_wait() -> None:
    def others(call: ScriptedCall) -> ScriptedReply:
        if call.number == 0:
            raise RuntimeError("at once")
        return ScriptedReply(error=RuntimeError("later"))

    group = ScriptedGroup(others=others)
    with pytest.raises(RuntimeError, match="at once"):
        group.all_reduce(torch.ones(1))
    pending = group.all_reduce(torch.ones(1))
    assert pending.done()
    with pytest.raises(RuntimeError, match="later"):
        pending.wait(do_nothing)


@pytest.mark.parametrize(
    ("reply", "done"), [(ScriptedReply(), True), (NEVER, False), (ScriptedReply(error=ValueError()), True)]
)
def test_a_future_is_set_unless_the_result_never_comes(reply: ScriptedReply, done: bool) -> None:
    future = ScriptedGroup(others=lambda _: reply).all_reduce_future(torch.ones(1))
    assert future.done() == done
    if reply.error is not None:
        with pytest.raises(ValueError):  # noqa: PT011  # as above
            future.wait()


def test_each_rank_gets_the_row_that_was_meant_for_it() -> None:
    group = ScriptedGroup(rank=1, others=lambda _: [torch.tensor([[1], [2]])])
    assert group.all_to_all(torch.tensor([[3], [4]])).wait(do_nothing).tolist() == [[2], [4]]


@pytest.mark.parametrize(("source", "expected"), [(0, [5, 5]), (1, [1, 1])])
def test_a_broadcast_takes_the_tensors_of_its_source(source: int, expected: list[float]) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    group = ScriptedGroup(rank=1, others=lambda _: [[torch.full((2,), 5.0)]])
    group.broadcast([parameter], source=source, bytes_at_once=1)
    assert parameter.tolist() == expected


def test_gathers_have_what_every_rank_gave() -> None:
    group = ScriptedGroup(rank=1, others=lambda call: None if call.kind == "gather_bytes" else ["theirs"])
    assert group.gather_bytes(b"mine", torch.device("cpu")) == [b"mine", b"mine"]
    assert group.gather_objects("mine") == ["theirs", "mine"]
    assert group.gather_objects_to("mine", to=1) == ["theirs", "mine"]
    assert group.gather_objects_to("mine", to=0) is None


def test_what_returns_the_result_itself_raises_if_it_never_comes() -> None:
    with pytest.raises(LateRankError):
        ScriptedGroup(others=lambda _: NEVER).gather_objects(None)


def test_notes_are_seen_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_notes, "_ALL_STOPPED_TIMEOUT", timedelta(seconds=0.1))
    group = ScriptedGroup(size=3)
    group.peer_notes.note_waiting(4, 1)
    group.notes_of(2).note_waiting(4, 1)
    assert group.peer_notes.missing(4, 1) == [1]
    group.notes_of(1).note_reason(4, "ValueError()")
    assert group.peer_notes.reason(4, 1) == "ValueError()"
    assert group.peer_notes.reason(4, 2) is None
    group.notes_of(1).note_stopped(4, "bucket 1")
    assert group.peer_notes.wait_until_all_stopped(4) == {1: "bucket 1"}


def test_a_group_of_one_rank_is_by_itself() -> None:
    assert summed(ScriptedGroup(size=1), torch.ones(1)) == [1]


def test_groups_have_names_of_their_own() -> None:
    assert ScriptedGroup().name != ScriptedGroup().name
    assert ScriptedGroup(name="mine").name == "mine"


@pytest.mark.parametrize("given", [[], [torch.ones(1)] * 2])
def test_a_script_must_give_one_value_per_other_rank(given: list[Any]) -> None:
    with pytest.raises(ValueError, match="one value for each of the 1 other ranks"):
        ScriptedGroup(others=lambda _: given).all_reduce(torch.ones(1))


def test_a_rank_must_be_in_the_group() -> None:
    with pytest.raises(ValueError, match=r"\(rank: 2, size: 2\)"):
        ScriptedGroup(rank=2, size=2)


def test_its_pendings_are_pendings() -> None:
    pending = ScriptedGroup(others=lambda _: ScriptedReply(asks=math.inf)).all_reduce(torch.ones(1))
    assert isinstance(pending, Pending)
