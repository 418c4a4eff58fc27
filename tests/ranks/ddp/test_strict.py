"""Strict mode raises where torch's wrapper raises; the default mode does not."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import rows
from torch import nn
from torch.utils.checkpoint import checkpoint
from wrappers import WIDTH, WRAPPERS, refusal

from paceline.testing import RankPool, run_ranks

TIMEOUT = 10.0
PARTS = 3


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(PARTS))

    def forward(self, x: torch.Tensor, use: tuple[int, ...], often: int = 1) -> torch.Tensor:
        for index in use:
            for _ in range(often):
                x = (
                    checkpoint(self.parts[index], x, use_reentrant=True)
                    if often > 1
                    else self.parts[index](x)
                )
        return x


Body = Callable[[nn.Module, torch.Tensor], None]
ALL = tuple(range(PARTS))


def steps(*uses: tuple[int, ...], often: int = 1) -> Body:
    def body(ddp: nn.Module, x: torch.Tensor) -> None:
        for use in uses:
            ddp(x, use, often).sum().backward()

    return body


def twice_over_one_forward(ddp: nn.Module, x: torch.Tensor) -> None:
    loss = ddp(x, ALL).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(ddp: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        (ddp(x, ALL).sum() + ddp(x, ALL).sum()).backward()


def accumulating(ddp: nn.Module, x: torch.Tensor) -> None:
    for _ in range(3):
        with ddp.no_sync():
            ddp(x, (0, 1)).sum().backward()
            ddp(x, (0,)).sum().backward()
        ddp(x, ALL).sum().backward()


def static_too_late(ddp: nn.Module, x: torch.Tensor) -> None:
    ddp(x, ALL).sum().backward()
    ddp._set_static_graph()


def without_backward(ddp: nn.Module, x: torch.Tensor) -> None:
    ddp(x, ALL)
    ddp(x, ALL).sum().backward()
    ddp(x, ALL)


def looked_at(ddp: nn.Module, x: torch.Tensor) -> None:
    ddp(x, ALL[:-1]).sum().backward()
    with torch.no_grad():
        ddp(x, ALL)


BODIES: dict[str, Body] = {
    "all used": steps(ALL, ALL, ALL),
    "one unused": steps(ALL[:-1], ALL[:-1], ALL[:-1]),
    "one unused at first": steps(ALL[:-1], ALL),
    "one unused in the last step": steps(ALL, ALL, ALL[:-1]),
    "one unused later": steps(ALL, ALL, ALL[:-1], ALL[:-1]),
    "used later": steps((0, 1), (0, 1), ALL, ALL),
    "checkpointed twice": steps(ALL, ALL, ALL, often=2),
    "two forwards": two_forwards,
    "accumulating": accumulating,
    "static too late": static_too_late,
    "forward without backward": without_backward,
    "unused, then a look": looked_at,
}
FLAGS: dict[str, dict[str, bool]] = {
    "no flag": {},
    "find unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
# What torch says of each, where it raises.
WORDS = (
    "Expected to have finished reduction in the prior iteration before starting a new one.",
    "Expected to mark a variable ready only once.",
    "Your training graph has changed in this iteration",
    "should be called before training loop starts",
    "find_unused_parameters=True",
    "Parameter indices which did not receive grad for rank",
)


def judged(rank: int, wrapper: str, body: str, options: dict[str, Any]) -> tuple[str, list[str]] | None:
    ddp = WRAPPERS[wrapper](Parts(), **options)
    raised = refusal(lambda: BODIES[body](ddp, rows(rank).requires_grad_()))
    return None if raised is None else (raised[0], [words for words in WORDS if words in raised[1]])


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("body", BODIES)
def test_strict_mode_raises_exactly_where_torch_does(body: str, flags: str, pair: RankPool) -> None:
    if (body, flags) == ("accumulating", "static"):
        pytest.skip("one of torch's own assertions fails here")
    theirs = pair.run(judged, "torch", body, FLAGS[flags])
    ours = pair.run(judged, "paceline", body, {**FLAGS[flags], "strict": True})
    assert ours == theirs


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("body", sorted({*BODIES} - {"static too late"}))
def test_by_default_none_of_it_is_an_error(body: str, flags: str, pool: RankPool) -> None:
    assert pool.run(judged, "paceline", body, FLAGS[flags]) == [None] * 2


def by_environment(rank: int, asked: bool | None) -> object:
    return judged(rank, "paceline", "one unused", {} if asked is None else {"strict": asked})


@pytest.mark.parametrize(
    ("value", "asked", "strict"),
    [("1", None, True), ("1", False, False), ("0", None, False), ("0", True, True), ("", None, False)],
)
def test_the_environment_decides_if_nothing_was_asked(
    value: str, asked: bool | None, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_STRICT", value)
    for raised in run_ranks(by_environment, args=(asked,), timeout=TIMEOUT):
        assert (raised is not None) == strict


def copied(rank: int, wrapper: str, options: dict[str, Any]) -> object:
    ddp = pickle.loads(pickle.dumps(WRAPPERS[wrapper](Parts(), static_graph=True, **options)))
    raised = refusal(lambda: BODIES["checkpointed twice"](ddp, rows(rank).requires_grad_()))
    return raised, ddp.static_graph


def test_a_copy_keeps_its_static_graph() -> None:
    theirs = run_ranks(copied, args=("torch", {}), timeout=TIMEOUT)
    assert run_ranks(copied, args=("paceline", {"strict": True}), timeout=TIMEOUT) == theirs


def names(rank: int, wrapper: str, options: dict[str, Any]) -> str:
    ddp = WRAPPERS[wrapper](Parts(), **options)
    return refusal(lambda: BODIES["one unused"](ddp, rows(rank)))[1]


def test_unused_parameters_are_named_when_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    for message in run_ranks(names, args=("paceline", {"strict": True}), timeout=TIMEOUT):
        assert "parts.2.weight" in message
        assert "parts.2.bias" in message
