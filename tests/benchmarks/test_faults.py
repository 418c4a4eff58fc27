"""The benchmark of faults judges by what ranks say: who is named, when, where, and how all end."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import fault_tables
import faults
import figures
import pytest
from fault_judge import (
    After,
    Frame,
    Line,
    Observed,
    RankEnd,
    Verdict,
    Where,
    blamed,
    is_sound,
    judge,
    names_line,
    tells,
    without_own_stack,
)
from fault_list import FAULTS
from fault_run import Cell, run_cell

FRAME = Frame("train.py", "read_rows", 10, 14)


@pytest.mark.parametrize(
    "text",
    [
        "paceline: rank 1 has not come for 6 s (step 20); it is in train.py:12 in read_rows",
        "paceline: rank 1 is stopped by a signal; ranks 0 and 2 wait for it in bucket 3",
        "PeerError: rank 1 raised ValueError('no') in forward of step 3; the step is lost (here: rank 0)",
        "LostRankError: a collective cannot end, because ranks have ended (missing ranks: [1], here: rank 0)",
        "StalledError: not reduced on rank 0; ranks that have not come to it: [1]; such a rank has died",
        "[rank0]:[E1 ProcessGroupGloo.cpp:67] [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 20000 ms",
        "replicas differ: first.weight differs on rank 1 alone; ranks 0, 2 agree (steps 3 to 9)",
        "replicas differ: lr is 0.1 on ranks 0, 2; 0.2 on rank 1 (steps 3 to 9)",
        "rank 0 has waited 6 s for bucket 0; rank 1 is missing: it sleeps or waits at train.py:12 in rows",
        "rank 0 has waited 6 s; ranks wait for different things: rank 1 waits for 6 s for the module buffers",
    ],
)
def test_a_line_that_names_the_culprit_alone_tells(text: str) -> None:
    assert tells(text, 0, frozenset([1]))


@pytest.mark.parametrize(
    "text",
    [
        "StalledError: bucket 0 was not reduced on rank 0; ranks that have not come to it: [1, 2]",
        "paceline: ranks 1 and 2 have not come for 6 s",
        "paceline: rank 2 has not come for 6 s",
        "CollectiveError: the reduction between hosts failed (ranks: [0, 1], connection closed by peer)",
        "RuntimeError: Connection closed by peer [127.0.0.1]:1. This is caused by a remote worker crashing",
        "rank 1 has 4 batches",
        "some rank has not come to it",
        "Rank 0 successfully reached monitoredBarrier, but received errors",
        "rank 10 raised ValueError('no')",
    ],
)
def test_a_line_without_the_culprit_or_with_others_does_not_tell(text: str) -> None:
    assert not tells(text, 0, frozenset([1]))


def test_ranks_that_only_wait_are_not_blamed() -> None:
    assert blamed("rank 3 has not come; ranks 0, 1 and 2 wait for it (step 4)", 0) == {3}
    assert blamed("rank 3 has not come; ranks [1, 2] have come", 0) == {3}


def test_one_of_several_culprits_is_enough_and_an_innocent_rank_is_too_much() -> None:
    assert tells("rank 3 does not answer", 0, frozenset([2, 3]))
    assert tells("ranks: [2, 3] are lost", 0, frozenset([2, 3]))
    assert not tells("ranks: [1, 2, 3] are lost", 0, frozenset([2, 3]))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rank 1 is in read_rows (train.py)", True),
        ("rank 1 is at train.py:12", True),
        ('  File "/home/me/train.py", line 14 in other', True),
        ("rank 1 is at train.py:15", False),
        ("rank 1 is at other.py:12", False),
        ("rank 1 is in read_rows", False),
        ("rank 1 is at my_train.py:12", False),
    ],
)
def test_a_line_is_named_by_its_file_and_its_number_or_its_function(text: str, named: bool) -> None:
    assert names_line(text, [FRAME]) is named


def test_the_stack_of_a_ranks_own_traceback_is_left_out() -> None:
    texts = [
        "before",
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "train.py", line 12, in read_rows',
        "[rank0]:     wait()",
        "[rank0]: StalledError: rank 1 has not come",
        '  File "train.py", line 12, in read_rows',
    ]
    assert without_own_stack(texts) == [True, False, False, False, True, True]


def seen(**changes: object) -> Observed:
    """Rank 1 of three fails at 100 s; the others say so, with the line, and all end."""
    said = "rank 1 raised an error at train.py:12"
    usual = Observed(
        began=100.0,
        culprits={0: frozenset([1]), 2: frozenset([1])},
        held=frozenset(),
        where=Where.LINE,
        frames=[FRAME],
        tensors=["first.weight"],
        lines=[Line(0, 100.5, said), Line(2, 101.5, said)],
        ends=[RankEnd(1), RankEnd(-9), RankEnd(1)],
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def test_the_last_rank_that_is_told_counts() -> None:
    assert judge(seen()) == Verdict(
        told=1.5, told_ranks=2, ranks=2, named=True, misled=False, after=After.ENDED
    )


def test_all_ranks_must_be_told() -> None:
    verdict = judge(seen(lines=seen().lines[:1]))
    assert verdict.told is None
    assert verdict.told_ranks == 1
    assert verdict.named is False


def test_what_was_said_before_the_fault_or_after_the_culprit_was_through_does_not_count() -> None:
    early, late = Line(0, 99.0, "rank 1 is lost"), Line(0, 105.0, "rank 1 has ended")
    ends = [RankEnd(0, 106.0, "a"), RankEnd(0, 104.0, "b"), RankEnd(0, 106.0, "a")]
    assert judge(seen(lines=[early, late, seen().lines[1]], ends=ends)).told is None


def test_a_rank_that_also_blames_another_misleads() -> None:
    more = Line(0, 100.6, "ranks that have not come to it: [1, 2]")
    verdict = judge(seen(lines=[*seen().lines, more]))
    assert verdict.told == 1.5
    assert verdict.misled


def test_a_tensor_counts_only_in_a_line_that_names_the_culprit() -> None:
    lines = [Line(rank, 101.0, "first.weight differs on rank 1") for rank in (0, 2)]
    apart = [Line(rank, 101.0, text) for rank in (0, 2) for text in ("rank 1 differs", "see first.weight")]
    assert judge(seen(where=Where.TENSOR, lines=lines)).named is True
    assert judge(seen(where=Where.TENSOR, lines=apart)).named is False
    assert judge(seen(where=Where.NOTHING)).named is None


@pytest.mark.parametrize(
    ("ends", "held", "after"),
    [
        ([RankEnd(0, 1.0, "a"), RankEnd(0, 1.0, "a")], [], After.GO_ON),
        ([RankEnd(0, 1.0, "a"), RankEnd(0, 1.0, "b")], [], After.DIFFER),
        ([RankEnd(0, 1.0, "a"), RankEnd(0)], [], After.ENDED),
        ([RankEnd(1), RankEnd(None)], [], After.HANG),
        ([RankEnd(1), RankEnd(None)], [1], After.ENDED),
        ([RankEnd(None), RankEnd(None)], [1], After.HANG),
    ],
)
def test_how_all_are_in_the_end(ends: list[RankEnd], held: list[int], after: After) -> None:
    assert judge(seen(ends=ends, held=frozenset(held), culprits={0: frozenset([1])})).after is after


@pytest.mark.parametrize(
    ("after", "told", "must_go_on", "sound"),
    [
        (After.ENDED, 1.0, False, True),
        (After.ENDED, 1.0, True, False),
        (After.GO_ON, None, True, True),
        (After.DIFFER, 1.0, False, True),
        (After.DIFFER, None, False, False),
        (After.HANG, 1.0, False, False),
    ],
)
def test_what_passes_must_not_end_a_training_and_no_rank_may_differ_unknown_to_all(
    after: After, told: float | None, must_go_on: bool, sound: bool
) -> None:
    assert is_sound(Verdict(told, 1, 1, None, misled=False, after=after), must_go_on=must_go_on) is sound


def test_there_are_faults_enough_and_torch_runs_on_gloo_only() -> None:
    planned = faults.cells([*FAULTS], faults.WORLDS, faults.TRANSPORTS, faults.WRAPPERS)
    assert len([name for name, fault in FAULTS.items() if not fault.hosts_only]) >= 24
    assert {cell.transport for cell in planned if cell.wrapper != "paceline"} == {"gloo"}
    assert {cell.transport for cell in planned if FAULTS[cell.fault].hosts_only} == {"hosts"}
    assert len({*planned}) == len(planned)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_culprit_is_the_same_with_every_wrapper_and_is_there(world: int) -> None:
    for name in FAULTS:
        ours, theirs = (Cell(name, wrapper, "gloo", world) for wrapper in ("paceline", "torch"))
        assert ours.culprit == theirs.culprit
        assert ours.culprit in range(world)
    assert Cell("kill-buffers", "paceline", "shm", world).culprit > 0
    assert Cell("slow-checkpoint", "paceline", "shm", world).culprit == 0


def test_hosts_share_the_ranks() -> None:
    assert [Cell("stop-host", "paceline", "hosts", 3).host(rank) for rank in range(3)] == [0, 0, 1]
    assert {Cell("stop", "paceline", "shm", 3).host(rank) for rank in range(3)} == {0}


def figures_of(**changes: object) -> dict[str, object]:
    cell = Cell("kill-forward", "paceline", "shm", 2)
    return {**faults.figures_of(cell, seen(), judge(seen())), **changes}


def test_a_table_says_when_what_and_how() -> None:
    entry = {
        "deadline": 30.0,
        "faults": {"kill-forward": "killed", "stop": "stopped", "nan": "NaN"},
        "cells": [
            figures_of(),
            figures_of(world=3, told=None, told_ranks=0, named=False, misled=True, after="hang", sound=False),
            figures_of(fault="stop", named=False),
            figures_of(fault="stop", world=3, told=None, told_ranks=1, named=False),
            figures_of(fault="nan", told=None, told_ranks=0, named=False, after="go on"),
        ],
    }
    header, rows = fault_tables.by_world(entry, "paceline", "shm")
    assert header == ("fault", "2 ranks", "3 ranks")
    assert rows == [
        ("killed", "1.5 s, line; ended", "**not told in 30 s**, **others blamed**; **hang**"),
        ("stopped", "1.5 s, no line; ended", "**told on 1 of 2 ranks**; ended"),
        ("NaN", "**not told**; go on", ""),
    ]
    assert fault_tables.summary(entry)[1] == [("paceline, shm", "5", "2", "1", "4")]


def test_results_of_other_runs_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    faults.save(path, [figures_of(), figures_of(world=3)])
    faults.save(path, [figures_of(told=9.0)])
    entry = figures.load(path)["faults"]
    assert [(each["world"], each["told"]) for each in entry["cells"]] == [(2, 9.0), (3, 1.5)]
    page = "<!-- figures: faults-summary begin -->\n<!-- figures: faults-summary end -->\n"
    assert "| paceline, shm | 2 | 2 | 2 | 2 |" in figures.rendered(page, {"faults": entry})


def test_a_run_in_which_all_is_well_goes_on_and_nobody_is_blamed() -> None:
    run = run_cell(Cell("none", "paceline", "shm", 2))
    assert [line for line in run.lines if blamed(line.text, line.rank)] == []
    assert judge(run.observed()).after is After.GO_ON


def test_the_program_plants_a_fault_and_keeps_what_ranks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, said = tmp_path / "figures.json", tmp_path / "said"
    options = ["--faults", "kill-forward", "--worlds", "2", "--transports", "shm", "--wrappers", "paceline"]
    monkeypatch.setattr(sys, "argv", ["faults.py", *options, "--said", str(said), "--figures", str(path)])
    with pytest.raises(SystemExit) as ended:
        faults.main()
    assert not ended.value.code
    [cell] = json.loads(path.read_text())["faults"]["cells"]
    assert cell["told"] is not None
    assert cell["after"] == "ended"
    assert "1/1 paceline, shm, 2 ranks: killed in forward: " in capsys.readouterr().out
    assert "rank 1 is missing: it has ended" in (said / "paceline-shm-kill-forward-2.txt").read_text()
