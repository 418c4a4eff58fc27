"""The benchmarks of communication run, check what they time, and compare it with the targets."""

import json
import mmap
import os
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import collectives
import ddp
import hosts
import lazy_buckets
import pytest
import recorder
import torch
import torch.distributed as dist
from figures import cases, load

from paceline.testing import RankPool
from paceline.testing.hosts import why_not
from paceline.tools.bench.collective_times import CollectiveCase, PreparedCall, check_results
from paceline.tools.bench.models import MODELS
from paceline.tools.bench.step_times import Side

SVG = "{http://www.w3.org/2000/svg}"
SHARED_BYTES = 32 * 2**20


def quick_rows(
    program: Any, monkeypatch: pytest.MonkeyPatch, path: Path, *options: str
) -> dict[tuple[str, str], Any]:
    """The rows of a quick run, by what was measured and the figure's name."""
    monkeypatch.setattr(sys, "argv", [program.__name__, "--quick", "--json", str(path), *options])
    program.main()
    return {(row["what"], row["figure"]): row for row in json.loads(path.read_text())["rows"]}


def test_collectives_are_timed_on_each_side_and_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = tmp_path / "plot.svg"
    options = [
        "--worlds",
        "2",
        "--sizes",
        "4KB",
        "--sides",
        "gloo",
        "shared",
        "memcpy",
        "--plot",
        str(plot),
        "--figures",
        str(tmp_path / "figures.json"),
    ]
    options += ["--collectives", *collectives.COLLECTIVES]
    rows = quick_rows(collectives, monkeypatch, tmp_path / "rows.json", *options)
    assert {what for what, _ in rows} == {"copy_ of 100 MB, 2 ranks"} | {
        f"{name} of 4 KB, 2 ranks" for name in collectives.COLLECTIVES
    }
    assert set(rows["all_reduce of 4 KB, 2 ranks", "gloo / shared"]["timings"]) == {
        "gloo",
        "shared",
        "memcpy",
    }
    assert set(rows["broadcast of 4 KB, 2 ranks", "gloo / memcpy"]["timings"]) == {"gloo", "memcpy"}
    texts = [element.text for element in ElementTree.parse(plot).iter(f"{SVG}text")]
    assert {f"{name}, 2 ranks" for name in collectives.COLLECTIVES} | {"gloo", "shared", "memcpy"} <= {*texts}
    entry = load(tmp_path / "figures.json")["collectives"]
    assert entry["command"].startswith(
        "python benchmarks/collectives --quick --worlds 2 --sizes 4KB --sides "
    )
    assert str(tmp_path) not in entry["command"]
    [result] = cases(entry, collective="all_reduce", world=2, size=4096)
    assert set(result["spreads"]) == {"gloo", "shared", "memcpy"}
    assert set(result["figures"]) == {"gloo / shared", "shared / memcpy"}


def test_a_wrong_result_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not close"):
        wrong_sum(0)


def wrong_sum(rank: int) -> None:
    data = torch.zeros(8)
    right = PreparedCall(lambda: data.mul_(2), data, data)
    wrong = PreparedCall(lambda: data.mul_(3), data, data)
    check_results(rank, CollectiveCase("reduce_scatter", 1, 32), {"gloo": right, "backend": wrong})


def test_results_that_differ_between_ranks_are_noticed(pool: RankPool) -> None:
    assert pool.run(own_result_is_noticed) == [True, True]


def own_result_is_noticed(rank: int) -> bool:
    data = torch.zeros(8)
    case = CollectiveCase("all_reduce", 2, 32)
    try:
        # No collective at all: each rank keeps its own.
        check_results(rank, case, {"backend": PreparedCall(lambda: None, data, data)})
    except AssertionError as error:
        return "ranks have different results" in str(error)
    return False


@pytest.mark.parametrize(
    ("case", "shared", "met"),
    [
        (CollectiveCase("all_reduce", 2, collectives.MB), 0.04, [True, True]),
        (CollectiveCase("all_reduce", 2, collectives.MB), 0.1, [False, False]),
        (CollectiveCase("all_reduce", 8, collectives.MB), 0.2, [True, None]),
        (CollectiveCase("broadcast", 2, collectives.MB), 0.04, [None, None]),
    ],
    ids=str,
)
def test_targets_are_those_of_the_case(case: CollectiveCase, shared: float, met: list[bool | None]) -> None:
    seconds = {"gloo": [1.0] * 3, "shared": [shared] * 3, "memcpy": [0.03] * 3}
    rows = collectives.case_rows(case, seconds)
    assert [row.figure for row in rows] == ["gloo / shared", "shared / memcpy"]
    assert [row.met for row in rows] == met


def test_steps_are_timed_on_each_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--models", "tiny-layers", "--sides", "torch", "torch-views", "paceline", "paceline-c10d"]
    rows = quick_rows(ddp, monkeypatch, tmp_path / "rows.json", *options)
    whole, added = "step of 200 tiny layers", "what synchronisation adds to a step of 200 tiny layers"
    pairs = [
        f"{ours} / {theirs}" for ours in ("paceline", "paceline-c10d") for theirs in ("torch", "torch-views")
    ]
    assert list(rows) == [(what, pair) for what in (whole, added) for pair in pairs]
    assert [row["target"] for row in rows.values()] == [1.0] * 4 + [0.125] * 2 + [None] * 2


