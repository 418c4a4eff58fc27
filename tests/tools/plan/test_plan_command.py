"""``paceline plan`` as users call it: on recordings that are made up, on a real one, and on bad input."""

import itertools
import json
import re
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from recordings import PauseEvery, Run, Slow, write
from torch import nn

import paceline
from paceline.recording.ring_buffer import Header
from paceline.recording.rows import StepColumn, SumColumn
from paceline.testing import run_ranks
from paceline.tools.main import main
from paceline.tools.plan import calibration
from paceline.tools.plan.calibration import Calibration
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.recorded_steps import read_steps

SHORT = Run(ranks=2, steps=101, parameters=8, bucket_bytes=1 << 16)


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(Run(ranks=2, steps=20, parameters=8, bucket_bytes=1 << 16), tmp_path / "run")


def train(rank: int, folder: str) -> None:
    torch.manual_seed(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_RECORD", folder)
        wrapped = paceline.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
        for _ in range(60):  # of one to three milliseconds: on a busy machine many of them have pauses
            wrapped(torch.randn(4, 64)).sum().backward()


def test_a_real_recording_gets_a_prediction_for_each_number_of_hosts_and_each_hook(tmp_path: Path) -> None:
    run_ranks(train, 2, args=(str(tmp_path),))
    hooks = ["none", "fp16", "bf16", "int8", "int4", "power_sgd", "outer"]
    result = plan(tmp_path, "--hosts", "2,8", "--hook", ",".join(hooks), "--link", "100Mbit", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(each["hosts"], each["hook"]) for each in found["predictions"]] == [
        (hosts, hook) for hosts in (2, 8) for hook in hooks
    ]
    sent = {(each["hosts"], each["hook"]): each["sent_bytes"] for each in found["predictions"]}
    whole = sum(found["recorded"]["bucket_bytes"])
    assert whole == 2 * (64 * 64 + 64) * 4
    # P, B, 2 and 22 W entries of 4 bytes; see docs/scale.md.
    few, many = (4 * (4 + 1 + 2 + 22 * 2 * hosts) for hosts in (2, 8))
    assert sent[2, "none"] == pytest.approx(whole + few)
    assert sent[8, "none"] == pytest.approx((whole + many) * 14 / 8)
    assert sent[2, "fp16"] == pytest.approx(whole / 2 + few)
    assert sent[8, "fp16"] == pytest.approx(whole * 7 / 8 + many * 14 / 8, rel=0.01)
    assert sent[2, "int8"] == pytest.approx(whole / 4 * 1.016 + few, rel=0.01)
    assert {each["what"] for each in found["measured"]} == {"in host", "report", *hooks} - {"none"}


def test_a_report_of_many_ranks_takes_as_long_as_it_has_entries(folder: Path) -> None:
    costs = Calibration(read_steps(folder), Cluster((2,), 8, 1e9, 0.0))
    assert Calibration(read_steps(folder), Cluster((1,), 2, 1e9, 0.0)).report(1).seconds == 0  # as recorded
    some, more, many = (costs.report(hosts).seconds for hosts in (128, 1_280, 10_000))
    assert 0 < some < 0.1
    assert more == pytest.approx(10 * some, rel=0.1)
    assert many == pytest.approx(78 * some, rel=0.1)


def test_what_is_measured_inside_a_host_fits_into_its_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(calibration.torch, "randn", lambda numel: made.append(numel) or torch.zeros(1))
    monkeypatch.setattr(calibration.torch, "empty", lambda _: torch.zeros(1))
    monkeypatch.setattr(calibration, "_seconds", lambda _: 0.5)
    seconds = Calibration(read_steps(folder), Cluster((2,), 8, 1e9, 0.0))._in_host(1 << 28, 8)
    assert sum(made) == 1 << 26
    assert seconds == (0.5 * 32, 0.5 * 32)


def test_a_step_of_the_recorded_host_is_predicted_to_take_as_long_as_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_seconds", lambda _: 5e-4)
    folder = write(replace(SHORT, ranks=4, slow=[Slow(rank=2, ms=7.0)]), tmp_path / "run")
    found = json.loads(plan(folder, "--hosts", "1", "--hook", "none", "--json").stdout)
    [each] = found["predictions"]
    assert each["hook_ms"] == pytest.approx(4.0)  # four buckets are summed and spread
    assert each["step_ms"] == pytest.approx(found["recorded"]["step_ms"], rel=1e-3)


def test_ranks_without_shared_memory_have_recorded_no_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_seconds", lambda _: 5e-4)
    recorded = read_steps(write(replace(SHORT, transport="c10d"), tmp_path))
    assert {each.averaged for step in recorded.steps for each in step} == {0.0}
    [*work] = Calibration(recorded, Cluster((1,), 2, 1e9, 0.0)).work("none", 1)
    assert {(each.sum_seconds, each.spread_seconds, each.recorded_seconds) for each in work} == {
        (5e-4, 5e-4, 0.0)
    }


def test_one_rank_per_host_has_nothing_to_sum(folder: Path) -> None:
    work = Calibration(read_steps(folder), Cluster((2,), 1, 1e9, 0.0)).work("none", 2)
    assert {(each.sum_seconds, each.spread_seconds) for each in work} == {(0.0, 0.0)}


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (replace(SHORT, exchange="int8"), "recorded with int8: what that took in backward"),
        (
            replace(SHORT, ranks=4, hosts=[0, 0, 1, 1], skews=(0, 5), transport="shared memory and c10d"),
            "recorded on 2 hosts: what that took in backward",
        ),
    ],
)
def test_a_recording_with_a_hook_or_of_several_hosts_is_no_plain_one(
    tmp_path: Path, run: Run, words: str
) -> None:
    folder = write(run, tmp_path)
    assert words in plan(folder, "--hook", "none").output
    assert words in (folder / "plan.html").read_text()
    assert {each.averaged for step in read_steps(folder).steps for each in step} == {0.0}


