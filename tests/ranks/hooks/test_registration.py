"""What can be registered as a hook of paceline's own, and in which order its collectives go."""

import gc
import re
import weakref
from collections.abc import Callable

import pytest
from hook_nets import HOOKS, distance, everyones, gradients, mean, run_step, wrap
from torch import Tensor

from paceline import hooks
from paceline.errors import HookError, OptionError, UnsupportedError
from paceline.testing import RankPool, RanksError

EACH = pytest.mark.parametrize("name", HOOKS)

# Registration.


def refused(_: int) -> None:
    ddp = wrap(None)
    hook = hooks.int8()
    with pytest.raises(OptionError, match=r"keeps its own state: register it with None \(hook: int8"):
        ddp.register_comm_hook(object(), hook)
    ddp.register_comm_hook(None, hook)
    with pytest.raises(UnsupportedError, match="can only be called once"):
        ddp.register_comm_hook(None, hooks.int8())
    other = wrap(None)
    with pytest.raises(OptionError, match=r"a hook serves one wrapper.*\(hook: int8\)"):
        other.register_comm_hook(None, hook)
    assert ddp._get_ddp_logging_data()["comm_hook"] == "int8"
    del ddp
    gc.collect()
    other.register_comm_hook(None, hook)


def test_what_cannot_be_registered(pair: RankPool) -> None:
    pair.run(refused)


def freed(rank: int, name: str) -> None:
    hook = HOOKS[name]()
    ddp = wrap(hook)
    run_step(ddp, gradients(rank))
    watched = [weakref.ref(each) for each in (ddp, ddp._reducer, ddp.module, *ddp.parameters())]
    del ddp
    gc.collect()
    assert [ref() is None for ref in watched] == [True] * len(watched)


@EACH
def test_a_hook_keeps_neither_wrapper_nor_parameters(pair: RankPool, name: str) -> None:
    pair.run(freed, name)


# Hooks of one's own.


class Chain(hooks.Hook):
    """Adds up in as many collectives as a bucket's number says."""

    def __init__(self, act: Callable[[Tensor], object] = lambda _: None) -> None:
        self.act = act
        self.order: list[tuple[int, int]] = []

    def reduce(self, bucket: object, group: object) -> object:
        buffer = bucket.buffer()  # type: ignore[attr-defined]
        for number in range(bucket.index() + 2):  # type: ignore[attr-defined]
            self.order.append((bucket.index(), number))  # type: ignore[attr-defined]
            buffer = (yield group.all_reduce(buffer)) / group.size  # type: ignore[attr-defined]
        result = self.act(buffer)
        return buffer if result is None else result


def chained(rank: int) -> list[tuple[int, int]]:
    hook = Chain()
    ddp = wrap(hook, cap=0)
    for step in range(3):
        hook.order.clear()
        found = run_step(ddp, gradients(rank, step=step))
        assert distance(found, mean(everyones(step))) < 1e-6
    return hook.order


def test_every_rank_issues_the_same_collectives_in_the_same_order(ranks: RankPool) -> None:
    order, *others = ranks.run(chained)
    assert all(other == order for other in others)
    buckets = max(bucket for bucket, _ in order) + 1
    assert buckets > 2
    # First rounds as buckets fill up, later ones bucket by bucket.
    assert order[:buckets] == [(bucket, 0) for bucket in range(buckets)]
    assert order[buckets:] == sorted(order[buckets:])


class Wrong(Chain):
    def reduce(self, bucket: object, group: object) -> object:  # noqa: ARG002
        yield bucket


def mistaken(rank: int, what: str) -> None:
    hook = {
        "yields": Wrong(),
        "returns": Chain(lambda buffer: buffer[1:]),
        "raises": Chain(lambda buffer: buffer.view(3, -1, 17)),
    }[what]
    ddp = wrap(hook)
    ddp(gradients(rank)).backward()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("yields", r"a hook must yield a collective in flight \(hook: Wrong"),
        ("returns", r"must return a tensor like the bucket's buffer \(hook: Chain, bucket: 0"),
        ("raises", r"a hook raised RuntimeError.*\(hook: Chain\)"),
    ],
)
def test_a_hooks_mistake_is_told(pair: RankPool, what: str, message: str) -> None:
    with pytest.raises(RanksError) as caught:
        pair.run(mistaken, what)
    for error in caught.value.exceptions:
        assert isinstance(error, HookError)
        assert re.search(message, str(error))
