"""The benchmarks of communication run, check what they time, and compare it with the targets."""

import argparse
import json
import mmap
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from xml.etree import ElementTree

import accelerator
import collectives
import ddp
import hosts
import lazy_buckets
import memory
import mpi_peers
import mpi_rank
import pytest
import recorder
import scale
import shards
import step_targets
import torch
import torch.distributed as dist
from figures import TABLES, cases, load
from torch import nn

from paceline.errors import BenchError
from paceline.testing import RankPool, run_ranks, toy
from paceline.testing.hosts import why_not
from paceline.tools.bench import held_memory
from paceline.tools.bench.collective_times import CollectiveCase, PreparedCall, check_results
from paceline.tools.bench.held_memory import MemoryCase
from paceline.tools.bench.measure import Size, timing
from paceline.tools.bench.models import ADAMW, MODELS, Model
from paceline.tools.bench.sides import HOST, OPTIMIZER_SIDES, PLAIN, STEP_SIDES, TORCH, Side
from paceline.tools.bench.step_times import Repeats, StepResult, StepTimes

SVG = "{http://www.w3.org/2000/svg}"
SHARED_BYTES = 32 * 2**20
# What is measured of a model, by quantity.
TINY_LAYERS = {
    "step": "step of 200 tiny layers",
    "added": "what synchronisation adds to a step of 200 tiny layers",
    "cpu": "CPU time of a step of 200 tiny layers",
    "cpu added": "CPU time that synchronisation adds to a step of 200 tiny layers",
}


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


@pytest.mark.parametrize("name", mpi_peers.MPI_LIBRARIES)
def test_mpi_is_timed_beside_ours_in_wall_and_cpu_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (library := mpi_peers.MPI_LIBRARIES[name]).is_installed:
        pytest.skip(f"not installed: {name} ({library.how_to_install})")
    options = ["--mpi", name, "--worlds", "2", "--sizes", "4KB", "--sides", "gloo", "shared"]
    figures = tmp_path / "figures.json"
    rows = quick_rows(collectives, monkeypatch, tmp_path / "rows.json", *options, "--figures", str(figures))
    for what in ("all_reduce of 4 KB, 2 ranks", "CPU time of all_reduce of 4 KB, 2 ranks"):
        assert set(rows[what, f"{name} / shared"]["timings"]) == {"gloo", "shared", name}
        assert rows[what, f"{name} / shared"]["target"] is None
    entry = load(figures)["collectives_mpi"]
    assert library.title in entry["mpi"][name]
    for table in ("collectives-mpi", "collectives-mpi-cpu"):
        header, _, row, *_ = TABLES[table][1](entry)
        assert entry["mpi"][name] in header
        assert row.startswith("| 2 | 4 KB | ")


def test_an_mpi_that_is_not_installed_is_left_out_and_said_how_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mpi_peers, "FOLDER", tmp_path)
    assert mpi_peers.installed(["mpich"]) == []
    expected = "left out: mpich (install it with `python benchmarks/mpi_peers.py mpich`)\n"
    assert capsys.readouterr().err == expected


def test_every_mpi_has_a_group_of_pinned_packages() -> None:
    groups = tomllib.loads((mpi_peers.ROOT / "pyproject.toml").read_text())["dependency-groups"]
    pins = (mpi_peers.ROOT / "constraints.txt").read_text().splitlines()
    assert set(groups) == set(mpi_peers.MPI_LIBRARIES)
    assert {package for group in groups.values() for package in group} <= {
        line.partition("==")[0] for line in pins
    }