@pytest.mark.parametrize(
    ("torch_step", "met"), [(2.0, True), (1.5, False), (0.9, False)], ids=["an eighth", "a quarter", "noise"]
)
def test_what_synchronisation_adds_is_judged_by_what_torch_adds(torch_step: float, met: bool) -> None:
    steps = {"the module alone": 1.0, "torch": torch_step, "paceline": 1.125}
    times = ddp.StepTimes({side: [step] * 3 for side, step in steps.items()})
    [row] = ddp.added_rows("tiny-layers", times, [ddp.STEP_SIDES["torch"], ddp.STEP_SIDES["paceline"]])
    assert row.met is met


def test_the_recorder_is_timed_beside_one_that_does_nothing_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = quick_rows(recorder, monkeypatch, tmp_path / "rows.json", "--models", "conv")
    what = "step of 1.7M conv net with batch norm"
    assert list(rows) == [
        (what, "recorded / not, less 1"),
        (what, "the recorder's own calls / step"),
    ]
    assert set(rows[what, "recorded / not, less 1"]["timings"]) == {"paceline", "without a recorder", "alone"}
    assert 0 < rows[what, "the recorder's own calls / step"]["value"] < 1


def test_hosts_are_timed_and_what_crosses_between_them_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    rows = quick_rows(hosts, monkeypatch, tmp_path / "rows.json", "--models", "linears")
    what = "6.3M in six linear layers at 1gbit"
    least = (f"bytes sent per step of {what}", "paceline / the least possible")
    assert set(rows) == {(f"step of {what}", "paceline / torch"), least}
    assert 1 <= rows[least]["value"] < 1.02


def test_memory_that_ranks_share_counts_once(pool: RankPool) -> None:
    own, shared = (sum(held) / SHARED_BYTES for held in zip(*pool.run(held_more), strict=True))
    assert own == pytest.approx(2, abs=0.2)
    assert shared == pytest.approx(1, abs=0.2)


def held_more(_: int) -> tuple[int, int]:
    """What a rank holds more by memory of its own, and then by memory that all ranks have mapped."""
    before = ddp.held_bytes()
    own = torch.ones(SHARED_BYTES, dtype=torch.uint8)
    with_own = ddp.held_bytes()
    file = os.memfd_create("shared")
    os.truncate(file, SHARED_BYTES)
    path = [f"/proc/{os.getpid()}/fd/{file}"]
    dist.broadcast_object_list(path, 0)
    with Path(path[0]).open("r+b") as opened, mmap.mmap(opened.fileno(), SHARED_BYTES) as shared:
        shared.write(own.numpy().data)
        dist.barrier()
        with_shared = ddp.held_bytes()
        dist.barrier()
    os.close(file)
    return with_own - before, with_shared - with_own


def test_a_peak_holds_gradients_and_buckets_of_all_ranks() -> None:
    gradients = ddp.WORLD * sum(p.numel() * 4 for p in MODELS["tiny-layers"].build().parameters())
    assert max(ddp.held_memory(MODELS["tiny-layers"], ddp.STEP_SIDES["torch"])) > 2 * gradients


def test_lazy_buckets_hold_no_gradients_at_the_end_of_forward() -> None:
    model = MODELS["tiny-layers"]
    gradients = ddp.WORLD * sum(p.numel() * 4 for p in model.build().parameters())
    points = ddp.held_memory(model, Side("paceline", lazy=True), lazy_buckets.held_without_free_memory)
    after_forward = lazy_buckets.forward_points(model, points)
    assert len(after_forward) == ddp.MEMORY_STEPS
    assert max(points) - max(after_forward) > 0.8 * gradients


def test_lazy_buckets_are_compared_with_kept_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def held(model: Any, side: Side, _: object) -> list[int]:
        points = ddp.MEMORY_STEPS * (3 + len(range(0, count, -(-count // ddp.MEMORY_GRADIENTS))))
        count_of_side = 2 if side.lazy else 8
        assert model is lazy_buckets.LAZY_MODELS["mlp"]
        return [count_of_side] * points

    count = len(list(MODELS["mlp"].build().parameters()))
    monkeypatch.setattr(lazy_buckets, "held_memory", held)
    rows = quick_rows(lazy_buckets, monkeypatch, tmp_path / "rows.json", "--models", "mlp")
    for part in ("peak", "end of forward"):
        assert rows[f"46M MLP, {part}", "paceline-lazy / paceline"]["value"] == 0.25


def test_memory_is_judged_by_that_of_torch_with_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ddp, "held_memory", lambda _, side: [1, {"torch": 4, "torch-views": 2}.get(str(side), 3), 0]
    )
    rows = ddp.memory_rows("mlp", [ddp.STEP_SIDES[name] for name in ("torch", "torch-views", "paceline")], 3)
    assert [(row.figure, row.value, row.met) for row in rows] == [
        ("paceline / torch", 0.75, None),
        ("paceline / torch-views", 1.5, False),
    ]