def test_a_plain_recording_of_one_host_needs_no_words(folder: Path) -> None:
    assert read_steps(folder).notes == []


def test_gradients_of_all_buckets_are_not_kept_in_memory_at_once(folder: Path) -> None:
    costs = Calibration(read_steps(folder), Cluster((2,), 2, 1e9, 0.0))
    assert costs.work("fp16", 2)
    assert not any(vars(share).keys() & {"gradients", "parameters"} for share in costs._shares)


def test_the_terminal_shows_a_table_and_the_hook_to_take(folder: Path) -> None:
    result = plan(folder, "--hosts", "2,8", "--hook", "none,int8", "--link", "10Mbit")
    assert result.exit_code == 0, result.output
    assert re.search(r"^ *8 +int8 .*%$", result.output, re.MULTILINE)
    assert re.search(
        r"^8 hosts: take int8; a step takes \d+% of the next best \(none\)$", result.output, re.M
    )


def test_the_page_needs_nothing_from_outside(folder: Path) -> None:
    assert plan(folder, "--hook", "none,fp16").exit_code == 0
    page = (folder / "plan.html").read_text()
    assert page.count("<polyline") == 3 * 2
    assert page.count("<circle") == 3 * 2 * 4
    assert "{{" not in page
    assert not re.search(r"(src|href)=|url\(|https?:", page)


