"""Names of torch's wrapper beside those that users call: what they answer, and what they leave alone."""

import contextlib
from typing import Any

import pytest
import torch
from batches import rows
from torch import Tensor, nn
from torch.autograd import profiler
from wrappers import WIDTH, WRAPPERS, Net, equal_on_all, refusal, train

from paceline import DistributedDataParallel
from paceline.ddp.compat.torch_names import INNER_STEPS, TORCH_NAMES
from paceline.testing import RankPool


def moved(_: int, wrapper: str) -> Any:
    x = torch.arange(8.0).view(2, 4)
    return WRAPPERS[wrapper](Net()).to_kwargs((x, [x, "note"]), {"k": {"x": x}}, 0)


def test_moved_arguments_have_the_structure_that_torch_gives_them(pool: RankPool) -> None:
    assert repr(pool.run(moved, "paceline")) == repr(pool.run(moved, "torch"))


def cut_and_joined(_: int) -> None:
    ddp = DistributedDataParallel(Net(), dim=1)
    x = torch.arange(8.0).view(2, 4)
    pieces, keywords = ddp.scatter((x,), {"k": [x, 3]}, ["cpu", "cpu"])
    assert [piece[0].shape for piece in pieces] == [(2, 2), (2, 2)]
    assert torch.equal(ddp.gather([piece[0] for piece in pieces], "cpu"), x)
    assert [keyword["k"][1] for keyword in keywords] == [3, 3]


def test_arguments_are_cut_and_outputs_joined_along_the_wrappers_dimension(pool: RankPool) -> None:
    # torch's own needs an accelerator for it.
    pool.run(cut_and_joined)


class Asks(nn.Module):
    """Notes which wrapper is at work, around a call of a part that is wrapped too."""

    def __init__(self, part: nn.Module, wrapper: Any) -> None:
        super().__init__()
        self.part = part
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen: list[object] = []
        self.ask = wrapper._get_active_ddp_module

    def forward(self, x: Tensor, *, fail: bool = False) -> Tensor:
        self.seen.append(self.ask())
        x = self.layer(self.part(x))
        self.seen.append(self.ask())
        if fail:
            raise ArithmeticError
        return x


def active(rank: int, wrapper: str, fails: bool) -> list[bool]:
    kind = WRAPPERS[wrapper]
    inner = kind(Asks(nn.Linear(WIDTH, WIDTH), kind))
    outer = kind(Asks(inner, kind))
    answers = [kind._get_active_ddp_module() is None]
    with contextlib.suppress(ArithmeticError), torch.no_grad():
        outer(rows(rank), fail=fails)
    answers += [each is outer for each in outer.module.seen]
    answers += [each is inner for each in inner.module.seen]
    return [*answers, kind._get_active_ddp_module() is None]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_wrapper_at_work_is_known_inside_its_forward(wrapper: str, fails: bool, pool: RankPool) -> None:
    for answers in pool.run(active, wrapper, fails):
        # torch 2.10 no longer knows the outer wrapper once the inner one is done.
        assert answers == [True] * 6 or (wrapper, answers.index(False)) == ("torch", 2)


def finished(rank: int) -> list[object]:
    ddp = DistributedDataParallel(Net())
    inside: list[object] = []
    ddp._check_reducer_finalized()
    ddp.module.first.weight.register_hook(lambda _: inside.append(refusal(ddp._check_reducer_finalized)))
    train(ddp, rank)
    ddp._check_reducer_finalized()
    return inside


def test_a_step_that_has_not_ended_is_told(pool: RankPool) -> None:
    for rank, inside in enumerate(pool.run(finished)):
        assert inside == [("RuntimeError", f"step 0 has not been finished (rank: {rank})")]


