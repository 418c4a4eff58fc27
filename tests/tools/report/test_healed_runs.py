"""The report of a run in which ranks were lost, and replaced or left out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import MS, Run, Slow, StepKind, write, write_healed

from paceline.recording.healings import Healing, healings_file, write_healing
from paceline.recording.ledger import LedgerWriter, ledger_files
from paceline.recording.reader import PlanRecording, read_recording
from paceline.recording.rows import BucketColumn, StepColumn, row_width
from paceline.tools.main import main
from paceline.tools.report.analysis import analyse, analyse_recording
from paceline.tools.report.html_page import html_page
from paceline.tools.report.perfetto_trace import write_trace
from paceline.tools.report.run_history import healing_words
from paceline.tools.report.wrapper_runs import WrapperRun, wrapper_runs
from paceline.tools.run.progress import read_progress

RUN = Run(ranks=4, steps=60)


def runs_in(folder: Path) -> list[WrapperRun]:
    return wrapper_runs(read_recording(folder))


def paceline(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_generations_of_a_run_are_one_timeline_per_rank(tmp_path: Path) -> None:
    [run] = runs_in(write_healed(RUN, tmp_path, [(20, 2), (40, 0)]))
    assert [timeline.rank for timeline in run.timelines] == [0, 1, 2, 3]
    later = [*range(20, 41), *range(40, 60)]
    assert run.timelines[1][StepColumn.STEP] == [*range(1, 21), *later]
    # The killed process had not ended its last step.
    assert run.timelines[2][StepColumn.STEP] == [*range(1, 20), *later]
    assert run.timelines[2].last_rows == [18, 39, 59]
    # The first step of a generation has a plan of its own.
    assert run.timelines[2].bucket(3, BucketColumn.READY)[19] == 0
    assert run.timelines[2].bucket(3, BucketColumn.READY)[20] > 0
    assert [(plan.number, plan.steps, plan.buckets) for plan in run.plans] == [(0, 3, 1), (1, 59, 4)]
    assert run.missing == []


def test_the_pause_between_two_generations_is_no_part_of_a_step(tmp_path: Path) -> None:
    [(run, analysis)] = analyse_recording(write_healed(RUN, tmp_path, [(20, 2)], pause=5000))
    assert max(max(timeline.step_times) for timeline in run.timelines) < 100 * MS
    assert analysis.parts["data loading and other"] == pytest.approx(2, abs=0.1)
    assert analysis.stragglers == []


def test_lost_steps_are_marked_and_need_no_suggestion_if_they_were_done_again(tmp_path: Path) -> None:
    [(run, analysis)] = analyse_recording(write_healed(RUN, tmp_path, [(20, 2), (40, 0)]))
    assert (analysis.lost_steps, analysis.steps_done_again) == (2, 2)
    assert not any(each.kind == "lost" for each in analysis.suggestions)
    survivor = run.timelines[1]
    lost = [
        step
        for step, kind in zip(survivor[StepColumn.STEP], survivor[StepColumn.KIND], strict=True)
        if kind & StepKind.LOST
    ]
    assert lost == [20, 40]
    assert run.common_steps == [*range(1, 60)]


def test_steps_after_a_checkpoint_are_lost_when_ranks_go_back_to_it(tmp_path: Path) -> None:
    write(replace(RUN, steps=30), tmp_path)
    write(replace(RUN, generation=1, first_step=20, start=9_000_000 * MS), tmp_path)
    [(run, analysis)] = analyse_recording(tmp_path)
    assert (analysis.lost_steps, analysis.steps_done_again) == (10, 10)
    assert run.common_steps == [*range(1, 80)]
    rows = [
        timeline[StepColumn.BEGIN][row]
        for timeline, [*_, row] in zip(run.timelines, run.common_rows, strict=True)
    ]
    assert all(begin > 9_000_000 * MS for begin in rows)


def test_a_straggler_is_found_across_generations(tmp_path: Path) -> None:
    run = replace(RUN, steps=200, slow=[Slow(1, 15, since=90)])
    [(_, analysis)] = analyse_recording(write_healed(run, tmp_path, [(60, 2), (120, 0)]))
    [late] = analysis.stragglers
    assert (late.rank, late.first_step, late.last_step) == (1, 90, None)


def test_a_process_on_another_host_has_its_own_clock(tmp_path: Path) -> None:
    skews = [0, 5_000_000 * MS]
    write(Run(ranks=2, steps=40, hosts=[0, 0], skews=skews, killed=[1]), tmp_path)
    start = 1_003_000 * MS
    write(
        Run(ranks=2, steps=40, hosts=[0, 1], skews=skews, generation=1, first_step=39, start=start), tmp_path
    )
    [(run, analysis)] = analyse_recording(tmp_path)
    here, there = run.timelines
    assert [rank.host for rank in analysis.ranks] == ["node-0", "node-0, node-1"]
    assert analysis.run["hosts"] == 2
    wrong = [abs(here[StepColumn.BEGIN][-20 + row] - there[StepColumn.BEGIN][-20 + row]) for row in range(20)]
    assert run.clock_uncertainty is not None
    assert max(wrong) < 4 * MS
    assert there[StepColumn.BEGIN] == sorted(there[StepColumn.BEGIN])


def shrink(folder: Path) -> Path:
    """Rank 1 of four is lost and not replaced; later a fourth rank comes back."""
    for generation, (ranks, first, steps) in enumerate([(4, 0, 31), (3, 30, 40), (4, 70, 60)]):
        start = (1_000_000 + 10_000 * generation) * MS
        killed = [1] if generation == 0 else []
        run = Run(
            ranks=ranks, steps=steps, first_step=first, generation=generation, start=start, killed=killed
        )
        write(run, folder)
    return folder


def test_if_a_rank_is_not_replaced_the_others_are_another_run(tmp_path: Path) -> None:
    four, three = analyse_recording(shrink(tmp_path))
    assert [list(run.group) for run, _ in (four, three)] == [[0, 1, 2, 3], [0, 1, 2]]
    assert [analysis.steps for _, analysis in (four, three)] == [91, 40]
    assert four[0].timelines[0][StepColumn.STEP] == [*range(1, 31), *range(70, 130)]
    assert three[0].timelines[0][StepColumn.STEP] == [*range(30, 70)]
    assert [each.steps_done_again for _, each in (four, three)] == [1, 0]
    assert not four[0].missing
    assert not three[0].missing
    assert "</html>" in html_page([four, three])


def test_the_status_line_is_of_the_ranks_that_are_left(tmp_path: Path) -> None:
    write(Run(ranks=4, steps=31, killed=[3]), tmp_path)
    write(Run(ranks=3, steps=40, first_step=30, generation=1, start=1_010_000 * MS), tmp_path)
    progress = read_progress(tmp_path)
    assert progress is not None
    assert progress.step == 69


def recording(plan: int, steps: range, rank: int = 0) -> PlanRecording:
    described = {
        "rank": rank, "world": 1, "group": [0], "module": "Net", "wrapper": 0, "plan": plan, "boot": "x",
        "slots": ["a"], "nbytes": [4], "buckets": [{"slots": [0], "nbytes": 4}], "exchange": "average",
        "epoch": 0,
    }  # fmt: skip
    rows = [[step, 0, 100 * plan + step + 1, *[0] * (row_width(1) - 3)] for step in steps]
    return PlanRecording(described, rows, [], len(rows))


def test_without_a_new_generation_the_same_plan_is_not_put_together() -> None:
    """A wrapper that changes its group counts its steps anew."""
    [run] = wrapper_runs([recording(0, range(5)), recording(2, range(3))])
    assert run.timelines[0][StepColumn.STEP] == [0, 1, 2, 3, 4]
    assert run.steps_of_kind(StepKind.LOST) == 0


def test_other_wrappers_of_a_healed_run_stay_apart(tmp_path: Path) -> None:
    write_healed(RUN, tmp_path, [(20, 2)])
    write_healed(replace(RUN, wrapper=1, backward=5), tmp_path, [(20, 2)])
    first, second = runs_in(tmp_path)
    assert len(first.timelines[0]) == len(second.timelines[0]) == 60


cells = st.one_of(st.just(0), st.integers(-(2**62), 2**62), st.integers(0, 10**9))
DESCRIPTION = {
    "version": 3, "world": 2, "module": "Net", "wrapper": 0,
    "slots": ["a", "b"], "nbytes": [4, 4], "first_cap": 1, "cap": 1,
    "backend": "gloo", "transport": "c10d", "hosts": 1, "device": "cpu",
    "unit": "samples", "host": "here", "pid": 1, "epoch": 0,
}  # fmt: skip
BUCKETS = [[{"slots": [1, 0], "nbytes": 8}], [{"slots": [1], "nbytes": 4}, {"slots": [0], "nbytes": 4}]]


@st.composite
def any_recording(draw: st.DrawFn) -> PlanRecording:
    described = {
        **DESCRIPTION,
        "rank": draw(st.integers(0, 1)),
        "plan": draw(st.sampled_from([0, 1, 100, 101, 205])),
        "group": draw(st.sampled_from([[0, 1], [0, 1, 2]])),
        "boot": draw(st.sampled_from(["x", "y"])),
        "exchange": draw(st.sampled_from(["average", "a hook"])),
        "buckets": draw(st.sampled_from(BUCKETS)),
    }
    width = row_width(len(described["buckets"]))
    rows = draw(st.lists(st.lists(cells, min_size=width, max_size=width), max_size=4))
    return PlanRecording(described, rows, [], len(rows))


@settings(deadline=None, max_examples=100)
@given(st.lists(any_recording(), max_size=7, unique_by=lambda each: (each.rank, each.plan)))
def test_there_is_a_page_whatever_the_generations_are(recordings: list[PlanRecording]) -> None:
    if any(each.rows for each in recordings):
        assert "</html>" in html_page([(run, analyse(run)) for run in wrapper_runs(recordings)])


def count(folder: Path, *, forgotten: int | None = None) -> None:
    """A ledger of two epochs of 8 samples, each with two steps of two shards."""
    writer = LedgerWriter(folder, rank=0, epoch_samples=8)
    for step in range(4):
        first = 4 * (step % 2)
        shards = {0: [first, first + 1], 1: [first + 2, first + 3]}
        taken = {shard: own for shard, own in shards.items() if (step, shard) != (2, forgotten)}
        writer.took(epoch=step // 2, step=step, generation=0, samples=taken)
        writer.counted(step=step, generation=0)
    writer.close()


def test_terminal_json_and_page_tell_healings_and_samples(tmp_path: Path) -> None:
    write_healed(RUN, tmp_path, [(20, 2), (40, 0)])
    count(tmp_path)
    healed = "healed 2 times: rank 2 at step 20 (SIGKILL), 0.7 s; rank 0 at step 40 (SIGKILL), 0.7 s"
    samples = "every sample counted once: 2 epochs, 16 samples, 4 steps"
    told = paceline(tmp_path).output
    assert healed in told
    assert samples in told
    [found] = json.loads(paceline(tmp_path, "--json").stdout)
    assert (found["history"]["healed"], found["history"]["samples"]) == (healed, samples)
    assert found["history"]["healings"][1]["lost"] == [[0, "SIGKILL"]]
    assert found["history"]["ledger"]["epochs"] == 2
    page = (tmp_path / "report.html").read_text("utf-8")
    assert healed in page
    assert samples in page


def test_what_is_wrong_with_the_samples_is_told(tmp_path: Path) -> None:
    write(Run(ranks=1, steps=4), tmp_path)
    count(tmp_path, forgotten=1)
    told = paceline(tmp_path).output
    assert "the samples did not count once each; no rank took shard 1 of step 2" in told
    assert "healed" not in told
    assert "epoch 1 is not complete (6 samples)" in told


def test_of_a_run_without_healings_and_ledger_nothing_is_told(tmp_path: Path) -> None:
    write(Run(ranks=1, steps=4), tmp_path)
    told = paceline(tmp_path).output
    assert "healed" not in told
    assert "counted" not in told


def test_healings_have_words_for_one_rank_or_several_and_for_how_many_are_left() -> None:
    first = Healing(1, 1812, 4, [(2, "SIGKILL")], 0, 12.34)
    both = Healing(2, 1900, 2, [(1, "SIGKILL"), (3, "SIGKILL")], 0, 0.002)
    other = Healing(3, 1900, 3, [(0, "exit code 1"), (1, "SIGSEGV")], 0, 0.7)
    nobody = Healing(4, 2000, 3, [], 0, 1.0)
    assert healing_words([first, both, other, nobody], 4) == [
        "rank 2 at step 1,812 (SIGKILL), 12.3 s",
        "ranks 1, 3 at step 1,900 (SIGKILL), 2.00 ms, then 2 ranks",
        "ranks 0 and 1 at step 1,900 (exit code 1, SIGSEGV), 0.7 s, then 3 ranks",
        "step 2,000, 1.0 s",
    ]


def test_many_healings_are_named_in_part(tmp_path: Path) -> None:
    write(Run(ranks=2, steps=4), tmp_path)
    for generation in range(1, 12):
        write_healing(tmp_path, Healing(generation, generation, 2, [(1, "\x1b[31m")], 0, 1.0))
    told = paceline(tmp_path).output
    assert r"healed 11 times: rank 1 at step 1 (\x1b[31m), 1.0 s; " in told
    assert "; and 3 more" in told


@pytest.mark.parametrize("path", [healings_file, lambda folder: ledger_files(folder)[0]])
def test_a_damaged_history_is_an_error_that_names_the_file(tmp_path: Path, path: object) -> None:
    write_healed(RUN, tmp_path, [(20, 2)])
    count(tmp_path)
    damaged = path(tmp_path)
    damaged.write_text(damaged.read_text() + "{}\n")
    result = paceline(tmp_path)
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)
    assert result.output.startswith("Error: ")
    assert f"{damaged.name}, line" in result.output
    assert result.output.count("\n") == 1


def test_a_healed_run_has_a_trace(tmp_path: Path) -> None:
    runs = runs_in(write_healed(RUN, tmp_path, [(20, 2)]))
    write_trace(runs, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    arrows = [each["id"] for each in events if each["ph"] == "s"]
    assert len(arrows) == len({*arrows})
