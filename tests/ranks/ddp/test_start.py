"""How a wrapper starts: its arguments, what it refuses, and that ranks begin from the same model."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from wrappers import (
    TORCHS_OPTIONS,
    WIDTH,
    WRAPPERS,
    Net,
    collectives,
    equal_on_all,
    grads,
    of_whole_batch,
    refusal,
    train,
)

from paceline import DistributedDataParallel
from paceline.testing import RankPool, run_ranks

TIMEOUT = 20.0


# Arguments that torch 2.10 does not have, in whichever later version they came.
NEWER = {"bucket_cap_mb_list", "batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation"}


def test_arguments_come_in_torchs_order_and_ours_are_keywords() -> None:
    theirs = inspect.signature(WRAPPERS["torch"]).parameters
    ours = inspect.signature(DistributedDataParallel).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    defaults = {name: each.default for name, each in theirs.items()}
    if "forward_sync_buffers" not in theirs:
        defaults["broadcast_buffers"] = None  # True, before the other one replaced it
    assert {name: ours[name].default for name in theirs} == defaults
    extra = {name for name in ours if ours[name].kind is inspect.Parameter.KEYWORD_ONLY}
    assert set(ours) - set(theirs) - extra <= NEWER


class OnTwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Linear(2, 2)
        self.nowhere = nn.Linear(2, 2, device="meta")


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def both_groups(wrapper: Any) -> None:
    mesh = init_device_mesh("cpu", (2,))
    wrapper(linear(), process_group=distributed.group.WORLD, device_mesh=mesh)


def two_dimensions(wrapper: Any) -> None:
    wrapper(linear(), device_mesh=init_device_mesh("cpu", (2, 1)))


def delays_without_hook(wrapper: Any) -> None:
    net = linear()
    wrapper(net, delay_all_reduce_named_params=[("weight", net.weight)])


def hook_without_delays(wrapper: Any) -> None:
    net = linear()
    wrapper(net, param_to_hook_all_reduce=net.weight)


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "several device_ids": (lambda wrapper: wrapper(linear(), device_ids=[0, 1]), "one device"),
    "device_ids of a CPU module": (lambda wrapper: wrapper(linear(), device_ids=[0]), "device_ids"),
    "output_device of a CPU module": (lambda wrapper: wrapper(linear(), output_device=1), "output_device"),
    "process_group and device_mesh": (both_groups, "Cannot specify both process_group and device_mesh"),
    "device_mesh of two dimensions": (two_dimensions, "Only 1D device mesh is supported,"),
    "nothing to train": (lambda wrapper: wrapper(linear().requires_grad_(False)), "not needed"),
    "no parameter": (lambda wrapper: wrapper(nn.ReLU()), "not needed"),
    "lazy parameters": (lambda wrapper: wrapper(nn.LazyLinear(2)), "lazy module"),
    "two types of devices": (lambda wrapper: wrapper(OnTwoTypes()), "one type of device"),
    "meta device": (lambda wrapper: wrapper(nn.Linear(2, 2, device="meta")), "meta"),
    "delays without a hook": (delays_without_hook, "go together"),
    "a hook without delays": (hook_without_delays, "go together"),
}


def refuses(_: int, wrapper: str, name: str) -> tuple[str, str] | None:
    return refusal(lambda: REFUSED[name][0](WRAPPERS[wrapper]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_with_its_type_of_error(name: str, pool: RankPool) -> None:
    for theirs, ours in zip(
        pool.run(refuses, "torch", name), pool.run(refuses, "paceline", name), strict=True
    ):
        assert theirs is not None
        assert ours is not None
        # torch 2.10 lets a copy from the meta device fail, where later versions refuse the module.
        assert ours[0] == theirs[0].replace("NotImplementedError", "RuntimeError"), ours
        assert REFUSED[name][1] in ours[1]


def lazily_ignored(wrapper: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    wrapper._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "1.bias"])
    wrapper(net)


TAKEN: dict[str, Callable[[Any], object]] = {
    "empty device_ids": lambda wrapper: wrapper(linear(), device_ids=[]),
    "lazy parameters that are ignored": lazily_ignored,
    "a cap of nothing": lambda wrapper: wrapper(linear(), bucket_cap_mb=0),
    "listed caps": lambda wrapper: wrapper(linear(), bucket_cap_mb=3, bucket_cap_mb_list=[0.5, 1]),
    "an empty list of caps": lambda wrapper: wrapper(linear(), bucket_cap_mb_list=[]),
    "everything at its default": lambda wrapper: wrapper(
        linear(),
        None,
        None,
        0,
        None,
        True,
        None,
        None,
        False,
        False,
        False,
        False,
        None,
        None,
        None,
        None,
        False,
        None,
        False,
        None,
    ),
    "every flag": lambda wrapper: wrapper(
        linear(),
        dim=1,
        init_sync=False,
        bucket_cap_mb=0.5,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        skip_all_reduce_unused_params=True,
        batched_grad_copy=True,
        forward_sync_buffers=False,
    ),
}


ATTRIBUTES = [
    *("dim", "device_ids", "output_device", "device_type", "is_multi_device_module", "static_graph"),
    *("forward_sync_buffers", "broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view"),
    *("bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default", "broadcast_bucket_size"),
    *("require_backward_grad_sync", "require_forward_param_sync", "parameters_to_ignore"),
    *("batched_grad_copy", "skip_all_reduce_unused_params", "mixed_precision"),
]


def takes(_: int, wrapper: str, name: str) -> object:
    seen: dict[str, object] = {}

    def act() -> None:
        ddp = TAKEN[name](WRAPPERS[wrapper])
        if ddp is not None:
            seen.update({key: getattr(ddp, key) for key in ATTRIBUTES if hasattr(ddp, key)})

    return refusal(act), seen


@pytest.mark.parametrize("name", TAKEN)
def test_what_torch_takes_is_taken_and_shows_in_the_same_attributes(name: str, pool: RankPool) -> None:
    theirs, ours = pool.run(takes, "torch", name), pool.run(takes, "paceline", name)
    assert all(error is None for error, _ in ours)
    if (error := theirs[0][0]) is not None:
        # Only a torch that lacks some of the arguments does not take what ours takes; 2.11 takes no cap of 0.
        assert error[0] in ("TypeError", "AssertionError")
        assert not NEWER - {"lazy_bucket_allocation"} <= TORCHS_OPTIONS
        return
    for (_, mine), (_, others) in zip(ours, theirs, strict=True):
        assert {key: mine[key] for key in others} == others


def warned(_: int, wrapper: str, options: dict[str, bool]) -> list[tuple[str, bool]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        WRAPPERS[wrapper](linear(), **options)
    return [(each.category.__name__, each.filename == __file__) for each in seen]


@pytest.mark.parametrize(
    "options",
    [
        {"check_reduction": True},
        {"broadcast_buffers": True},
        {"broadcast_buffers": False},
        {"broadcast_buffers": False, "forward_sync_buffers": True},
        {"static_graph": True, "find_unused_parameters": True},
        {"forward_sync_buffers": False},
    ],
    ids=lambda options: "+".join(options),
)
def test_warnings_are_torchs_and_point_to_the_caller(options: dict[str, bool], pool: RankPool) -> None:
    mine = pool.run(warned, "paceline", options)
    if options.keys() <= TORCHS_OPTIONS:
        assert mine == pool.run(warned, "torch", options)
    else:
        assert mine == [[], []]


def one_more(rank: int) -> nn.Module:
    return nn.Sequential(*(linear() for _ in range(1 + rank)))


def frozen_on_one(rank: int) -> nn.Module:
    net = nn.Sequential(linear(), linear())
    net[1].weight.requires_grad_(rank == 0)
    return net


def transposed_on_one(rank: int) -> nn.Module:
    net = linear()
    if rank:
        net.weight = nn.Parameter(torch.zeros(2, 2).t())
    return net


# Model on each rank, options on each rank, what the message must name.
DIFFERENT: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], dict[str, Any]], list[str]]] = {
    "count": (one_more, lambda _: {}, ["'1.weight'", "2 parameters", "4 parameters"]),
    "count, rank 0 has more": (
        lambda rank: one_more(1 - rank),
        lambda _: {},
        ["'1.weight'", "2 parameters", "4 parameters"],
    ),
    "shape": (lambda rank: nn.Linear(2 + rank, 2), lambda _: {}, ["'weight'", "[2, 2]", "[2, 3]"]),
    "dtype": (
        lambda rank: linear().to(torch.float64 if rank else torch.float32),
        lambda _: {},
        ["'weight'", "torch.float32", "torch.float64"],
    ),
    "stride": (transposed_on_one, lambda _: {}, ["'weight'", "stride [2, 1]", "stride [1, 2]"]),
    "frozen on one rank": (frozen_on_one, lambda _: {}, ["'1.weight'", "trained", "frozen"]),
    "bucket caps": (
        lambda _: linear(),
        lambda rank: {"bucket_cap_mb": 1 + rank},
        ["caps", "1048576", "2097152"],
    ),
    "caps that differ in the first step only": (
        lambda _: linear(),
        lambda rank: {"bucket_cap_mb_list": [1, 25]} if rank else {},
        ["bucket caps of the first step", "26214400"],
    ),
    "sparse on one rank": (
        lambda rank: nn.Embedding(3, 2, sparse=rank == 1),
        lambda _: {},
        ["'weight'", "sparse"],
    ),
    "rebuild_plan on one rank": (lambda _: linear(), lambda rank: {"rebuild_plan": rank == 0}, ["plan"]),
    "c10d on one rank": (
        lambda _: linear(),
        lambda rank: {"transport": ("auto", "c10d")[rank]},
        ["transport"],
    ),
}


def differs(rank: int, name: str) -> tuple[bool, str]:
    build, options, _ = DIFFERENT[name]
    try:
        DistributedDataParallel(build(rank), **options(rank))
    except Exception as error:
        return type(error).__name__ == "MismatchError", str(error)
    return False, "taken"


@pytest.mark.parametrize("name", DIFFERENT)
def test_models_that_differ_are_refused_on_all_ranks_by_name(name: str) -> None:
    for refused, message in run_ranks(differs, args=(name,), timeout=TIMEOUT):
        assert refused, message
        for part in [*DIFFERENT[name][2], "rank 0", "rank 1"]:
            assert part in message


def start(rank: int, options: dict[str, bool]) -> tuple[bool, bool, dict[str, int]]:
    net = Net(seed=rank)
    net.scale.fill_(rank + 1.0)
    net.count = nn.Parameter(torch.full((3,), rank), requires_grad=False)
    seen = collectives(lambda: DistributedDataParallel(net, transport="c10d", **options))
    return equal_on_all([*net.parameters()]), equal_on_all([*net.buffers()]), dict(seen)


@pytest.mark.parametrize(
    ("options", "equal"),
    [
        ({}, (True, True)),
        ({"forward_sync_buffers": False}, (True, True)),
        ({"init_sync": False}, (False, False)),
    ],
)
def test_ranks_start_from_rank_0_unless_told_otherwise(
    options: dict[str, bool], equal: tuple[bool, bool], pool: RankPool
) -> None:
    for parameters, buffers, seen in pool.run(start, options):
        assert (parameters, buffers) == equal
        assert bool(seen) == (options.get("init_sync") is not False)


def ignoring(rank: int, wrapper: str, by_attribute: bool) -> tuple[list[bool], list[bool]]:
    net = Net(seed=rank)
    net.register_buffer("own", torch.full((2,), float(rank)))
    names = ["first.weight", "own"]
    if by_attribute:
        net._ddp_params_and_buffers_to_ignore = names
    else:
        WRAPPERS[wrapper]._set_params_and_buffers_to_ignore_for_model(net, names)
    ddp = WRAPPERS[wrapper](net)
    started = [equal_on_all([tensor]) for tensor in [*net.parameters(), *net.buffers()]]
    for step in range(3):
        train(ddp, rank, step)
    return started, [equal_on_all([grad]) for grad in grads(net)]


@pytest.mark.parametrize("by_attribute", [True, False])
def test_ignored_names_are_left_alone_as_by_torch(by_attribute: bool, pool: RankPool) -> None:
    ours = pool.run(ignoring, "paceline", by_attribute)
    assert ours == pool.run(ignoring, "torch", by_attribute)
    assert ours[0][0] == [False, True, True, True, True, False]


def in_a_part(rank: int, how: str) -> bool:
    group = {"mesh": None, "group": distributed.new_group([1, 2]), "alone": distributed.new_group([2])}[how]
    mesh = init_device_mesh("cpu", (3,)) if how == "mesh" else None
    members = {"mesh": (0, 1, 2), "group": (1, 2), "alone": (2,)}[how]
    if rank not in members:
        return True
    ddp = DistributedDataParallel(Net(seed=rank).double(), process_group=group, device_mesh=mesh)
    right = all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(ddp.parameters(), Net(seed=members[0]).double().parameters(), strict=True)
    )
    for step in range(3):
        train(ddp, rank, step)
        want = of_whole_batch(Net(seed=members[0]).double(), step, members)
        right = right and all(map(torch.allclose, grads(ddp), want))
    return right


@pytest.mark.parametrize("how", ["mesh", "group", "alone"])
def test_a_mesh_or_a_part_of_the_world_is_averaged_over(how: str) -> None:
    assert run_ranks(in_a_part, 3, args=(how,), timeout=TIMEOUT) == [True] * 3


def outside(_: int) -> tuple[str, str] | None:
    group = distributed.new_group([0])
    return refusal(lambda: DistributedDataParallel(linear(), process_group=group))


def test_a_rank_that_is_not_in_the_group_is_told_so() -> None:
    inside, (kind, message) = run_ranks(outside, timeout=TIMEOUT)
    assert inside is None
    assert kind != "AttributeError"
    assert "group" in message


def alone(rank: int) -> bool:
    ddp = DistributedDataParallel(Net().double())
    for step in range(3):
        train(ddp, rank, step)
        want = of_whole_batch(Net().double(), step, (0,))
        if not all(map(torch.equal, grads(ddp), want)):
            return False
    return True


def test_a_world_of_one_trains_as_the_module_alone() -> None:
    assert run_ranks(alone, 1, timeout=TIMEOUT) == [True]


def test_there_must_be_a_group() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
