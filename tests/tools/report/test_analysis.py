"""What is found in recordings of runs whose truth is known."""

from collections.abc import Callable
from pathlib import Path

import pytest
from recordings import MIB, MS, Kind, Run, Slow, write

from paceline.errors import RecordingError
from paceline.recording.reader import read
from paceline.recording.rows import Column
from paceline.tools.report.analysis import Findings, analyse
from paceline.tools.report.lateness import behind, stretch
from paceline.tools.report.runs import sections

Find = Callable[..., Findings]


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """The findings of one made-up run."""
    return lambda run: analyse(sections(read(write(run, tmp_path)))[0])


def test_a_step_goes_where_it_was_spent(find: Find) -> None:
    found = find(Run(ranks=2, steps=20, buffers=1.0))
    [first, second] = found.ranks
    assert first.parts == pytest.approx(
        {
            "earlier passes": 0,
            "module buffers": 1.0,
            "forward": 8.0,
            "loss": 0.5,
            "backward": 20.0,
            "waiting for the last rank": 0.01,
            "exposed communication": 2.009,
            "handing out": 0.2,
            "after backward": 0.1,
            "optimizer": 3.0,
            "data and the rest": 2.0,
        },
        abs=0.02,
    )
    assert sum(second.parts.values()) == pytest.approx(second.step[1], rel=1e-6)
    assert found.step_ms == pytest.approx((36.8, 36.8, 36.8), abs=0.05)
    assert (found.steps, found.recorded, found.first, found.since) == (20, 19, 1, 1)
    assert found.rate == pytest.approx(2 * 32 / found.mean_ms * 1000, rel=0.01)
    assert found.late == []


def test_what_was_under_way_in_backward_is_hidden(find: Find) -> None:
    found = find(Run(ranks=2, steps=20, buckets=4, transfer=2.0))
    # Four buckets of 2 ms, of which the last leaves when backward ends.
    assert found.under_way_ms == pytest.approx(8, abs=0.05)
    assert found.hidden == pytest.approx(0.75, abs=0.01)


def test_a_rank_that_becomes_late_is_found_with_its_figures(find: Find) -> None:
    found = find(Run(ranks=4, steps=600, jitter=0.02, slow=[Slow(2, 12, since=300)]))
    [late] = found.late
    assert (late.rank, late.since, late.until, late.give, late.part) == (2, 300, None, 0, "backward")
    assert late.late_ms == pytest.approx(12.12, abs=0.3)
    assert late.part_ms == pytest.approx(12.12, abs=0.3)
    assert late.last == 1.0
    assert late.step_ms - (late.other_ms or 0) == pytest.approx(12.1, abs=0.4)
    assert found.since == 300
    assert "Rank 2 has been late by 12" in found.verdict
    assert "since step 300" in found.verdict
    assert [each.kind for each in found.suggestions] == ["late"]


@pytest.mark.parametrize(
    ("part", "named"),
    [("data", "data and the rest"), ("forward", "forward"), ("optimizer", "optimizer")],
)
def test_what_a_late_rank_is_slow_at_is_named(find: Find, part: str, named: str) -> None:
    [late] = find(Run(ranks=3, steps=60, slow=[Slow(1, 9, part=part)])).late
    assert (late.rank, late.part) == (1, named)
    assert late.late_ms == pytest.approx(9, abs=0.1)


def test_data_that_one_rank_waits_for_is_told_of_that_rank_alone(find: Find) -> None:
    found = find(Run(ranks=2, steps=60, slow=[Slow(1, 200, part="data")]))
    assert found.parts["data and the rest"] > 0.25 * found.step_ms[1]
    assert [each.kind for each in found.suggestions] == ["late"]


