"""The benchmark of healing: whom it kills and when, how it judges the notes of ranks, and its tables."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import figures
import heal
import heal_tables
import pytest
from heal_judge import Kill, Ran, Side, lost_share, problems, quantile, stall, step_seconds
from heal_notes import End, Notes, Phase, process_of, read_ends, read_phase, read_results
from heal_plan import (
    AT_ONCE,
    HEALING_SECONDS,
    ONE,
    QUIET_SECONDS,
    WHILE_HEALING,
    first_run,
    plan,
    share_kills,
)
from heal_run import Job

QUIET = {"state": "a", "buffers": "b"}
KILL = Kill(ONE, 10.0, 1, Phase.BACKWARD)


def test_kills_are_shared_among_the_numbers_of_ranks() -> None:
    assert share_kills(50, (2, 3, 4)) == {2: 17, 3: 17, 4: 16}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_same_seed_gives_the_same_plan_with_as_many_kills_as_asked_for(world: int) -> None:
    strikes = plan(world, 17, seed=3)
    assert strikes == plan(world, 17, seed=3)
    assert strikes != plan(world, 17, seed=4)
    assert sum(len(strike.ranks) for strike in strikes) == 17
    assert {rank for strike in strikes for rank in strike.ranks} == {*range(world)}
    assert all(strike.wait >= QUIET_SECONDS for strike in strikes)


@pytest.mark.parametrize(("world", "kinds"), [(2, {ONE, WHILE_HEALING}), (3, {ONE, AT_ONCE, WHILE_HEALING})])
def test_one_strike_of_each_kind_kills_two_ranks_and_a_rank_is_left(world: int, kinds: set[str]) -> None:
    for seed in range(20):
        strikes = plan(world, 10, seed)
        pairs = [strike for strike in strikes if len(strike.ranks) == 2]
        assert {strike.kind for strike in strikes} == kinds
        assert len(pairs) == len(kinds) - 1
        assert all(len({*strike.ranks}) < world for strike in pairs)
        for strike in pairs:
            low, high = HEALING_SECONDS if strike.kind == WHILE_HEALING else (0, 0)
            assert low <= strike.delay <= high


def test_with_few_kills_and_with_other_launchers_one_rank_is_killed_at_a_time() -> None:
    for strikes in (plan(3, 5, 0), plan(3, 20, 0, pairs=False)):
        assert {strike.kind for strike in strikes} == {ONE}


def test_a_run_has_at_most_five_kills_but_at_least_one_strike() -> None:
    strikes = plan(3, 17, 0)
    done = 0
    while done < len(strikes):
        part = first_run(strikes[done:], 5)
        assert 4 <= sum(len(strike.ranks) for strike in part) <= 5 or done + len(part) == len(strikes)
        done += len(part)
    pair = [strike for strike in strikes if strike.kind == AT_ONCE]
    assert first_run(pair, 1) == pair


def test_no_rank_is_killed_in_the_last_fifth() -> None:
    assert Job("paceline", 2, epochs=40, pause=0.0).last_step == 256


def ends(*times: tuple[float, int], ranks: int = 2) -> list[End]:
    return [End(at, step, ranks) for at, step in times]


def test_a_stall_ends_when_all_ranks_have_ended_a_step_that_none_had_before() -> None:
    # Rank 0 ends step 5 before the kill; rank 1 dies in it, and the new one begins with step 6.
    notes = {0: ends((9.8, 4), (9.9, 5), (11.0, 6), (11.1, 7)), 1: ends((9.8, 4), (11.2, 6), (11.3, 7))}
    found = stall(KILL, notes, 2)
    assert found.seconds == pytest.approx(1.2)
    assert found.pause == pytest.approx(1.1)
    assert found.again == 0


def test_a_step_that_other_ranks_end_without_the_killed_one_ends_no_stall() -> None:
    notes = {0: ends((9.9, 5), (10.1, 6), (12.0, 7)), 1: ends((9.9, 5), (12.1, 7))}
    assert stall(KILL, notes, 2).seconds == pytest.approx(2.1)
    assert stall(KILL, notes, 3).seconds is None


def test_steps_that_are_done_again_belong_to_the_stall() -> None:
    # All ranks start from a snapshot after step 3.
    before, after = [(9.7, 4), (9.8, 5), (9.9, 6)], [(15.0, 4), (15.1, 5), (15.2, 6), (15.3, 7)]
    found = stall(KILL, {0: ends(*before, *after), 1: ends(*before, *after)}, 2)
    assert found.seconds == pytest.approx(5.3)
    assert found.pause == pytest.approx(5.1)
    assert found.again == 3


def test_a_stall_that_never_ends_has_no_time() -> None:
    found = stall(KILL, {0: ends((9.9, 5)), 1: ends((9.9, 5))}, 2)
    assert (found.seconds, found.pause, found.again) == (None, None, 0)


def test_the_time_of_a_step_leaves_out_steps_that_a_rank_has_not_done() -> None:
    assert step_seconds({0: ends((1.0, 0), (1.1, 1), (1.3, 2), (9.0, 7))}) == pytest.approx(0.15)
    assert math.isnan(step_seconds({0: []}))


def test_samples_are_lost_in_steps_without_all_ranks() -> None:
    notes = {0: [End(1.0, 0, 2), End(2.0, 1, 1), End(3.0, 2, 1), End(4.0, 3, 2)], 1: [End(1.0, 0, 2)]}
    assert lost_share(notes, 2) == 0.25


def test_a_quantile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 21)]
    assert [quantile(values, share) for share in (0.5, 0.95, 1.0)] == [10.0, 19.0, 20.0]
    assert math.isnan(quantile([], 0.5))


def notes(healed: float) -> dict[int, list[End]]:
    """Of two ranks whose steps take 0.2 s."""
    steps = [(9.5, 3), (9.7, 4), (9.9, 5), (healed, 6), (healed + 0.2, 7)]
    return {rank: ends(*steps) for rank in range(2)}


def ran(**changes: Any) -> Ran:
    usual = Ran("paceline", 2, 0, 1, [KILL], notes(healed=11.0), {0: QUIET, 1: QUIET})
    return replace(usual, **changes)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"code": None, "results": {}}, ["it hung"]),
        ({"code": 1, "results": {0: QUIET}}, ["exit code 1", "1 of 2 ranks came to the end"]),
        ({"results": {0: QUIET, 1: {**QUIET, "state": "x"}}}, ["other bits on ranks [1]"]),
        ({"results": {0: {**QUIET, "buffers": "x"}, 1: QUIET}}, ["other module buffers on rank 0"]),
        ({"ledger": "ledger: no", "left": ["process 7 is left"]}, ["ledger: no", "process 7 is left"]),
    ],
    ids=str,
)
def test_a_run_is_right_if_it_ends_with_the_bits_of_the_quiet_run(
    changes: dict[str, Any], found: list[str]
) -> None:
    assert problems(ran(**changes), QUIET) == found


def test_without_a_quiet_run_ranks_are_compared_with_each_other() -> None:
    other = {"state": "x", "buffers": "y"}
    assert problems(ran(results={0: other, 1: other}), None) == []
    assert problems(ran(results={0: other, 1: QUIET}), None) == ["ranks ended with different bits"]


def entry(**sides: Side) -> dict[str, Any]:
    source = {"command": "heal.py", "machine": "a machine", "python": "3", "torch": "2"}
    return {**source, "snapshot_every": 20, "sides": {name: side.figures() for name, side in sides.items()}}


def side(*runs: tuple[Ran, list[str]]) -> Side:
    found = Side()
    for each, wrong in runs:
        found.add(each, wrong)
    return found


def test_tables_have_a_row_per_number_of_ranks_and_kind_of_kill() -> None:
    pair = [KILL, replace(KILL, kind=AT_ONCE, phase=Phase.LOADING)]
    lost = ran(kills=[KILL], ends={0: [], 1: []})
    made = entry(paceline=side((ran(kills=pair), [])), torchrun=side((lost, ["it hung"])))
    _, rows = heal_tables.stalls(json.loads(json.dumps(made)))
    ours, again = "`paceline run --heal`", "torchrun, a snapshot every 20 steps"
    cells = ("200 ms", "1.00 s", "1.00 s", "1.00 s", "1.10 s", "0.0")
    assert rows == [
        (ours, "2", ONE, "1", *cells),
        (ours, "2", AT_ONCE, "1", *cells),
        (ours, "all", "all", "2", *cells),
        (again, "2", ONE, "1, **1 not healed**", "", "", "", "", "", "0.0"),
    ]
    assert heal_tables.ends(made)[1] == [
        (ours, "2", "1", "1", "0.0 %", ""),
        (again, "1", "1", "0", "", "it hung (1)"),
    ]
    assert heal_tables.phases(made)[1] == [("data loading", "1", "0"), ("backward", "1", "1")]


def test_aims_are_those_of_the_median_less_a_step_and_of_nearly_all() -> None:
    assert heal_tables.aims(entry(paceline=side((ran(), [])))) == [
        "median stall less a step: 800 ms (aim: below 1 s)",
        "95 % of stalls: 1.00 s (aim: below 3 s)",
    ]
    late = ran(ends=notes(healed=14.0))
    assert all("**missed**" in aim for aim in heal_tables.aims(entry(paceline=side((late, [])))))
    assert heal_tables.aims(entry(torchrun=side((ran(), [])))) == []


def test_figures_of_sides_that_are_not_repeated_stay(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    heal.save(path, entry(paceline=side((ran(), []))))
    heal.save(path, entry(torchrun=side((ran(), []))))
    saved = figures.load(path)
    assert [*saved["healing"]["sides"]] == ["paceline", "torchrun"]
    page = "<!-- figures: healing begin -->\n<!-- figures: healing end -->\n"
    assert "| torchrun, a snapshot every 20 steps | 2 | one rank | 1 |" in figures.rendered(page, saved)


def test_notes_outlive_the_process_that_has_taken_them(tmp_path: Path) -> None:
    Notes(tmp_path, 1, pause=0.0).enter(Phase.FORWARD)
    text = """