def test_numbers_of_hosts_do_not_overlap_on_the_page(folder: Path) -> None:
    assert plan(folder, "--hosts", "1,2,3,4,5,6,7,8,9,10,11,12", "--hook", "none").exit_code == 0
    found = re.findall(r'<text x="([\d.]+)" y="232" [^>]*>(\d+)<', (folder / "plan.html").read_text())
    chart = [(float(x), text) for x, text in found[: len(found) // 3]]
    assert {"1", "2", "3", "4"} <= {text for _, text in chart}
    assert all(right - left > 12 for (left, _), (right, _) in itertools.pairwise(chart))


def test_a_folder_that_cannot_be_written_to_has_a_plan_without_a_page(folder: Path) -> None:
    (folder / "plan.html").mkdir()
    result = plan(folder, "--hook", "none", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["predictions"]
    assert result.stderr.startswith("no page was written: ")
    assert result.stderr.count("\n") == 1
    asked = plan(folder, "--hook", "none", "--output", folder / "plan.html")
    assert asked.exit_code != 0


def test_a_page_in_a_folder_that_does_not_exist_is_one_line_that_names_it(folder: Path) -> None:
    page = folder / "missing" / "page.html"
    result = plan(folder, "--hook", "none", "-o", page)
    assert result.exit_code == 1
    words = f"no such folder (file: {page}, folder: {page.parent})"
    assert result.output == f"Error: the file cannot be made, because there is {words}\n"


def test_on_one_host_hooks_change_nothing(folder: Path) -> None:
    result = plan(folder, "--hosts", "1", "--json")
    found = json.loads(result.stdout)
    assert len({each["step_ms"] for each in found["predictions"]}) == 1
    assert found["choices"] == [{"hosts": 1, "hook": "none", "why": "on one host, hooks change nothing"}]


def test_one_host_is_not_hosts(folder: Path) -> None:
    assert plan(folder, "--hosts", "1", "--hook", "none").exit_code == 0
    assert "on 1 host takes" in (folder / "plan.html").read_text()


def test_a_modules_name_cannot_write_into_the_page(tmp_path: Path) -> None:
    folder = write(Run(ranks=2, steps=20, parameters=8, bucket_bytes=4096, module="<b>Net</b>"), tmp_path)
    assert plan(folder, "--hook", "none").exit_code == 0
    assert "<b>" not in (folder / "plan.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "0"], "a cluster has one host or more (hosts: 0)"),
        (
            ["--link", "10parsec"],
            "a link must be a number with a unit, such as 10Gbit (link: 10parsec; units:",
        ),
        (
            ["--latency", "soon"],
            "a latency must be a number with a unit, such as 50us (latency: soon; units:",
        ),
        (["--hook", "zip"], "a plan does not know this hook (hook: zip; known:"),
        (["--ranks-per-host", "0"], "a host has one rank or more (ranks per host: 0)"),
        (["--ranks-per-host", "two"], "ranks per host must be a whole number (ranks per host: two)"),
        (["--cores-per-host", "x"], "cores per host must be a whole number (cores per host: x)"),
    ],
)
def test_bad_options_are_one_line(folder: Path, arguments: list[str], words: str) -> None:
    result = plan(folder, *arguments)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {words}")
    assert result.output.count("\n") == 1


def test_a_recording_without_communication_is_one_line(tmp_path: Path) -> None:
    folder = write(Run(ranks=1, steps=20), tmp_path)
    result = plan(folder)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: the recording has no communication (folder: {folder}, ranks: 1)")
    assert result.output.count("\n") == 1


def test_a_wrapper_of_one_rank_does_not_hide_one_that_communicates(tmp_path: Path) -> None:
    write(replace(SHORT, ranks=1, module="Alone", group=[0], backward=90.0), tmp_path)
    write(replace(SHORT, steps=40, module="Together", wrapper=1), tmp_path)
    result = plan(tmp_path, "--hook", "none", "--json")
    found = json.loads(result.stdout)["recorded"]
    assert (found["module"], found["other_modules"]) == ("Together", ["Alone"])


def test_wrappers_that_are_not_in_the_plan_are_named(tmp_path: Path) -> None:
    write(replace(SHORT, module="Generator"), tmp_path)
    write(replace(SHORT, steps=40, module="[b]Critic\x1b", wrapper=1), tmp_path)
    words = "the plan is for Generator: what other wrappers exchange is not in it ([b]Critic"
    assert words + r"\x1b)" in plan(tmp_path, "--hook", "none").output
    assert words in (tmp_path / "plan.html").read_text()


def test_a_module_that_went_on_with_fewer_ranks_is_no_other_wrapper(tmp_path: Path) -> None:
    write(replace(SHORT, ranks=3), tmp_path)
    write(replace(SHORT, generation=1, first_step=101, start=9_000_000_000_000), tmp_path)
    assert read_steps(tmp_path).other_modules == []


def test_a_recording_in_join_says_that_its_exchange_between_hosts_is_left_out(tmp_path: Path) -> None:
    words = "recorded in join: what hosts tell each other there is not in the plan"
    joined, other = write(replace(SHORT, join=1.0), tmp_path / "a"), write(SHORT, tmp_path / "b")
    assert words in plan(joined, "--hook", "none").output
    assert words in (joined / "plan.html").read_text()
    assert words not in plan(other, "--hook", "none").output


def test_of_one_rank_without_steps_there_is_no_word_of_several(tmp_path: Path) -> None:
    write(replace(SHORT, ranks=3), tmp_path)
    for path in tmp_path.glob("rank1-*"):
        path.unlink()
    words = "rank 1 recorded no steps, and what it does is not in the plan"
    assert read_steps(tmp_path).notes == [words]


@pytest.mark.parametrize("has_files", [False, True])
def test_ranks_that_recorded_no_steps_are_named(tmp_path: Path, *, has_files: bool) -> None:
    write(replace(SHORT, ranks=4), tmp_path)
    for path in [each for rank in (1, 2) for each in tmp_path.glob(f"rank{rank}-*")]:
        if not has_files:
            path.unlink()
        elif path.suffix == ".rows":
            cells = array("q", path.read_bytes())
            cells[Header.ROWS] = cells[Header.SUMS] = 0
            path.write_bytes(cells.tobytes())
    words = "ranks 1 and 2 recorded no steps, and what they do is not in the plan"
    assert words in plan(tmp_path, "--hook", "none").output
    assert words in (tmp_path / "plan.html").read_text()
    found = json.loads(plan(tmp_path, "--hook", "none", "--json").stdout)
    assert found["recorded"]["missing_ranks"] == [1, 2]


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 62, 10**400])
def test_a_bucket_that_is_larger_than_the_memory_is_one_line(folder: Path, nbytes: int) -> None:
    for path in folder.glob("*.json"):
        description = json.loads(path.read_text())
        description["nbytes"][0] = nbytes
        path.write_text(json.dumps(description))
    result = plan(folder)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.output.count("\n") == 1
    if nbytes < 1 << 63:
        assert "a recorded bucket is larger than this machine's memory" in result.output


