"""The analysis of made-up recordings, of which the right answer is known."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from recordings import MIB, MS, Run, Slow, StepKind, write

from paceline.errors import RecordingError
from paceline.recording.reader import read_recording
from paceline.recording.rows import StepColumn, SumColumn
from paceline.tools.formatting import milliseconds
from paceline.tools.report.analysis import RunAnalysis, analyse
from paceline.tools.report.delays import SyncTimes, delays_against_others, own_backward_ends
from paceline.tools.report.stragglers import late_period
from paceline.tools.report.wrapper_runs import wrapper_runs
from paceline.tools.run.progress import read_progress

Analyse = Callable[[Run], RunAnalysis]


@pytest.fixture
def analysed(tmp_path: Path) -> Analyse:
    """The analysis of one made-up run."""
    return lambda run: analyse(wrapper_runs(read_recording(write(run, tmp_path)))[0])


def test_the_parts_of_a_step_are_those_that_it_had(analysed: Analyse) -> None:
    found = analysed(Run(ranks=2, steps=20, buffers=1.0))
    [first, second] = found.ranks
    assert first.parts == pytest.approx(
        {
            "gradient accumulation": 0,
            "buffer sync": 1.0,
            "forward": 8.0,
            "loss": 0.5,
            "backward": 20.0,
            "waiting for the slowest rank": 0.01,
            "exposed communication": 2.009,
            "assigning .grad": 0.2,
            "before optimizer": 0.1,
            "optimizer": 3.0,
            # Nothing follows the last of the 19 steps.
            "data loading and other": 2.0 * 18 / 19,
            "waiting in join": 0,
            "after optimizer": 0,
            "DataLoader": 0,
            "other wrappers": 0,
            "forward without gradients": 0,
            "torch.save": 0,
            "pauses": 0,
        },
        abs=0.02,
    )
    assert sum(second.parts.values()) == pytest.approx(second.step_ms[1], rel=1e-6)
    assert found.wall_ms == pytest.approx(found.mean_step_ms * 19)
    assert found.steps_per_second == pytest.approx(1000 / found.mean_step_ms)
    assert found.step_ms == pytest.approx((36.8, 36.7, 36.8), abs=0.05)
    assert (found.steps, found.detailed_steps) == (20, 19)
    assert (found.first_detailed_step, found.figures_from_step) == (1, 1)
    assert found.units_per_second == pytest.approx(2 * 32 / found.mean_step_ms * 1000, rel=0.01)
    assert found.stragglers == []


def test_the_mean_step_and_its_quartiles_are_of_the_same_steps(analysed: Analyse) -> None:
    # Three steps of each rank, of which the last is shorter because nothing follows it.
    found = analysed(Run(ranks=2, steps=4))
    for low, mean, high in (found.step_ms, *(rank.step_ms for rank in found.ranks)):
        assert low < mean < high


def test_the_step_is_one_number_and_its_parts_add_up_to_it(analysed: Analyse) -> None:
    # Times whose mean and median differ, on ranks that differ.
    found = analysed(Run(ranks=3, steps=60, jitter=2.0, slow=[Slow(1, 30, since=20, until=40)]))
    step = found.step_ms[1]
    assert sum(found.parts.values()) - found.parts["pauses"] == pytest.approx(step)
    assert f"A step takes {milliseconds(step)}" in found.summary
    for rank in found.ranks:
        assert sum(rank.parts.values()) - rank.parts["pauses"] == pytest.approx(rank.step_ms[1])


def test_communication_in_backward_is_overlap(analysed: Analyse) -> None:
    found = analysed(Run(ranks=2, steps=20, buckets=4, transfer=2.0))
    # Four buckets of 2 ms, of which the last is launched when backward ends.
    assert found.communication_ms == pytest.approx(8, abs=0.05)
    assert found.overlap == pytest.approx(0.75, abs=0.01)


def test_the_page_the_plot_and_the_live_line_have_the_same_overlap(analysed: Analyse, tmp_path: Path) -> None:
    # Between two buckets nothing is in flight.
    found = analysed(Run(ranks=2, steps=30, buckets=4, transfer=2.0))
    [run] = wrapper_runs(read_recording(tmp_path))
    sums = run.timelines[0].sums[-1]
    drawn = 1 - sums[SumColumn.WAIT_AFTER_BACKWARD] / sums[SumColumn.COMMUNICATION]
    live = read_progress(tmp_path)
    assert live is not None
    assert (live.overlap, drawn) == pytest.approx((found.overlap, found.overlap), abs=0.01)


def test_most_of_a_step_is_more_than_half_of_it(analysed: Analyse) -> None:
    found = analysed(Run(ranks=2, steps=20, buckets=8, transfer=1.0))
    assert re.search(r"ms, most of it in backward \(5[78]%\); 88% of the communication over", found.summary)


def test_the_largest_part_of_a_step_may_be_less_than_half(analysed: Analyse) -> None:
    found = analysed(Run(ranks=2, steps=20, buckets=8, transfer=1.0, forward=19.0))
    assert re.search(r"ms, the largest part in backward \(4[45]%\); 88% of", found.summary)


@pytest.mark.parametrize(
    ("long", "where", "kind"),
    [
        (Run(logging=80.0, loader=2.0), "after the optimizer", "between steps"),
        (Run(clipping=80.0), "before the optimizer", "before optimizer"),
        (Run(loss=80.0), "in the loss", "loss"),
        (Run(loader=80.0), "in the DataLoader", "data"),
        (Run(data=80.0), "between the optimizer and the next forward", "between steps"),
    ],
    ids=["logging", "clipping", "loss", "loader", "data"],
)
def test_what_takes_most_of_a_step_outside_of_the_module_has_advice(
    analysed: Analyse, long: Run, where: str, kind: str
) -> None:
    found = analysed(replace(long, ranks=2))
    assert re.search(rf", most of it {where} \(\d\d%\); ", found.summary)
    assert [each.kind for each in found.suggestions] == [kind]


def test_of_a_straggler_that_is_slow_before_the_optimizer_there_is_one_suggestion(
    analysed: Analyse,
) -> None:
    found = analysed(Run(ranks=2, steps=60, slow=[Slow(1, 60, part="loss")]))
    assert found.summary.endswith("it is slow in the loss.")
    [advice] = found.suggestions
    assert advice.change == "Rank 1 is a straggler: see what its code does in the loss"
    assert advice.evidence.endswith("60.0 ms more in the loss")


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (Run(ranks=2, buckets=1), "all gradients are in one bucket, which is full only when backward ends"),
        (Run(ranks=2, buckets=2, stuck=0), "the first bucket is full only when backward ends"),
        (Run(ranks=2, buckets=4), ""),
        (Run(ranks=1, buckets=1), ""),
    ],
    ids=["one bucket", "late first bucket", "overlap", "no communication"],
)
def test_if_nothing_is_hidden_behind_backward_there_is_a_reason(
    analysed: Analyse, run: Run, why: str
) -> None:
    found = analysed(replace(run, steps=20, transfer=1.0))
    assert found.why_no_overlap == why
    assert (f"because {why}" in found.summary) == bool(why)


def test_a_rank_that_becomes_a_straggler_is_found_with_its_figures(analysed: Analyse) -> None:
    found = analysed(Run(ranks=4, steps=600, jitter=0.02, slow=[Slow(2, 12, since=300)]))
    [late] = found.stragglers
    assert (late.rank, late.slow_part) == (2, "backward")
    assert (late.first_step, late.last_step, late.first_step_error) == (300, None, 0)
    assert late.late_ms == pytest.approx(12.12, abs=0.3)
    assert late.slow_part_ms == pytest.approx(12.12, abs=0.3)
    assert late.last_share == 1.0
    assert late.step_ms - (late.other_step_ms or 0) == pytest.approx(12.1, abs=0.4)
    assert found.figures_from_step == 300
    assert "Rank 2 has been a straggler since step 300: 12.1 ms behind the other ranks" in found.summary
    assert found.summary.endswith("which wait for it; it is slow in backward.")
    assert [each.kind for each in found.suggestions] == ["straggler"]


@pytest.mark.parametrize(
    ("part", "named"),
    [("data", "data loading and other"), ("forward", "forward"), ("optimizer", "optimizer")],
)
def test_the_part_in_which_a_straggler_is_slow_is_named(analysed: Analyse, part: str, named: str) -> None:
    [late] = analysed(Run(ranks=3, steps=60, slow=[Slow(1, 9, part=part)])).stragglers
    assert (late.rank, late.slow_part) == (1, named)
    assert late.late_ms == pytest.approx(9, abs=0.1)


def test_slow_data_of_one_rank_is_a_suggestion_for_that_rank_only(analysed: Analyse) -> None:
    found = analysed(Run(ranks=2, steps=60, slow=[Slow(1, 200, part="data")]))
    assert found.parts["data loading and other"] > 0.25 * found.step_ms[1]
    assert [each.kind for each in found.suggestions] == ["straggler"]


def test_a_rank_that_is_late_at_the_start_of_forward_is_found_there(analysed: Analyse) -> None:
    found = analysed(
        Run(ranks=3, steps=100, buffers=0.5, jitter=0.02, slow=[Slow(1, 9, since=40, part="data")])
    )
    [late] = found.stragglers
    # The data that follows step 40 makes it late in the next one.
    assert (late.rank, late.first_step, late.slow_part) == (1, 41, "data loading and other")
    assert late.sync_point == "the start of forward"
    assert [round(each.last_share) for each in found.delays] == [0, 1, 0]
    assert late.late_ms == pytest.approx(9.1, abs=0.2)
    assert found.parts["buffer sync"] == pytest.approx(6.5, abs=0.3)
    assert [each.kind for each in found.suggestions] == ["straggler"]


def test_a_rank_that_was_a_straggler_for_a_time_is_found_with_the_last_step(analysed: Analyse) -> None:
    found = analysed(Run(ranks=3, steps=400, jitter=0.02, slow=[Slow(1, 10, since=100, until=200)]))
    [late] = found.stragglers
    assert (late.rank, late.first_step, late.last_step) == (1, 100, 199)
    assert found.figures_from_step == 1
    assert not any(each.kind == "straggler" for each in found.suggestions)


def test_without_an_optimizer_of_torch_time_after_backward_is_not_data_loading(analysed: Analyse) -> None:
    found = analysed(Run(ranks=2, steps=40, optimizer_every=1000, data=60))
    assert "most of it between backward and the next forward (6" in found.summary
    assert [each.kind for each in found.suggestions] == ["between steps"]


@pytest.mark.parametrize(("since", "is_told"), [(4, False), (8, False), (9, True), (40, True)])
def test_steps_before_a_straggler_have_a_time_if_they_are_not_few(
    analysed: Analyse, since: int, *, is_told: bool
) -> None:
    found = analysed(Run(ranks=2, steps=100, slow=[Slow(1, 30, since=since)]))  # the first step is left out
    [late] = found.stragglers
    assert late.first_step == since
    assert (late.other_step_ms is not None) == is_told
    assert (" ms before)" in found.summary) == is_told


@pytest.mark.parametrize("steps", [2, 3, 8])
def test_in_few_steps_nobody_is_a_straggler(analysed: Analyse, steps: int) -> None:
    found = analysed(Run(ranks=2, steps=steps, slow=[Slow(1, 50)]))
    assert found.stragglers == []


def test_ranks_that_only_vary_are_no_stragglers(analysed: Analyse) -> None:
    assert analysed(Run(ranks=4, steps=300, jitter=0.2)).stragglers == []


@pytest.fixture
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings that have 16 rows and 64 sums."""
    monkeypatch.setattr("paceline.recording.ring_buffer._BYTES_OF_ROWS", 0)
    monkeypatch.setattr("paceline.recording.ring_buffer._SUMS", 64)


