"""The logging data: torch's keys, and torch's values where they do not depend on the clock."""

import logging
import os
from typing import Any

import pytest
import torch
from batches import rows
from torch import distributed, nn
from wrappers import TORCHS_OPTIONS, WIDTH, WRAPPERS, Net, refusal, train

from paceline import DistributedDataParallel
from paceline.testing import RankPool, run_ranks

TIMEOUT = 6.0


class Mixture(nn.Module):
    """Parameters of several types, one of them frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).double()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.double()).float() * self.scale)


def build(model: str) -> nn.Module:
    if model == "mixture":
        return Mixture()
    if model == "layers":
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    return Net()


def static(_: int, wrapper: str, model: str, options: dict[str, Any]) -> dict[str, Any]:
    return WRAPPERS[wrapper](build(model), **options)._get_ddp_logging_data()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": 1},
    {"bucket_cap_mb_list": [1, 2]},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True, "static_graph": True},
    {"forward_sync_buffers": False},
]


@pytest.mark.parametrize("options", [each for each in OPTIONS if each.keys() <= TORCHS_OPTIONS], ids=str)
@pytest.mark.parametrize("model", ["net", "mixture", "layers"])
def test_what_is_known_at_once_is_as_torch_says(model: str, options: dict[str, Any], pool: RankPool) -> None:
    ours = pool.run(static, "paceline", model, options)
    theirs = pool.run(static, "torch", model, options)
    for mine, others in zip(ours, theirs, strict=True):
        assert {key: mine.get(key) for key in others} == others


def trained(rank: int, wrapper: str, model: str, steps: int) -> dict[str, Any]:
    ddp = WRAPPERS[wrapper](build(model))
    for step in range(steps):
        train(ddp, rank, step) if model != "mixture" else ddp(rows(rank, step)).sum().backward()
    return ddp._get_ddp_logging_data()


# These are of the clock.
TIMES = ("_time", "_time_start", "_time_end")


# Not with several data types: there torch's order of buckets is that of a hash table.
@pytest.mark.parametrize("steps", [1, 2, 4, 12])
@pytest.mark.parametrize("model", ["net", "layers"])
def test_what_is_known_after_some_steps_is_as_torch_says(model: str, steps: int, pool: RankPool) -> None:
    ours = pool.run(trained, "paceline", model, steps)
    theirs = pool.run(trained, "torch", model, steps)
    for mine, others in zip(ours, theirs, strict=True):
        kinds = {key: type(value) for key, value in others.items()}
        assert {key: type(mine.get(key)) for key in others} == kinds
        counted = {key: value for key, value in others.items() if not key.endswith(TIMES)}
        assert {key: mine[key] for key in counted} == counted


def timed(rank: int) -> list[dict[str, int]]:
    ddp = DistributedDataParallel(build("layers"))
    seen = []
    for step in range(4):
        train(ddp, rank, step)
        seen.append({key: each for key, each in ddp._get_ddp_logging_data().items() if key.endswith(TIMES)})
    return seen[1:]


def test_times_are_in_order(pool: RankPool) -> None:
    for seen in pool.run(timed):
        for data in seen:
            assert 0 < data["forward_compute_time_start"] < data["backward_compute_time_start"]
            assert data["backward_compute_time_start"] < data["backward_compute_time_end"]
            assert data["backward_comm_time_start"] < data["backward_comm_time_end"]
            assert data["backward_compute_comm_overlap_time"] <= data["backward_compute_time"]
            assert data["backward_compute_comm_overlap_time"] <= data["backward_comm_time"]
            assert all(value >= 0 for value in data.values())


def sampled(rank: int, wrapper: str, rate: int) -> list[int]:
    ddp = WRAPPERS[wrapper](Net())
    ddp._set_ddp_runtime_logging_sample_rate(rate)
    seen = []
    for step in range(16):
        train(ddp, rank, step)
        seen.append(ddp._get_ddp_logging_data()["iteration"])
    with ddp.no_sync():
        train(ddp, rank)
    with torch.no_grad():
        ddp(rows(rank))
    return [*seen, ddp._get_ddp_logging_data()["iteration"]]


@pytest.mark.parametrize("rate", [1, 2, 5, 100])
def test_iterations_are_sampled_at_torchs_rate(rate: int, pool: RankPool) -> None:
    assert pool.run(sampled, "paceline", rate) == pool.run(sampled, "torch", rate)


def bad_rate(_: int, wrapper: str, rate: int) -> tuple[str, bool]:
    kind, message = refusal(lambda: WRAPPERS[wrapper](Net())._set_ddp_runtime_logging_sample_rate(rate))
    return kind, "1" in message and "sample" in message


@pytest.mark.parametrize("rate", [0, -1])
def test_a_bad_rate_is_refused_as_by_torch(rate: int, pool: RankPool) -> None:
    ours = pool.run(bad_rate, "paceline", rate)
    assert ours == pool.run(bad_rate, "torch", rate) == [("ValueError", True)] * 2


def hook_names(_: int, wrapper: str, builtin: bool) -> str:
    ddp = WRAPPERS[wrapper](Net())
    if builtin:
        ddp._register_builtin_comm_hook(distributed.BuiltinCommHookType.FP16_COMPRESS)
    else:
        ddp.register_comm_hook(None, halving)
    return ddp._get_ddp_logging_data()["comm_hook"]


def halving(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().div_(2))
    return future


@pytest.mark.parametrize("builtin", [True, False])
def test_a_hook_has_the_name_that_torch_gives_it(builtin: bool, pool: RankPool) -> None:
    assert pool.run(hook_names, "paceline", builtin) == pool.run(hook_names, "torch", builtin)


class Raising(Net):
    """Raises in backward."""

    raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.first(x * self.scale).tanh()
        if self.raises:
            inside.register_hook(fail)
        return self.last(inside)


def fail(_: torch.Tensor) -> None:
    raise ArithmeticError("too much")


def failed(rank: int) -> tuple[Any, Any, Any]:
    ddp = DistributedDataParallel(Raising())
    train(ddp, rank)
    before = ddp._get_ddp_logging_data().get("has_error", 0)
    ddp.module.raises = rank == 0
    refused = refusal(lambda: train(ddp, rank))
    data = ddp._get_ddp_logging_data()
    return before, refused, (data.get("has_error"), data.get("error", ""))


def test_a_step_that_failed_is_in_the_data_of_each_rank() -> None:
    results = run_ranks(failed, timeout=TIMEOUT)
    for rank, (before, refused, (has_error, error)) in enumerate(results):
        assert before == 0
        assert refused is not None
        assert has_error == 1, f"rank {rank}"
        assert error


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def environment(rank: int, level: int) -> list[str]:
    kept, log = Kept(), logging.getLogger("paceline")
    log.addHandler(kept)
    before = log.level
    log.setLevel(level)
    os.environ["NCCL_SOCKET_IFNAME"] = f"eth{rank}"
    os.environ["UNRELATED"] = "secret"
    try:
        DistributedDataParallel(nn.Linear(1, 1))
    finally:
        log.setLevel(before)
        log.removeHandler(kept)
        del os.environ["NCCL_SOCKET_IFNAME"], os.environ["UNRELATED"]
    return kept.texts


def test_the_environment_is_logged_at_debug_level(pair: RankPool) -> None:
    assert pair.run(environment, logging.INFO) == [[], []]
    for rank, (text,) in enumerate(pair.run(environment, logging.DEBUG)):
        assert f"rank {rank} wraps Linear" in text
        assert f"NCCL_SOCKET_IFNAME=eth{rank}" in text
        assert "secret" not in text