import sys, time
from pathlib import Path
from heal_notes import Notes, Phase
notes = Notes(Path(sys.argv[1]), 0, pause=0.0)
notes.ended(3, 2)
notes.result({"state": "a"})
notes.enter(Phase.OPTIMIZER)
time.sleep(60)
"""
    variables = {**os.environ, "PYTHONPATH": str(Path(heal.__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", text, tmp_path], env=variables) as process:
        until = time.monotonic() + 20
        while process_of(tmp_path, 0) is None or read_phase(tmp_path, 0, process.pid) is Phase.STARTING:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert process_of(tmp_path, 0) == process.pid
        process.send_signal(signal.SIGKILL)
    assert process_of(tmp_path, 0) is None
    assert process_of(tmp_path, 1) == os.getpid()
    assert process_of(tmp_path, 1, [os.getpid()]) is None
    assert read_phase(tmp_path, 0, process.pid) is Phase.OPTIMIZER
    assert [(end.step, end.ranks) for end in read_ends(tmp_path)[0]] == [(3, 2)]
    assert read_results(tmp_path) == {0: {"state": "a"}}


def test_a_rank_is_killed_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    options = [
        "--sides",
        "paceline",
        "--worlds",
        "2",
        "--kills",
        "1",
        "--epochs",
        "16",
        "--figures",
        str(path),
    ]
    monkeypatch.setattr(sys, "argv", ["heal", *options])
    with pytest.raises(SystemExit) as exit_:
        heal.main()
    assert exit_.value.code == 0, capsys.readouterr().out
    [row] = figures.load(path)["healing"]["sides"]["paceline"]["rows"]
    assert (row["world"], row["kind"], row["kills"], row["healed"]) == (2, ONE, 1, 1)
    assert row["median"] < 20