@pytest.mark.usefixtures("small_rings")
def test_over_a_long_run_the_straggler_is_the_one_that_waits_least(analysed: Analyse) -> None:
    found = analysed(Run(ranks=2, steps=900, slow=[Slow(0, 15, since=330)]))
    assert (found.steps, found.detailed_steps, found.first_detailed_step) == (900, 16, 884)
    [late] = found.stragglers
    assert (late.rank, late.slow_part) == (0, "backward")
    assert (late.last_step, late.first_step_error) == (None, 15)
    assert late.late_ms == pytest.approx(15, abs=0.1)
    assert abs(late.first_step - 330) <= late.first_step_error


@pytest.mark.usefixtures("small_rings")
def test_a_straggler_before_the_detailed_steps_is_found_in_the_sums(analysed: Analyse) -> None:
    [late] = analysed(Run(ranks=3, steps=900, slow=[Slow(1, 15, since=200, until=500)])).stragglers
    assert (late.rank, late.slow_part) == (1, None)
    assert abs(late.first_step - 200) <= late.first_step_error
    assert late.last_step is not None
    assert abs(late.last_step - 499) <= late.first_step_error


@pytest.mark.usefixtures("small_rings")
def test_waits_for_buffers_count_in_the_sums(analysed: Analyse) -> None:
    slow = Slow(1, 15, since=200, until=500, part="data")
    [late] = analysed(Run(ranks=3, steps=900, buffers=0.5, slow=[slow])).stragglers
    assert late.rank == 1
    assert late.late_ms == pytest.approx(15, abs=1)
    assert abs(late.first_step - 200) <= late.first_step_error + 1