class ScriptedPeer:
    """An MPI library that says what it is told to say."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def prepare(self, case: CollectiveCase) -> None:
        self.asked.append(f"prepare {case.size}")

    def turn(self, calls: int) -> list[mpi_rank.RankTurn]:
        self.asked.append(f"turn of {calls}")
        number = len(self.asked)
        return [mpi_rank.RankTurn(number, 2.0), mpi_rank.RankTurn(0.5, 0.25)]

    def check(self) -> None:
        self.asked.append("check")


def test_a_turn_takes_as_long_as_its_slowest_rank_and_the_cpu_time_of_all(pool: RankPool) -> None:
    peer: Any = ScriptedPeer()
    case = CollectiveCase("all_reduce", 2, 4096)
    sides = ["gloo", "shared", "memcpy"]
    times = mpi_peers.time_beside_mpi(pool, {"mpich": peer}, case, sides, rounds=3, calls=2)
    assert peer.asked == ["prepare 4096", *["turn of 2"] * 4, "check"]
    assert times.seconds["mpich"] == [3, 4, 5]  # the first turn warms up
    assert times.cpu["mpich"] == [2.25] * 3
    assert {side: len(values) for side, values in times.cpu.items()} == dict.fromkeys([*sides, "mpich"], 3)


def test_an_mpi_whose_ranks_do_not_start_says_what_they_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_peers, "FOLDER", tmp_path)
    library = mpi_peers.MPI_LIBRARIES["mpich"]
    library.mpiexec.parent.mkdir(parents=True)
    library.mpiexec.write_text("#!/bin/sh\necho no such fabric\nexit 3\n")
    library.mpiexec.chmod(0o755)
    with pytest.raises(BenchError, match=r"did not start \(side: mpich\).*\nno such fabric"):
        mpi_peers.MpiRanks(library, 2)


@pytest.mark.parametrize(("added", "is_right"), [(0, True), (1, False)])
def test_a_wrong_sum_of_mpi_is_noticed(added: int, is_right: bool) -> None:
    alone = SimpleNamespace(
        rank=0, size=1, Barrier=lambda: None, Allreduce=lambda _, data: data.__iadd__(added)
    )
    rank = mpi_rank.MpiRank(SimpleNamespace(IN_PLACE=None, COMM_WORLD=alone))
    assert rank.answer(mpi_rank.Prepare(1024)) is is_right
    assert rank.answer(mpi_rank.Check()) is is_right


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
    pairs = [
        f"{ours} / {theirs}" for ours in ("paceline", "paceline-c10d") for theirs in ("torch", "torch-views")
    ]
    assert list(rows) == [(what, pair) for what in TINY_LAYERS.values() for pair in pairs]
    none = [None] * 2
    assert [row["target"] for row in rows.values()] == [1.0] * 4 + [0.2] * 2 + none * 3 + [0.4] * 2 + none


def test_more_ranks_and_busy_cores_have_a_target_for_the_whole_step_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--models", "tiny-layers", "--parts", "steps", "--sides", "torch", "paceline", "floor"]
    figures = tmp_path / "figures.json"
    options += ["--world", "3", "--busy", "1", "--figures", str(figures)]
    rows = quick_rows(ddp, monkeypatch, tmp_path / "rows.json", *options)
    targets = {key: row["target"] for key, row in rows.items() if row["target"] is not None}
    assert targets == {(TINY_LAYERS["step"], "paceline / torch"): 0.9}
    assert {(row["case"]["world"], row["case"]["busy"]) for row in rows.values()} == {(3, 1)}
    assert (TINY_LAYERS["added"], "paceline / floor") in rows
    entry = load(figures)["ddp_world_3_busy_1"]
    assert {result["case"]["quantity"] for result in entry["results"]} == set(TINY_LAYERS)
    [added] = cases(entry, quantity="added")
    assert set(added["spreads"]) == {"torch", "paceline", "floor", "waiting for the slower rank"}
    [cpu] = cases(entry, quantity="cpu")
    assert set(cpu["spreads"]) == {"the module alone", "torch", "paceline", "floor"}


def test_cores_are_busy_while_steps_are_timed_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def time_steps(*_: object, **__: object) -> NoReturn:
        seen.append(children())
        raise KeyboardInterrupt

    before = children()
    monkeypatch.setattr(ddp, "time_steps", time_steps)
    with pytest.raises(KeyboardInterrupt):
        quick_rows(ddp, monkeypatch, tmp_path / "rows.json", "--models", "conv", "--busy", "2")
    assert [len(set(during) - set(before)) for during in seen] == [2]
    assert children() == before


def children() -> list[int]:
    """The processes that this one has started and not yet waited for."""
    tasks = Path("/proc/self/task").iterdir()
    return sorted(int(pid) for task in tasks for pid in (task / "children").read_text().split())


def test_the_cost_per_parameter_is_that_of_each_number_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--parts", "parameters", "--models", "parameters-500", "--sides", "torch", "paceline"]
    figures = tmp_path / "figures.json"
    rows = quick_rows(ddp, monkeypatch, tmp_path / "rows.json", *options, "--figures", str(figures))
    targets = {what: row["target"] for (what, _), row in rows.items()}
    assert targets == {
        "what torch adds per parameter": None,
        "CPU time that torch adds per parameter and rank": None,
        "what paceline adds per parameter": 1.5,
        "CPU time that paceline adds per parameter and rank": 1.5,
        "wrapping 500 tiny parameters": None,
    }
    assert list(load(figures)) == ["ddp_parameters"]


def test_torch_is_not_timed_with_more_than_5000_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_steps(model: Model, sides: list[Side], repeats: Repeats, **_: object) -> StepResult:
        steps = {"the module alone": 1.0} | {str(side): 1.2 for side in sides}
        return StepResult(model.what, constant(steps), repeats, 1, 1, [], None)

    monkeypatch.setattr(ddp, "time_steps", time_steps)
    monkeypatch.setattr(
        ddp, "build_times", lambda _, sides, **__: {side: timing([2.9] * 3) for side in sides}
    )
    options = ["--parts", "parameters", "--sides", "torch", "paceline"]
    rows = quick_rows(ddp, monkeypatch, tmp_path / "rows.json", *options)
    counts = ["500", "5,000", "20,000", "100,000"]
    for side, of in (("torch", counts[:2]), ("paceline", counts)):
        what = f"what {side} adds per parameter"
        assert [figure for found, figure in rows if found == what] == [f"us, of {count}" for count in of]
    row = rows["what paceline adds per parameter", "us, of 100,000"]
    assert (row["value"], row["met"]) == (pytest.approx(2.0), False)
    cpu = rows["CPU time that paceline adds per parameter and rank", "us, of 100,000"]
    assert (cpu["value"], cpu["met"]) == (pytest.approx(1.0), True)
    build = {figure: row for (what, figure), row in rows.items() if what.startswith("wrapping")}
    assert [(figure, row["target"], row["met"]) for figure, row in build.items()] == [
        ("paceline, s", 3.0, True)
    ]


def constant(steps: Mapping[str, float]) -> StepTimes:
    """Rounds in which each side takes as long, and as much CPU time."""
    rounds = {side: [step] * 3 for side, step in steps.items()}
    return StepTimes(rounds, rounds, [0.0] * 3)


@pytest.mark.parametrize(
    ("torch_step", "met"), [(2.0, True), (1.5, False), (0.9, False)], ids=["a fifth", "two fifths", "noise"]
)
def test_what_synchronisation_adds_is_judged_by_what_torch_adds(torch_step: float, met: bool) -> None:
    times = constant({"the module alone": 1.0, "torch": torch_step, "paceline": 1.2})
    sides = [STEP_SIDES["torch"], STEP_SIDES["paceline"]]
    rows = step_targets.step_rows("tiny-layers", times, sides, step_targets.Conditions())
    [row] = [row for row in rows if row.what == TINY_LAYERS["added"]]
    assert row.met is met


@pytest.mark.parametrize(("floor_step", "met"), [(1.2, True), (1.1, False)])
def test_what_paceline_adds_is_judged_by_what_the_floor_adds(floor_step: float, met: bool) -> None:
    times = constant({"the module alone": 1.0, "paceline": 1.25, "paceline-c10d": 1.25, "floor": floor_step})
    sides = [STEP_SIDES[name] for name in ("paceline", "paceline-c10d", "floor")]
    rows = step_targets.step_rows("mlp", times, sides, step_targets.Conditions())
    judged = [(row.figure, row.met) for row in rows if row.case["quantity"] == "added"]
    assert judged == [("paceline / floor", met), ("paceline-c10d / floor", None)]


def test_steps_with_adamw_are_timed_with_each_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tmp_path / "figures.json"
    options = ["--optimizer", "adamw", "--models", "tiny-layers", "--figures", str(figures)]
    rows = quick_rows(ddp, monkeypatch, tmp_path / "rows.json", *options)
    what = "step of 200 tiny layers with AdamW"
    assert {each for each, _ in rows} == {what, "CPU time of a step of 200 tiny layers with AdamW"}
    assert set(rows[what, f"{HOST} / {PLAIN}"]["timings"]) == {"the module alone", *OPTIMIZER_SIDES}
    targets = {key: row["target"] for key, row in rows.items() if row["target"] is not None}
    assert targets == {(what, f"{HOST} / {PLAIN}"): 1.0}
    [row] = [*figures_table("ddp-adamw", figures)][2:3]
    assert row.startswith("| 200 tiny layers | ")


def figures_table(name: str, path: Path) -> list[str]:
    """A table of the docs, made from figures."""
    benchmark, render = TABLES[name]
    return [*render(load(path)[benchmark])]


@pytest.mark.parametrize(("host_step", "met"), [(0.9, True), (0.95, False)])
@pytest.mark.parametrize(("model", "base"), [("mlp", "the module alone"), ("conv", "paceline")])
def test_a_host_optimizer_is_judged_by_the_module_alone_or_by_the_plain_optimizer(
    model: str, base: str, host_step: float, met: bool
) -> None:
    times = constant({"the module alone": 1.0, "paceline": 0.93, str(HOST): host_step})
    rows = step_targets.optimizer_rows(model, times, [PLAIN, HOST], step_targets.Conditions())
    judged = {row.figure: row.met for row in rows if row.met is not None}
    assert judged == {f"{HOST} / {base}": met}


@pytest.mark.parametrize("options", [["--parts", "memory"], ["--sides", "floor"]], ids=" ".join)
def test_with_adamw_there_are_other_sides_and_one_part(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="2"):
        quick_rows(ddp, monkeypatch, tmp_path / "rows.json", "--optimizer", "adamw", *options)


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
    before = held_memory.held_bytes()
    own = torch.ones(SHARED_BYTES, dtype=torch.uint8)
    with_own = held_memory.held_bytes()
    file = os.memfd_create("shared")
    os.truncate(file, SHARED_BYTES)
    path = [f"/proc/{os.getpid()}/fd/{file}"]
    dist.broadcast_object_list(path, 0)
    with Path(path[0]).open("r+b") as opened, mmap.mmap(opened.fileno(), SHARED_BYTES) as shared:
        shared.write(own.numpy().data)
        dist.barrier()
        with_shared = held_memory.held_bytes()
        dist.barrier()
    os.close(file)
    return with_own - before, with_shared - with_own


def test_a_peak_holds_gradients_and_buckets_of_all_ranks() -> None:
    gradients = 2 * sum(p.numel() * 4 for p in MODELS["tiny-layers"].build().parameters())
    case = MemoryCase(MODELS["tiny-layers"], STEP_SIDES["torch"])
    held = held_memory.held_memory(case, world=2, timeout=60.0)
    assert max(held.since_wrapping) > 2 * gradients
    parameters = gradients
    assert max(held.since_module) > max(held.since_wrapping) + 0.8 * parameters


def test_a_host_optimizer_holds_parameters_and_state_once() -> None:
    model = Model("one layer", one_layer, (1, 4096), 1)
    parameters = sum(parameter.nbytes for parameter in one_layer().parameters())
    sides = [MemoryCase(model, side, ADAMW, in_use=True) for side in (PLAIN, HOST)]
    held = [held_memory.held_memory(case, world=2, timeout=60.0).since_module for case in sides]
    # After the last step: parameters, gradients, and two averages of these.
    plain, host = (points[-1] / parameters for points in held)
    assert plain == pytest.approx(2 * (1 + 1 + 2), abs=1.0)
    assert host == pytest.approx(1 + 2 * 1 + 2, abs=1.0)


def one_layer() -> nn.Module:
    return nn.Linear(4096, 2048)


def test_lazy_buckets_hold_no_gradients_at_the_end_of_forward() -> None:
    model = MODELS["tiny-layers"]
    gradients = 2 * sum(p.numel() * 4 for p in model.build().parameters())
    points = lazy_buckets.held_since_wrapping(model, Side("paceline", lazy=True))
    after_forward = lazy_buckets.forward_points(model, points)
    assert len(after_forward) == held_memory.MEMORY_STEPS
    assert max(points) - max(after_forward) > 0.8 * gradients


def test_lazy_buckets_are_compared_with_kept_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def held(model: Any, side: Side) -> list[int]:
        points = held_memory.MEMORY_STEPS * (
            3 + len(range(0, count, -(-count // held_memory.MEMORY_GRADIENTS)))
        )
        count_of_side = 2 if side.lazy else 8
        assert model is lazy_buckets.LAZY_MODELS["mlp"]
        return [count_of_side] * points

    count = len(list(MODELS["mlp"].build().parameters()))
    monkeypatch.setattr(lazy_buckets, "held_since_wrapping", held)
    rows = quick_rows(lazy_buckets, monkeypatch, tmp_path / "rows.json", "--models", "mlp")
    for part in ("peak", "end of forward"):
        assert rows[f"46M MLP, {part}", "paceline-lazy / paceline"]["value"] == 0.25


def test_memory_is_judged_by_that_of_torch_with_views() -> None:
    held = {"torch": 4.0, "torch-views": 2.0, "paceline": 3.0}
    peaks = {STEP_SIDES[name]: Size(value, value, value) for name, value in held.items()}
    rows = step_targets.memory_rows("mlp", peaks, step_targets.Conditions())
    assert [(row.figure, row.value, row.met) for row in rows] == [
        ("paceline / torch", 0.75, None),
        ("paceline / torch-views", 1.5, False),
    ]


def test_memory_with_adamw_is_judged_by_that_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {
        "torch": 900,
        "torch-ZeroRedundancyOptimizer": 700,
        "paceline": 800,
        "paceline-HostOptimizer": 400,
    }
    monkeypatch.setattr(memory, "peak", lambda case, _: held[str(case.side)])
    figures = tmp_path / "figures.json"
    options = ["--models", "mlp", "--figures", str(figures)]
    rows = quick_rows(memory, monkeypatch, tmp_path / "rows.json", *options)
    judged = {what: row["met"] for (what, figure), row in rows.items() if figure == f"{HOST} / {TORCH}"}
    assert judged == {
        "peak memory of 46M MLP, 2 ranks": None,
        "peak memory of 46M MLP, 4 ranks": True,
        "peak memory of 46M MLP, 8 ranks": False,
    }
    [row] = [*figures_table("memory-adamw", figures)][2:3]
    assert row == (
        "| 46M MLP | 2 | 0.00 MB (0.00 to 0.00) | 0.00 MB (0.00 to 0.00) | 0.00 MB (0.00 to 0.00) "
        "| 0.00 MB (0.00 to 0.00) | 0.44 |  |"
    )


def test_memory_with_adamw_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--models", "tiny-layers", "--worlds", "2"]
    rows = quick_rows(memory, monkeypatch, tmp_path / "rows.json", *options)
    assert [figure for _, figure in rows] == [f"{HOST} / {side}" for side in memory.SIDES if side != HOST]
    assert all(row["value"] > 0 for row in rows.values())


def measure_on_toy(rank: int, path: Path) -> None:
    toy.register()
    MODELS["small"] = Model("two layers", lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (2, 4), 1)
    options = argparse.Namespace(models=["small"], rounds=2, report=path)
    accelerator.run(options, rank, torch.device("toy:0"), toy.new_group())


def test_steps_on_an_accelerator_make_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    run_ranks(measure_on_toy, 2, args=(path,), timeout=100.0)
    report = json.loads(path.read_text())
    assert (report["ranks"], report["device"]) == (2, "toy")
    measured = report["models"]["small"]
    assert measured["difference"] < 1e-5
    for times in measured["seconds"].values():
        assert all(issued < done for issued, done in zip(times["issued"], times["done"], strict=True))


def test_without_an_accelerator_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch finds none; on CPUs use"):
        accelerator.main([])


def test_shards_are_compared_with_steps_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = quick_rows(shards, monkeypatch, tmp_path / "rows.json", "--models", "tiny-layers")
    held = "gradients held before the last backward, in copies of all parameters"
    for name, copies in (("one shard per rank", 0), ("four shards per rank", 2)):
        what = f"step of 200 tiny layers, {name}"
        assert rows[what, "with shards / without, wall time"]["value"] > 0
        assert rows[what, f"{held}, with shards"]["value"] == copies


def test_what_grows_with_ranks_and_hosts_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    figures = tmp_path / "figures.json"
    rows = quick_rows(scale, monkeypatch, tmp_path / "rows.json", "--figures", str(figures))
    on_one_host = rows["3 ranks on one host", "steps recorded per rank"]
    assert on_one_host["value"] == (3 + 1) * scale.STEPS
    assert all(spread["median"] > 0 for spread in on_one_host["timings"].values())
    assert rows["bytes per step of 3 hosts with 2 ranks", "outer loop / plain averages"]["value"] < 1
    for name, sides in (("scale-times", 5), ("scale-sizes", 3), ("scale-hosts", 2)):
        header, _, first, *_ = figures_table(name, figures)
        assert header.count("|") == first.count("|") == sides + 2