def broadcast_by_name(rank: int, wrapper: str) -> list[bool]:
    ddp = WRAPPERS[wrapper](Net())
    more = [torch.full((3,), float(rank)), torch.full((2,), rank)]
    ddp.module.scale.fill_(rank)
    ddp._default_broadcast_coalesced()
    answers = [bool(ddp.module.scale.eq(0).all())]
    ddp.module.scale.fill_(rank)
    ddp._default_broadcast_coalesced(authoritative_rank=1)
    answers.append(bool(ddp.module.scale.eq(1).all()))
    ddp._default_broadcast_coalesced(more[:1], 8, 1)
    ddp._distributed_broadcast_coalesced(more[1:], 8)
    return [*answers, more[0].tolist() == [1.0] * 3, more[1].tolist() == [0] * 2, equal_on_all(more)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_tensors_are_made_those_of_one_rank(wrapper: str, pool: RankPool) -> None:
    assert pool.run(broadcast_by_name, wrapper) == [[True] * 5] * 2


def cloned(rank: int, wrapper: str, clone: bool) -> int:
    ddp = WRAPPERS[wrapper](nn.Linear(WIDTH, WIDTH), static_graph=True)
    ddp._set_ddp_sink_clone(clone)
    with profiler.profile() as profile:
        ddp(rows(rank))
    return sum(event.name == "aten::clone" for event in profile.function_events)


def test_outputs_are_never_cloned(pool: RankPool) -> None:
    assert pool.run(cloned, "torch", True) == [1, 1]
    assert pool.run(cloned, "torch", False) == pool.run(cloned, "paceline", True) == [0, 0]


def managed(_: int, wrapper: str) -> list[object]:
    net = Net()
    WRAPPERS[wrapper]._set_params_and_buffers_to_ignore_for_model(net, ["first.weight", "scale"])
    kept = [*WRAPPERS[wrapper]._get_data_parallel_params(net)]
    return [name for name, parameter in net.named_parameters() if any(parameter is each for each in kept)]


def test_ignored_parameters_are_not_among_those_that_are_managed(pool: RankPool) -> None:
    ours = pool.run(managed, "paceline")
    assert ours == pool.run(managed, "torch") == [["first.bias", "last.weight", "last.bias"]] * 2


def refused(rank: int, wrapper: str) -> tuple[object, object, bool]:
    ddp = WRAPPERS[wrapper](Net())
    before = ddp._get_ddp_logging_data().get("has_error", 0)
    kind, message = refusal(lambda: ddp.register_comm_hook(None, rank))
    data = ddp._get_ddp_logging_data()
    said = "Communication hook must be callable."
    return before, data["has_error"], kind in data["error"] and said in data["error"] and said in message


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_was_refused_is_in_the_logging_data(wrapper: str, pool: RankPool) -> None:
    assert pool.run(refused, wrapper) == [(0, 1, True)] * 2


def sparse_rows(rank: int) -> list[int]:
    """torch has to be told the rows that any rank uses; here it changes nothing."""
    net = nn.Embedding(6, 2, sparse=True)
    ddp = DistributedDataParallel(net)
    ddp._set_sparse_metadata({"weight": torch.tensor([0])})
    ddp(torch.tensor([1 + rank, 4])).sum().backward()
    assert net.weight.grad.is_sparse
    return net.weight.grad.to_dense().sum(1).tolist()


def test_rows_of_sparse_gradients_need_not_be_told(pool: RankPool) -> None:
    assert pool.run(sparse_rows) == [[0.0, 1.0, 1.0, 0.0, 2.0, 0.0]] * 2


def inner_steps(_: int) -> list[tuple[str, str] | None]:
    ddp = DistributedDataParallel(Net())
    return [refusal(getattr(ddp, name)) for name in INNER_STEPS]


def test_inner_steps_of_torchs_wrapper_refuse_and_say_where_to_look(pool: RankPool) -> None:
    for told in pool.run(inner_steps):
        for name, (kind, message) in zip(INNER_STEPS, told, strict=True):
            assert kind == "RuntimeError"
            assert message.startswith(f"{name} is an inner step")
            assert "docs/mapping.md" in message


def answered(_: int) -> list[str]:
    ddp = DistributedDataParallel(Net())
    return [name for name in TORCH_NAMES if not hasattr(ddp, name)]


def test_every_name_has_an_answer(pool: RankPool) -> None:
    assert pool.run(answered) == [[], []]


def test_every_name_of_torchs_class_is_known() -> None:
    own = {name for kind in (DistributedDataParallel, nn.Module) for name in vars(kind)}
    assert {name for name in vars(WRAPPERS["torch"]) if not name.startswith("__")} <= own | TORCH_NAMES


class Extended(DistributedDataParallel):
    """Extends names of torch's wrapper by ``super()``, as a subclass of torch's can."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {**super()._get_ddp_logging_data(), "mine": 1}

    def scatter(self, *args: Any) -> Any:
        return super().scatter(*args)


def extended(_rank: int) -> tuple[int, Any]:
    wrapper = Extended(nn.Linear(2, 2))
    data = DistributedDataParallel._get_ddp_logging_data(wrapper)
    assert "mine" not in data
    return wrapper._get_ddp_logging_data()["mine"], wrapper.scatter((1,), {}, ["cpu"])


def test_a_subclass_can_extend_names_of_torchs(pair: RankPool) -> None:
    assert pair.run(extended) == [(1, (((1,),), ({},)))] * 2
    assert hasattr(DistributedDataParallel, "_set_static_graph")