def test_stragglers_on_hosts_with_other_clocks_are_found_by_waits(analysed: Analyse) -> None:
    skews = [0, 7_000_000_000 * MS]
    run = Run(ranks=4, steps=200, hosts=[0, 0, 1, 1], skews=skews, drift=500, slow=[Slow(3, 5, since=50)])
    found = analysed(run)
    [late] = found.stragglers
    assert (late.rank, late.first_step) == (3, 50)
    assert late.late_ms == pytest.approx(5, abs=0.1)
    assert found.run["hosts"] == 2
    # A bucket takes 2 ms, and the offset cannot be known better.
    assert found.clock_uncertainty_us is not None
    assert 1900 < found.clock_uncertainty_us < 4000


def test_clocks_of_hosts_are_aligned(tmp_path: Path) -> None:
    skew = -3_600_000 * MS
    run = Run(ranks=2, steps=200, hosts=[0, 1], skews=[0, skew], drift=2000)
    [aligned] = wrapper_runs(read_recording(write(run, tmp_path)))
    here, there = aligned.timelines
    assert aligned.clock_uncertainty is not None
    for column in (StepColumn.BEGIN, StepColumn.BACKWARD_END, StepColumn.ALL_REDUCED):
        wrong = [abs(a - b) for a, b in zip(here[column], there[column], strict=True)]
        assert max(wrong) < aligned.clock_uncertainty