def test_too_little_memory_to_measure_hooks_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(torch, "randn", refuse)
    result = plan(folder, "--hook", "fp16")
    assert result.exit_code == 1
    assert "this machine has too little memory to measure what hooks cost" in result.output
    assert result.output.count("\n") == 1


def test_a_recording_of_few_steps_is_one_line(tmp_path: Path) -> None:
    result = plan(write(Run(ranks=2, steps=5), tmp_path))
    assert result.exit_code == 1
    assert "too few whole steps for a plan" in result.output
    assert result.output.count("\n") == 1


def test_steps_whose_times_cannot_be_are_left_out(tmp_path: Path) -> None:
    folder = write(Run(ranks=2, steps=20, parameters=8, bucket_bytes=4096), tmp_path)
    for path in folder.glob("rank*-plan1.rows"):
        cells = array("q", path.read_bytes())
        first = len(Header) + cells[Header.SUM_CAPACITY] * len(SumColumn)
        for row in range(10):
            cells[first + row * cells[Header.COLUMNS] + StepColumn.BACKWARD_END] = 1
        path.write_bytes(cells.tobytes())
    result = plan(folder, "--hook", "none,fp16", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["recorded"]["steps"] == 8
    assert all(0 < each["efficiency"] <= 1 for each in found["predictions"])


def test_pauses_are_no_stragglers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_seconds", lambda _: 1e-4)
    quiet = write(SHORT, tmp_path / "quiet")
    pauses = [PauseEvery(0, 450, 10, StepColumn.EVALUATION)]
    paused = write(replace(SHORT, pauses=pauses), tmp_path / "paused")
    options = "--hosts", "1,1024", "--hook", "none"
    expected, found = (json.loads(plan(folder, *options, "--json").stdout) for folder in (quiet, paused))
    for one, other in zip(expected["predictions"], found["predictions"], strict=True):
        assert other["step_ms"] == pytest.approx(one["step_ms"], rel=0.05)
    assert (expected["recorded"]["paused_steps"], expected["recorded"]["paused_ms"]) == (0, 0)
    # Ten steps before a pause, and ten in which the other rank waits; of the last one it is not known.
    assert found["recorded"]["paused_steps"] in (19, 20)
    assert found["recorded"]["paused_ms"] == pytest.approx(45, abs=1)
    assert "pauses add" not in plan(quiet, *options).output
    said = r"pauses add 4\d(\.\d+)? ms per step; they are not in the plan \(steps left out: (19|20)\)"
    assert re.search(f"^{said}$", plan(paused, *options).output, re.MULTILINE)
    assert re.search(said, (paused / "plan.html").read_text())


def test_a_recording_with_too_few_steps_between_pauses_says_so(tmp_path: Path) -> None:
    pauses = [PauseEvery(0, 450, 3, StepColumn.EVALUATION)]
    result = plan(write(replace(SHORT, steps=20, pauses=pauses), tmp_path))
    assert result.exit_code == 1
    assert re.search(r"too few whole steps .*, steps with pauses: 1[0-9]; at least 8", result.output)
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("bucket_bytes", [0, 16])  # none, or half an element of float32 per parameter
def test_parameters_may_be_empty_or_tiny(tmp_path: Path, bucket_bytes: int) -> None:
    folder = write(Run(ranks=2, steps=20, parameters=32, bucket_bytes=bucket_bytes), tmp_path)
    result = plan(folder, "--hosts", "1,2,8", "--hook", "none,fp16,int4,power_sgd,outer", "--json")
    assert result.exit_code == 0, result.output
    assert "NaN" not in result.stdout


def test_ranks_per_host_are_those_of_a_recorded_host(tmp_path: Path) -> None:
    run = Run(ranks=4, steps=20, parameters=8, bucket_bytes=4096, hosts=[0, 0, 1, 1], skews=(0, 5))
    folder = write(run, tmp_path)
    result = plan(folder, "--hook", "none", "--json")
    assert json.loads(result.stdout)["cluster"]["ranks_per_host"] == 2


def test_a_modules_name_may_be_no_text(tmp_path: Path) -> None:
    folder = write(Run(ranks=2, steps=20, parameters=8, bucket_bytes=4096, module="Net\ud800"), tmp_path)
    assert plan(folder, "--hook", "none").exit_code == 0
    assert "Net?" in (folder / "plan.html").read_text()


def test_a_folder_without_a_recording_is_one_line(tmp_path: Path) -> None:
    result = plan(tmp_path)
    assert result.exit_code == 1
    assert result.output.startswith("Error: there is no recording in the folder")
    assert result.output.count("\n") == 1
