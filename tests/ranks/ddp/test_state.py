"""What a wrapper holds: state dicts, attributes, copies, and the group it may change."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import rows
from torch import distributed, nn
from wrappers import WIDTH, WRAPPERS, Net, grads, of_whole_batch, refusal, train

from paceline import DistributedDataParallel
from paceline.testing import RankPool, run_ranks

TIMEOUT = 6.0


class Nested(nn.Module):
    """Has a child of the name that the wrapper gives to what it wraps."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(x).tanh())


class OnlyChild(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def prefixed(state: dict[str, Any]) -> dict[str, Any]:
    return {f"module.{name}": value for name, value in state.items()}


def loads(rank: int, build: Callable[..., nn.Module], prefix: bool, strict: bool) -> tuple[bool, bool, str]:
    ddp = DistributedDataParallel(build(0))
    state = build(5).state_dict()
    result = ddp.load_state_dict(prefixed(state) if prefix else state, strict=strict)
    loaded = ddp.module_state_dict()
    same = list(loaded) == list(state) and all(loaded[name].equal(state[name]) for name in state)
    train(ddp, rank)
    return same, list(ddp.state_dict()) == list(prefixed(state)), str(result)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("build", [Net, Nested, OnlyChild])
def test_state_dicts_load_with_the_prefix_and_without(
    build: type[nn.Module], prefix: bool, strict: bool, pool: RankPool
) -> None:
    # Whatever names the module's own children have.
    want = (True, True, "<All keys matched successfully>")
    assert pool.run(loads, build, prefix, strict) == [want] * 2


def mislay(_: int, wrapper: str, case: str) -> tuple[object, tuple[str, str] | None]:
    state = prefixed(Net(5).state_dict())
    if case == "none":
        state.clear()
    if case == "some":
        del state["module.last.bias"]
        state["other"] = state["module.other"] = torch.ones(1)
    if case == "shape":
        state["module.first.bias"] = torch.ones(1)
    ddp = WRAPPERS[wrapper](Net(0))
    keys: list[list[str]] = []

    def act() -> None:
        found = ddp.load_state_dict(state, strict=False)
        keys.extend([found.missing_keys, found.unexpected_keys])

    loosely = refusal(act)
    strictly = refusal(lambda: ddp.load_state_dict(state))
    return (keys, loosely), strictly


@pytest.mark.parametrize("case", ["some", "none", "shape"])
def test_misfits_of_a_state_dict_are_told_as_by_torch(case: str, pool: RankPool) -> None:
    assert pool.run(mislay, "paceline", case) == pool.run(mislay, "torch", case)


class Telling(Net):
    """With properties."""

    size = 3

    @property
    def twice(self) -> int:
        return 2 * self.size

    @property
    def broken(self) -> int:
        return self.no_such_thing


def shared(_: int) -> tuple[Any, ...]:
    ddp = DistributedDataParallel(Telling(), share_attributes=True)
    plain = DistributedDataParallel(Telling())
    ddp.size = 9
    return (
        ddp.twice,
        ddp.first is ddp.module.first,
        ddp.module.size,
        refusal(lambda: ddp.broken),
        refusal(lambda: ddp.nowhere),
        refusal(lambda: plain.twice),
        copy.deepcopy(ddp).twice,
    )


def test_attributes_are_shared_on_request_with_their_own_errors(pool: RankPool) -> None:
    for twice, same, size, broken, nowhere, plain, copied in pool.run(shared):
        assert (twice, same, size, copied) == (6, True, 3, 6)
        assert broken[0] == nowhere[0] == plain[0] == "AttributeError"
        assert "no_such_thing" in broken[1]
        assert "nowhere" in nowhere[1]
        assert plain[1] == "'DistributedDataParallel' object has no attribute 'twice'"


def saved(ddp: nn.Module) -> nn.Module:
    box = io.BytesIO()
    torch.save(ddp, box)
    box.seek(0)
    return torch.load(box, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda ddp: pickle.loads(pickle.dumps(ddp)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
}


def copied(rank: int, how: str, before: int, options: dict[str, bool]) -> list[bool]:
    ddp = DistributedDataParallel(Net().double(), **options)
    for step in range(before):
        train(ddp, rank, step)
    other = COPIES[how](ddp)
    right = []
    for step in range(3):
        for each in (other, ddp):  # the original goes on as well
            train(each, rank, step)
            right.append(all(map(torch.allclose, grads(each), of_whole_batch(Net().double(), step))))
    right.append(all(a is not b for a, b in zip(ddp.parameters(), other.parameters(), strict=True)))
    right.append(other.static_graph == ddp.static_graph)
    return right


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("how", COPIES)
def test_copies_train_on(how: str, before: int, options: dict[str, bool], pool: RankPool) -> None:
    for right in pool.run(copied, how, before, options):
        assert all(right), right


def not_the_default(_: int, wrapper: str) -> tuple[str, str] | None:
    ddp = WRAPPERS[wrapper](Net(), process_group=distributed.new_group([0, 1]))
    return refusal(lambda: pickle.dumps(ddp))


def test_a_wrapper_of_another_group_is_not_pickled() -> None:
    ours, theirs = (
        run_ranks(not_the_default, args=(name,), timeout=TIMEOUT) for name in ("paceline", "torch")
    )
    assert ours[0][0] == theirs[0][0] == "RuntimeError"
    assert "only a wrapper of the default process group can be copied or pickled" in ours[0][1]


def as_a_module(_: int, wrapper: str) -> list[Any]:
    net = Net()
    ddp = WRAPPERS[wrapper](net)
    called: list[str] = []
    ddp.apply(lambda module: called.append(type(module).__name__))
    seen: list[Any] = [
        [name for name, _ in ddp.named_parameters()],
        [name for name, _ in ddp.named_buffers()],
        [name for name, _ in ddp.named_modules()],
        called,
        ddp.eval() is ddp and net.training,
        ddp.train().module.training,
        isinstance(ddp, WRAPPERS["torch"]),
        [sparse for _, *flags in [ddp._build_params_for_reducer()] for sparse in flags],
        ddp._build_debug_param_to_name_mapping(ddp._build_params_for_reducer()[0]),
        refusal(lambda: ddp._build_debug_param_to_name_mapping([net.first.weight]))[0],
        [tuple(each.shape) for each in ddp._get_data_parallel_params(net)],
        [name for name, _ in ddp._get_data_parallel_params(net, named_params=True)],
        ddp.will_sync_module_buffers(),
        ddp._distributed_rank,
        ddp.join_process_group is ddp.process_group,
        refusal(lambda: ddp._register_buffer_comm_hook(None, 3))[0],
    ]
    return seen


def test_a_wrapper_is_a_module_as_torchs_is(pool: RankPool) -> None:
    assert pool.run(as_a_module, "paceline") == pool.run(as_a_module, "torch")


def converted(rank: int, before: int) -> list[bool]:
    ddp = DistributedDataParallel(Net())
    for step in range(before):
        train(ddp, rank, step)
    ddp.to(torch.float64)
    right = []
    for step in range(3):
        train(ddp, rank, step)
        want = of_whole_batch(Net().double(), step)
        close = [torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(grads(ddp), want, strict=True)]
        right.append(all(close))
    return right


@pytest.mark.parametrize("before", [0, 1, 3])
def test_gradients_are_of_the_precision_that_the_module_was_converted_to(before: int, pool: RankPool) -> None:
    for right in pool.run(converted, before):
        assert all(right), right


def unhooked(rank: int, wrapper: str, before: int) -> list[bool]:
    ddp = WRAPPERS[wrapper](Net())
    for step in range(before):
        train(ddp, rank, step)
    ddp._remove_autograd_hooks()
    ddp.zero_grad()
    net = Net()
    ddp(rows(rank, 7)).square().mean().backward()
    net(rows(rank, 7)).square().mean().backward()
    return [torch.equal(a, b) for a, b in zip(grads(ddp), grads(net), strict=True)]


@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_without_its_hooks_gradients_stay_local(wrapper: str, before: int) -> None:
    for local in run_ranks(unhooked, args=(wrapper, before), timeout=TIMEOUT):
        assert all(local), local


def regrouped(rank: int, apart: tuple[int, int], prepare: str) -> list[bool]:
    """Train alone for some steps, then together."""
    own = [distributed.new_group([each]) for each in (0, 1)][rank]
    everyone = distributed.new_group([0, 1])
    net = Net().double()
    if prepare == "unfreeze":
        net.last.requires_grad_(False)
    # What is not about module buffers leaves them alone.
    ddp = DistributedDataParallel(net, process_group=own, forward_sync_buffers=prepare == "buffers")
    if prepare == "hook":
        ddp._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)
    for step in range(apart[rank]):
        train(ddp, rank, step)
        net.last.requires_grad_(True)
    net.last.requires_grad_(True)
    ddp._update_process_group(everyone)
    right = []
    for step in range(4):
        train(ddp, rank, step)
        right.append(all(map(torch.allclose, grads(ddp), of_whole_batch(Net().double(), step))))
    return right


@pytest.mark.parametrize("prepare", ["plain", "buffers", "unfreeze", "hook"])
@pytest.mark.parametrize("apart", [(0, 0), (2, 2), (5, 1)], ids=str)
def test_ranks_that_trained_apart_go_on_together(apart: tuple[int, int], prepare: str) -> None:
    for right in run_ranks(regrouped, args=(apart, prepare), timeout=TIMEOUT):
        assert all(right), right


def shrunk(rank: int, wrapper: str, hook: bool) -> list[bool]:
    ddp = WRAPPERS[wrapper](Net().double())
    if hook:
        ddp._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)
    for step in range(3):
        train(ddp, rank, step)
    part = distributed.new_group([1, 2])
    ddp._update_process_group(part)
    right = []
    if rank:
        for step in range(3):
            train(ddp, rank, step)
            right.append(all(map(torch.allclose, grads(ddp), of_whole_batch(Net().double(), step, (1, 2)))))
    distributed.barrier()
    ddp._update_process_group(distributed.group.WORLD)
    for step in range(3):
        train(ddp, rank, step)
        right.append(all(map(torch.allclose, grads(ddp), of_whole_batch(Net().double(), step, (0, 1, 2)))))
    return right


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", [False, True])
def test_a_group_may_shrink_and_grow_again(wrapper: str, hook: bool) -> None:
    if wrapper == "torch" and hook:
        pytest.skip("torch says that hooks have to be moved by their owner")
    for right in run_ranks(shrunk, 3, args=(wrapper, hook), timeout=TIMEOUT):
        assert all(right), right


def replace_a_layer(_: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    for _ in range(4):
        ddp(torch.ones(1, 2)).sum().backward()
    ddp.module[1] = nn.Linear(2, 1)
    ddp(torch.ones(1, 2)).sum().backward()  # two parameters get no gradient any more, so it looks
    with pytest.warns(UserWarning, match=r"not averaged across ranks.*'1.weight', '1.bias'"):
        ddp(torch.ones(1, 2)).sum().backward()


def test_a_layer_that_is_replaced_after_the_wrap_is_named_a_step_later(pair: RankPool) -> None:
    pair.run(replace_a_layer)