def test_a_bucket_waits_for_its_last_parameter_or_for_that_of_an_earlier_one(analysed: Analyse) -> None:
    found = analysed(Run(ranks=2, steps=30, buckets=4, parameters=8, stuck=1))
    assert [each.last_parameter for each in found.buckets] == [
        f"layers.{slot}.weight" for slot in (6, 4, 2, 0)
    ]
    assert [each.queued_behind for each in found.buckets] == [None, None, 1, None]
    queued = found.buckets[2]
    assert queued.queued_behind_parameter == "layers.4.weight"
    assert queued.queued_ms == pytest.approx(5, abs=0.05)
    assert queued.ranks[0].ready == pytest.approx(15, abs=0.01)
    assert queued.ranks[1].launch == pytest.approx(20, abs=0.05)


def test_steps_without_inputs_lost_steps_and_ranks_without_a_recording_are_counted(tmp_path: Path) -> None:
    kinds = {(step, 1): StepKind.NO_INPUTS for step in range(90, 100)} | {
        (40, rank): StepKind.LOST for rank in range(3)
    }
    write(Run(ranks=3, steps=100, kinds=kinds), tmp_path)
    for path in tmp_path.glob("rank2-*"):
        path.unlink()
    found = analyse(wrapper_runs(read_recording(tmp_path))[0])
    assert (found.steps_without_inputs, found.lost_steps, list(found.missing_ranks)) == (10, 1, [2])
    assert {each.kind for each in found.suggestions} >= {"uneven", "lost"}


def test_each_wrapper_has_a_run_and_the_one_with_most_time_is_first(tmp_path: Path) -> None:
    write(Run(ranks=4, steps=20, module="Critic", wrapper=0, group=[2, 3]), tmp_path)
    # Ranks of the first group have no other wrapper, so the second has another number on them.
    write(Run(ranks=4, steps=20, module="Actor", wrapper=1, group=[2, 3], backward=90), tmp_path)
    write(Run(ranks=4, steps=20, module="Actor", wrapper=0, group=[0, 1], backward=50), tmp_path)
    found = wrapper_runs(read_recording(tmp_path))
    assert [(each.module, list(each.group)) for each in found] == [
        ("Actor", [2, 3]),
        ("Actor", [0, 1]),
        ("Critic", [2, 3]),
    ]
    assert [len(each.timelines) for each in found] == [2, 2, 2]