def test_a_rank_that_others_meet_late_before_forward_is_found_there(find: Find) -> None:
    found = find(Run(ranks=3, steps=100, buffers=0.5, jitter=0.02, slow=[Slow(1, 9, since=40, part="data")]))
    [late] = found.late
    # What came after step 40 makes it late in the next one.
    assert (late.rank, late.since, late.part) == (1, 41, "data and the rest")
    assert late.where == "the start of forward"
    assert [round(each.last) for each in found.arrivals] == [0, 1, 0]
    assert late.late_ms == pytest.approx(9.1, abs=0.2)
    assert found.parts["module buffers"] == pytest.approx(6.5, abs=0.3)
    assert [each.kind for each in found.suggestions] == ["late"]


def test_a_rank_that_was_late_for_a_time_is_found_with_its_end(find: Find) -> None:
    found = find(Run(ranks=3, steps=400, jitter=0.02, slow=[Slow(1, 10, since=100, until=200)]))
    [late] = found.late
    assert (late.rank, late.since, late.until) == (1, 100, 199)
    assert found.since == 1
    assert not any(each.kind == "late" for each in found.suggestions)


def test_ranks_that_are_only_uneven_are_not_late(find: Find) -> None:
    assert find(Run(ranks=4, steps=300, jitter=0.2)).late == []


