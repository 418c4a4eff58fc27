"""What an error while ranks measure for the hook "auto" does to steps: nothing."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel, hooks
from paceline.comm import link_speed
from paceline.comm.link_speed import Link
from paceline.ddp.reducer import auto_tuner, link_measurement
from paceline.errors import PeerError
from paceline.hooks.auto import Auto
from paceline.testing import run_ranks

WIDTH = 64


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def loss(ddp: nn.Module, rank: int, number: int) -> Tensor:
    torch.manual_seed(100 * number + rank)
    ddp.zero_grad()
    return ddp(torch.randn(2, WIDTH)).square().mean()  # type: ignore[no-any-return]


def gradients(ddp: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


def step(ddp: nn.Module, rank: int, number: int) -> list[Tensor]:
    loss(ddp, rank, number).backward()
    return gradients(ddp)


def measure_in_each_step() -> None:
    auto_tuner._WINDOW, auto_tuner._STEPS_PER_MEASUREMENT = 1, 0  # type: ignore[misc]
    auto_tuner.has_changed = lambda *_: True


def with_short_deadline(call: Callable[..., Any]) -> Callable[..., Any]:
    """What waits for a message that does not come, which need not take a minute."""

    def short(*arguments: object) -> object:
        before, link_speed.DEADLINE = link_speed.DEADLINE, timedelta(seconds=2)  # type: ignore[misc]
        try:
            return call(*arguments)
        finally:
            link_speed.DEADLINE = before  # type: ignore[misc]

    return short


class HurtError(Exception):
    """Of one rank alone."""


def raise_hurt(*_: object) -> None:
    raise HurtError("no memory")


def raised_in_a_measurement(rank: int, at: str) -> tuple[str, list[int], bool]:
    """What each rank raises, the steps that it counts, and whether later gradients are plain averages."""
    measure_in_each_step()
    ddp = DistributedDataParallel(net(), hook=hooks.auto(max_error=0), transport="c10d", bucket_cap_mb=25)
    plain = DistributedDataParallel(net(), transport="c10d")
    places = {
        "hooks": (Auto, "measure_costs"),
        "links": (link_measurement, "measure_links"),
        "messages": (link_speed._LinkEnd, "bandwidth"),
    }
    place, name = places[at]
    before = getattr(place, name)
    setattr(place, name, raise_hurt if rank == 1 else with_short_deadline(before))
    told, steps, same = "", [], True
    for number in range(12):
        try:
            grads = step(ddp, rank, number)
        except (HurtError, PeerError) as error:
            same = same and isinstance(error, HurtError) == (rank == 1)
            told = " ".join([str(error), *getattr(error, "__notes__", [])])
            grads = gradients(ddp)
            setattr(place, name, before)
        same = same and all(map(torch.equal, grads, step(plain, rank, number)))
        steps.append(ddp._reducer.step_number)
    return told, steps, same


@pytest.mark.parametrize("at", ["hooks", "links", "messages"])
def test_an_error_while_ranks_measure_is_raised_on_all_and_loses_no_step(at: str) -> None:
    for told, steps, same in run_ranks(raised_in_a_measurement, 2, args=(at,), timeout=60.0):
        assert "ranks could not measure links and hooks for the hook auto" in told
        assert "rank 1: HurtError: no memory" in told
        assert steps == [*range(1, 13)]
        assert same


def with_residuals(rank: int, how: str) -> tuple[list[int], bool]:
    """The steps whose measurement raised, and whether all gradients are those of wrappers without auto."""
    measure_in_each_step()
    link_measurement.measure_links = lambda *_: {(0, 1): Link(latency=1e-4, bandwidth=1e5)}
    options = {"transport": "c10d", "bucket_cap_mb": 25}
    hook = hooks.auto(max_error=1 / 14)
    ddp = DistributedDataParallel(net(), hook=hook, **options)  # type: ignore[arg-type]
    beside = DistributedDataParallel(net(), **options)  # type: ignore[arg-type]
    fixed, plain = (
        DistributedDataParallel(net(), hook=each, **options)  # type: ignore[arg-type]
        for each in (hooks.int4(), None)
    )
    assert hook.choice is not None
    assert hook.choice.name == "int4"
    ddp.require_manual_backward_finalization = how == "ended by the user"
    if rank == 1:
        Auto.measure_costs = raise_hurt  # type: ignore[method-assign,assignment]
    raised, same = [], True
    for number in range(12):
        try:
            if how == "two in one backward":
                (loss(ddp, rank, number) + loss(beside, rank, number)).backward()
            else:
                loss(ddp, rank, number).backward()
                loss(beside, rank, number).backward()
                if how == "ended by the user":
                    ddp.finalize_backward()
        except (HurtError, PeerError):
            raised.append(number)
            if how == "alone":
                loss(beside, rank, number).backward()
        wanted = step(fixed, rank, number) + step(plain, rank, number)
        same = same and all(map(torch.equal, gradients(ddp) + gradients(beside), wanted))
    return raised, same


@pytest.mark.parametrize("how", ["alone", "two in one backward", "ended by the user"])
def test_an_error_while_ranks_measure_loses_no_residual_and_no_step_of_another_wrapper(how: str) -> None:
    first, second = run_ranks(with_residuals, 2, args=(how,), timeout=60.0)
    assert first == second
    raised, same = first
    assert len(raised) > 2
    assert same


def paused_in_a_measurement(rank: int) -> tuple[list[str], list[int], int, bool]:
    """What was said, the steps, the measurements that ended, and whether gradients are those of the hook."""
    measure_in_each_step()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    ddp = DistributedDataParallel(net(), hook=hooks.auto(max_error=0), transport="c10d", bucket_cap_mb=25)
    plain = DistributedDataParallel(net(), transport="c10d")
    logging.getLogger("paceline").addHandler(handler)
    tuner, before = ddp._reducer._tuner, link_speed._LinkEnd.bandwidth
    assert tuner is not None

    def pause(end: link_speed._LinkEnd, latency: float) -> float:
        link_speed._LinkEnd.bandwidth = before  # type: ignore[method-assign]
        if rank == 0:
            return with_short_deadline(before)(end, latency)  # type: ignore[no-any-return]
        time.sleep(4)
        return before(end, latency)

    link_speed._LinkEnd.bandwidth = pause  # type: ignore[method-assign]
    steps, links, same = [], set(), True
    for number in range(12):
        same = same and all(map(torch.equal, step(ddp, rank, number), step(plain, rank, number)))
        assert tuner._measured is not None
        steps.append(ddp._reducer.step_number)
        links.add(tuner._measured.link)
    return said, steps, len(links), same


def test_a_rank_that_pauses_while_links_are_measured_again_costs_one_line_and_nothing_else() -> None:
    first, second = run_ranks(paused_in_a_measurement, 2, timeout=60.0)
    [line] = [each for each in first[0] if "keeps what it has" in each]
    assert "rank 1 did not answer within 2 s while links were measured" in line
    assert "no step is lost" in line
    assert second[0] == []
    for _, steps, links, same in (first, second):
        assert steps == [*range(1, 13)]
        assert links > 1  # later measurements went well
        assert same