def test_wrappers_of_one_class_have_numbers_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
    write(Run(module="Sequential", parameters=8), tmp_path)
    write(Run(module="Sequential", parameters=32, wrapper=1, backward=80.0), tmp_path)
    write(Run(module="Net", wrapper=2, backward=1.0), tmp_path)
    runs = wrapper_runs(read_recording(tmp_path))
    named = [(run.module, len(run.description["slots"])) for run in runs]
    assert named == [("Sequential (2)", 32), ("Sequential (1)", 8), ("Net", 16)]


def test_averages_that_no_optimizer_uses_are_told(analysed: Analyse) -> None:
    [found] = analysed(Run(steps=40, optimizer_every=2)).suggestions
    assert found.kind == "unused averages"
    assert found.evidence.startswith("no optimizer stepped after 5")
    assert analysed(Run(steps=40)).suggestions == []


def test_a_wrapper_that_ranks_number_differently_is_one_run(tmp_path: Path) -> None:
    write(Run(ranks=2, steps=5), tmp_path)
    for path in tmp_path.glob("rank1-wrapper0-*.json"):
        path.with_suffix(".rows").rename(str(path.with_suffix(".rows")).replace("wrapper0", "wrapper3"))
        path.with_name(path.name.replace("wrapper0", "wrapper3")).write_text(
            path.read_text().replace('"wrapper": 0', '"wrapper": 3')
        )
        path.unlink()
    [joined] = wrapper_runs(read_recording(tmp_path))
    assert [timeline.rank for timeline in joined.timelines] == [0, 1]


def test_a_recording_without_steps_is_an_error(tmp_path: Path) -> None:
    write(Run(ranks=2, steps=0), tmp_path)
    with pytest.raises(RecordingError, match="no step was recorded"):
        wrapper_runs(read_recording(tmp_path))


def test_each_rank_is_compared_with_the_median_of_the_others() -> None:
    assert delays_against_others([10, 12, 11, 50]) == [-2, 1, -1, 39]
    assert delays_against_others([10, 13]) == [-3, 3]
    assert delays_against_others([5, 5, 5]) == [0, 0, 0]
    assert delays_against_others([7]) == [0]


@pytest.mark.parametrize(
    ("ranks", "ends"),
    [
        ([(0, 1, 10), (0, 51, 60), (50, 51, 60)], [10, 10, 59]),
        ([(50, 51, 60), (0, 51, 60), (0, 51, 60)], [60, 60, 60]),
        ([(50, 51, 60), (0, 51, 90), (0, 51, 60)], [60, 90, 60]),
        ([(0, 0, 10), (0, 0, 60), (50, 50, 60)], [10, 60, 60]),
    ],
    ids=["one waits for the late rank", "all wait for it", "one waits and is slow", "no buffers"],
)
def test_a_delay_that_was_passed_on_with_the_buffers_does_not_count(
    ranks: list[tuple[int, int, int]], ends: list[int]
) -> None:
    assert own_backward_ends([SyncTimes(*each) for each in ranks]) == ends


def test_the_late_period_is_where_delays_add_up() -> None:
    assert late_period([0.0] * 30 + [5.0] * 20, 1) == (30, 50)
    assert late_period([0.0] * 30 + [5.0] * 20 + [0.0] * 9, 1) == (30, 50)
    assert late_period([0.0] * 30 + [500.0] + [0.0] * 20, 1) is None
    assert late_period([5.0] * 9 + [0.0] + [5.0] * 9, 1) == (0, 19)
    assert late_period([0.0] * 30 + [5.0] * 20 + [0.0] * 9, 1, fewest_over=21) is None
    assert late_period([0.0] * 30 + [5.0] * 20 + [0.0] * 7, 1, fewest_over=21) == (30, 50)
    assert late_period([0.0, 0.0, 5.0] * 30, 1) is None
    assert late_period([], 1) is None


def test_bytes_and_caps_are_those_of_the_run(analysed: Analyse) -> None:
    found = analysed(Run(ranks=2, steps=4, bucket_bytes=2 * MIB))
    assert found.run["nbytes"] == 8 * MIB
    assert [plan.steps for plan in found.plans] == [1, 3]