@pytest.fixture
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings that have 16 whole rows, and 64 sums, of so many steps as must be."""
    monkeypatch.setattr("paceline.recording.ring._BYTES_OF_ROWS", 0)
    monkeypatch.setattr("paceline.recording.ring._SUMS", 64)


@pytest.mark.usefixtures("small_rings")
def test_over_a_long_run_the_late_rank_is_the_one_that_waits_least(find: Find) -> None:
    found = find(Run(ranks=2, steps=900, slow=[Slow(0, 15, since=330)]))
    assert (found.steps, found.recorded, found.first) == (900, 16, 884)
    [late] = found.late
    assert (late.rank, late.until, late.part, late.give) == (0, None, "backward", 15)
    assert late.late_ms == pytest.approx(15, abs=0.1)
    assert abs(late.since - 330) <= late.give


@pytest.mark.usefixtures("small_rings")
def test_who_was_late_before_the_last_rows_is_found_in_the_sums(find: Find) -> None:
    [late] = find(Run(ranks=3, steps=900, slow=[Slow(1, 15, since=200, until=500)])).late
    assert (late.rank, late.part) == (1, None)
    assert abs(late.since - 200) <= late.give
    assert late.until is not None
    assert abs(late.until - 499) <= late.give


def test_hosts_with_other_clocks_are_told_by_waits(find: Find) -> None:
    skews = [0, 7_000_000_000 * MS]
    run = Run(ranks=4, steps=200, hosts=[0, 0, 1, 1], skews=skews, drift=500, slow=[Slow(3, 5, since=50)])
    found = find(run)
    [late] = found.late
    assert (late.rank, late.since) == (3, 50)
    assert late.late_ms == pytest.approx(5, abs=0.1)
    assert found.run["hosts"] == 2
    # A bucket takes 2 ms, and clocks are known no better.
    assert found.clock_us is not None
    assert 1900 < found.clock_us < 4000


def test_clocks_of_hosts_are_set_by_each_other(tmp_path: Path) -> None:
    skew = -3_600_000 * MS
    run = Run(ranks=2, steps=200, hosts=[0, 1], skews=[0, skew], drift=2000)
    [section] = sections(read(write(run, tmp_path)))
    here, there = section.tracks
    assert section.clock_uncertainty is not None
    for column in (Column.BEGIN, Column.BACKWARD_END, Column.LANDED):
        wrong = [abs(a - b) for a, b in zip(here[column], there[column], strict=True)]
        assert max(wrong) < section.clock_uncertainty


def test_a_bucket_waits_for_its_last_parameter_or_for_that_of_an_earlier_one(find: Find) -> None:
    found = find(Run(ranks=2, steps=30, buckets=4, parameters=8, stuck=1))
    assert [each.last for each in found.buckets] == [f"layers.{slot}.weight" for slot in (6, 4, 2, 0)]
    assert [each.behind for each in found.buckets] == [None, None, 1, None]
    held = found.buckets[2]
    assert held.behind_last == "layers.4.weight"
    assert held.held_ms == pytest.approx(5, abs=0.05)
    assert held.ranks[0].ready == pytest.approx(15, abs=0.01)
    assert held.ranks[1].launch == pytest.approx(20, abs=0.05)


def test_shadows_lost_steps_and_ranks_without_a_recording_are_counted(tmp_path: Path) -> None:
    kinds = {(step, 1): Kind.SHADOW for step in range(90, 100)} | {(40, rank): Kind.LOST for rank in range(3)}
    write(Run(ranks=3, steps=100, kinds=kinds), tmp_path)
    for path in tmp_path.glob("rank2-*"):
        path.unlink()
    found = analyse(sections(read(tmp_path))[0])
    assert (found.shadowed, found.lost, list(found.missing)) == (10, 1, [2])
    assert {each.kind for each in found.suggestions} >= {"uneven", "lost"}


def test_each_wrapper_has_a_section_and_the_one_with_most_time_is_first(tmp_path: Path) -> None:
    write(Run(ranks=4, steps=20, module="Critic", wrapper=0, group=[2, 3]), tmp_path)
    # Ranks of the first group have no other wrapper, so the second has another number on them.
    write(Run(ranks=4, steps=20, module="Actor", wrapper=1, group=[2, 3], backward=90), tmp_path)
    write(Run(ranks=4, steps=20, module="Actor", wrapper=0, group=[0, 1], backward=50), tmp_path)
    found = sections(read(tmp_path))
    assert [(each.module, list(each.group)) for each in found] == [
        ("Actor", [2, 3]),
        ("Actor", [0, 1]),
        ("Critic", [2, 3]),
    ]
    assert [len(each.tracks) for each in found] == [2, 2, 2]


def test_a_wrapper_that_ranks_count_differently_is_one(tmp_path: Path) -> None:
    write(Run(ranks=2, steps=5), tmp_path)
    for path in tmp_path.glob("rank1-wrapper0-*.json"):
        path.with_suffix(".rows").rename(str(path.with_suffix(".rows")).replace("wrapper0", "wrapper3"))
        path.with_name(path.name.replace("wrapper0", "wrapper3")).write_text(
            path.read_text().replace('"wrapper": 0', '"wrapper": 3')
        )
        path.unlink()
    [section] = sections(read(tmp_path))
    assert [track.rank for track in section.tracks] == [0, 1]


def test_no_step_is_an_error_in_words(tmp_path: Path) -> None:
    write(Run(ranks=2, steps=0), tmp_path)
    with pytest.raises(RecordingError, match="no step was recorded"):
        sections(read(tmp_path))


def test_each_is_compared_with_the_middle_one_of_the_others() -> None:
    assert behind([10, 12, 11, 50]) == [-2, 1, -1, 39]
    assert behind([10, 13]) == [-3, 3]
    assert behind([5, 5, 5]) == [0, 0, 0]
    assert behind([7]) == [0]


def test_a_stretch_is_where_lateness_adds_up() -> None:
    assert stretch([0.0] * 30 + [5.0] * 20, 1) == (30, 50)
    assert stretch([0.0] * 30 + [5.0] * 20 + [0.0] * 9, 1) == (30, 50)
    assert stretch([0.0] * 30 + [500.0] + [0.0] * 20, 1) is None
    assert stretch([5.0] * 9 + [0.0] + [5.0] * 9, 1) == (0, 19)
    assert stretch([0.0] * 30 + [5.0] * 20 + [0.0] * 9, 1, over=21) is None
    assert stretch([0.0] * 30 + [5.0] * 20 + [0.0] * 7, 1, over=21) == (30, 50)
    assert stretch([0.0, 0.0, 5.0] * 30, 1) is None
    assert stretch([], 1) is None


def test_bytes_and_caps_are_those_of_the_run(find: Find) -> None:
    found = find(Run(ranks=2, steps=4, bucket_bytes=2 * MIB))
    assert found.run["nbytes"] == 8 * MIB
    assert [plan.steps for plan in found.plans] == [1, 3]
