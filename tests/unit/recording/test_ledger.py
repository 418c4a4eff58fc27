"""The ledger: which samples counted, whatever was lost and done again, and what is wrong if they did not."""

import multiprocessing
import os
import signal
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import RecordingError
from paceline.recording import ledger
from paceline.recording.ledger import (
    Ledger,
    LedgerWriter,
    ProcessLedger,
    combine,
    ledger_files,
    ledger_from_environment,
    read_ledger,
)
from paceline.recording.ledger_check import LedgerCheck, check_ledger

SAMPLES, STEP_SAMPLES, SHARDS = 24, 8, 4
STEPS_PER_EPOCH = SAMPLES // STEP_SAMPLES


def samples(step: int, shard: int) -> list[int]:
    """The samples of a shard; each epoch has another order."""
    epoch, index = divmod(step, STEPS_PER_EPOCH)
    order = [(7 * place + epoch) % SAMPLES if epoch else place for place in range(SAMPLES)]
    own = order[index * STEP_SAMPLES : (index + 1) * STEP_SAMPLES]
    return own[shard * 2 : shard * 2 + 2]


class Ranks:
    """Two ranks with two shards each, which write what they do."""

    def __init__(self, *, epoch_samples: int | None = SAMPLES) -> None:
        self._epoch_samples = epoch_samples
        self.processes: list[ProcessLedger] = []
        self.generation = -1
        self.begin_generation()

    def begin_generation(self) -> None:
        """Both ranks are other processes from now on."""
        self.generation += 1
        self._ranks = [ProcessLedger(epoch_samples=self._epoch_samples) for _ in range(2)]
        self.processes += self._ranks

    def take(self, step: int, ranks: Sequence[int] = (0, 1)) -> None:
        for rank in ranks:
            shards = {str(shard): samples(step, shard) for shard in (2 * rank, 2 * rank + 1)}
            epoch = step // STEPS_PER_EPOCH
            self._add(rank, step, event="took", epoch=epoch, samples=shards)

    def complete(self, step: int, ranks: Sequence[int] = (0, 1)) -> None:
        for rank in ranks:
            self._add(rank, step, event="counted")

    def train(self, first: int, stop: int) -> None:
        for step in range(first, stop):
            self.take(step)
            self.complete(step)

    def _add(self, rank: int, step: int, **event: Any) -> None:
        self._ranks[rank].add({"step": step, "generation": self.generation, **event})

    def ledger(self) -> Ledger:
        return combine(self.processes)

    def check(self) -> LedgerCheck:
        return check_ledger(self.ledger())


def test_every_sample_of_a_run_without_losses_counts_once() -> None:
    ranks = Ranks()
    ranks.train(0, 3 * STEPS_PER_EPOCH)
    found = ranks.check()
    assert found.is_right
    assert str(found) == "every sample counted once: 3 epochs, 72 samples, 9 steps"
    assert ranks.ledger().steps[1, 4] == {shard: samples(4, shard) for shard in range(SHARDS)}


def test_a_step_that_was_lost_counts_when_it_is_done_again() -> None:
    ranks = Ranks()
    ranks.train(0, 4)
    ranks.take(4, [0])
    ranks.begin_generation()
    ranks.train(4, 6)
    assert ranks.check().is_right
    assert ranks.ledger().counted == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1}


def test_a_step_that_one_rank_completed_counts_if_the_others_go_on_after_it() -> None:
    ranks = Ranks()
    ranks.train(0, 4)
    ranks.take(4)
    ranks.complete(4, [1])
    ranks.begin_generation()
    ranks.train(5, 6)
    assert str(ranks.check()) == "every sample counted once: 2 epochs, 48 samples, 6 steps"


def test_a_step_that_one_rank_completed_is_void_if_it_is_done_again() -> None:
    ranks = Ranks()
    ranks.train(0, 4)
    ranks.take(4)
    ranks.complete(4, [1])
    ranks.begin_generation()
    ranks.train(4, 6)
    assert ranks.check().is_right
    assert ranks.ledger().counted[4] == 1


def test_a_generation_that_took_a_step_and_completed_none_makes_it_void_too() -> None:
    ranks = Ranks()
    ranks.train(0, 5)
    ranks.begin_generation()
    ranks.take(4)
    assert 4 not in ranks.ledger().counted
    ranks.begin_generation()
    ranks.train(4, 6)
    assert ranks.check().is_right


def test_what_was_trained_after_a_checkpoint_is_void_when_ranks_go_back_to_it() -> None:
    ranks = Ranks()
    ranks.train(0, 8)
    ranks.begin_generation()
    ranks.train(2, 3)
    assert ranks.ledger().counted == {0: 0, 1: 0, 2: 1}
    assert str(ranks.check()) == "every sample counted once: 1 epoch, 24 samples, 3 steps"
    ranks.train(3, 9)
    assert str(ranks.check()) == "every sample counted once: 3 epochs, 72 samples, 9 steps"


events = st.one_of(
    st.just(("fine",)),
    st.tuples(st.just("lost"), st.lists(st.integers(0, 1), max_size=2, unique=True)),
    st.tuples(st.just("completed by one"), st.booleans()),
    st.tuples(st.just("back"), st.integers(0, 4)),
)


def happens(ranks: Ranks, step: int, event: tuple[Any, ...]) -> int:
    """Let something happen in a step; returns the next step."""
    match event:
        case ("fine",):
            ranks.train(step, step + 1)
            return step + 1
        case ("lost", took):
            ranks.take(step, took)
        case ("completed by one", others_follow):
            ranks.take(step)
            ranks.complete(step, [1])
            step += others_follow
        case ("back", steps):
            step = max(0, step - steps)
    ranks.begin_generation()
    return step


@given(st.lists(events, max_size=25))
@settings(deadline=None)
def test_whatever_is_lost_every_sample_counts_once(history: list[tuple[Any, ...]]) -> None:
    ranks, step = Ranks(), 0
    for event in history:
        step = happens(ranks, step, event)
    ranks.train(step, max(step, 3 * STEPS_PER_EPOCH))
    found = ranks.check()
    assert found.is_right, found
    trained = ranks.ledger().steps
    assert set(trained) == {
        (each // STEPS_PER_EPOCH, each) for each in range(max(ranks.ledger().counted) + 1)
    }
    assert all(
        shards == {shard: samples(each, shard) for shard in range(SHARDS)}
        for (_, each), shards in trained.items()
    )


@given(st.lists(events, max_size=12), st.integers(0, 3 * STEPS_PER_EPOCH - 1), st.integers(0, 1), st.data())
@settings(deadline=None)
def test_whatever_is_lost_a_mistake_is_found(
    history: list[tuple[Any, ...]], wrong: int, rank: int, data: st.DataObject
) -> None:
    ranks, step = Ranks(), 0
    for event in history:
        step = happens(ranks, step, event)
    ranks.train(step, max(step, 3 * STEPS_PER_EPOCH))
    living = ranks.ledger().counted[wrong]
    attempt = (living, wrong)
    mistaken = [each for each in ranks.processes if attempt in each.takes][rank]
    mistake = data.draw(st.sampled_from(["forgotten", "another rank's", "of another step"]))
    if mistake == "forgotten":
        del mistaken.takes[attempt]
    else:
        other = wrong if mistake == "another rank's" else (wrong + 1) % STEPS_PER_EPOCH
        shard = (2 * rank + 2) % SHARDS if mistake == "another rank's" else 2 * rank
        own = {**mistaken.takes[attempt].samples, 2 * rank: samples(other, shard)}
        mistaken.takes[attempt] = ledger.Take(wrong // STEPS_PER_EPOCH, own)
    assert not ranks.check().is_right


def test_samples_that_counted_twice_or_never_are_named() -> None:
    ranks = Ranks()
    ranks.train(0, 6)
    mistaken = ranks.processes[0]
    mistaken.takes[0, 1] = ledger.Take(0, {0: [8, 9], 1: [10, 3]})
    found = ranks.check()
    assert (found.twice, found.never) == ([(0, 3)], [(0, 11)])
    assert str(found) == (
        "the samples did not count once each; sample 3 counted more than once in epoch 0; "
        "sample 11 did not count in epoch 0"
    )


def test_a_shard_that_two_ranks_took_counts_twice() -> None:
    ranks = Ranks()
    ranks.train(0, 3)
    first, second = ranks.processes
    second.takes[0, 1] = ledger.Take(0, {0: [8, 9], **second.takes[0, 1].samples})
    assert ranks.check().twice == [(0, 8), (0, 9)]
    first.takes[0, 1] = ledger.Take(0, {1: [10, 11]})
    assert ranks.check().is_right


def test_shards_that_nobody_took_and_steps_that_nobody_completed_are_named() -> None:
    ranks = Ranks()
    ranks.train(0, 1)
    ranks.take(1, [0])
    ranks.complete(1)
    ranks.complete(2)
    ranks.take(3)
    ranks.train(4, 6)
    found = ranks.check()
    assert found.missing_shards == [(1, 2), (1, 3)]
    assert found.missing_steps == [2, 3]
    assert "no rank took shards 2, 3 of step 1; no rank took and completed steps 2, 3" in str(found)


def test_many_mistakes_are_named_in_part() -> None:
    ranks = Ranks()
    ranks.train(0, 1)
    ranks.train(5000, 5001)
    found = ranks.check()
    assert len(found.missing_steps) == 1000
    assert "no rank took and completed steps 1, 2, 3, 4, 5, 6, 7, 8 and more" in str(found)


def test_an_epoch_that_did_not_end_is_not_wrong() -> None:
    ranks = Ranks()
    assert str(ranks.check()) == "no step counted"
    ranks.train(0, 2)
    assert str(ranks.check()) == "no sample counted twice; epoch 0 is not complete (16 samples)"
    ranks.train(2, 4)
    expected = "every sample counted once: 1 epoch, 24 samples, 3 steps; epoch 1 is not complete (8 samples)"
    assert (str(ranks.check()), ranks.check().is_right) == (expected, True)


def test_an_epoch_that_began_before_the_ledger_is_not_wrong() -> None:
    ranks = Ranks()
    ranks.train(4, 9)
    expected = "every sample counted once: 1 epoch, 24 samples, 3 steps; epoch 1 is not complete (16 samples)"
    assert (str(ranks.check()), ranks.check().is_right) == (expected, True)


def test_if_the_number_of_samples_is_not_known_epochs_are_compared() -> None:
    ranks = Ranks(epoch_samples=None)
    ranks.train(0, 3)
    assert str(ranks.check()) == "no sample counted twice; epoch 0 is not complete (24 samples)"
    ranks.train(3, 6)
    assert str(ranks.check()) == "every sample counted once: 2 epochs, 48 samples, 6 steps"
    ranks.processes[0].takes[0, 1] = ledger.Take(0, {0: [8, 9], 1: [10]})
    assert ranks.check().never == [(0, 11)]


def write(folder: Path, rank: int = 0) -> Path:
    writer = LedgerWriter(folder, rank=rank, epoch_samples=4)
    writer.took(epoch=0, step=0, generation=0, samples={0: [3, 1], 1: (0, 2)})
    writer.counted(step=0, generation=0)
    writer.took(epoch=1, step=1, generation=0, samples={0: [0, 1], 1: [2, 3]})
    writer.close()
    return ledger_files(folder)[-1]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    found = read_ledger(tmp_path)
    assert found == Ledger({0: 0}, {(0, 0): {0: [3, 1], 1: [0, 2]}}, 4)


def test_files_have_names_of_their_own_and_are_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = {write(tmp_path / "new", rank) for rank in (0, 1, 1)}
    finally:
        os.umask(before)
    assert files | {*ledger_files(tmp_path / "new")} == {*ledger_files(tmp_path / "new")}
    assert len(ledger_files(tmp_path / "new")) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_it_is_written_if_the_environment_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_LEDGER", "1")
    monkeypatch.delenv("PACELINE_RECORD", raising=False)
    assert ledger_from_environment(rank=0) is None
    monkeypatch.setenv("PACELINE_RECORD", str(tmp_path))
    assert ledger_from_environment(rank=3) is not None
    assert [path.name.split("-")[:3] for path in ledger_files(tmp_path)] == [
        ["ledger", "3", str(os.getpid())]
    ]
    monkeypatch.setenv("PACELINE_LEDGER", "0")
    assert ledger_from_environment(rank=0) is None


def write_and_die(folder: Path) -> None:
    write(folder)
    writer = LedgerWriter(folder, rank=1)
    for step in range(100):
        writer.took(epoch=0, step=step, generation=0, samples={0: [step]})
        writer.counted(step=step, generation=0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_wrote_is_there(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=write_and_die, args=(tmp_path,))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert [*read_ledger(tmp_path).counted] == [*range(100)]


def test_half_a_last_line_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    end = whole.rindex(b"\n", 0, -1) + 1
    for length in range(end, len(whole)):
        path.write_bytes(whole[:length])
        assert [*read_ledger(tmp_path).counted] == [0]


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[]",
        b"",
        b"nonsense",
        b"\xff",
        b"[" * 100_000,
        b'{"event": "began", "epoch_samples": -1}',
        b'{"event": "counted", "step": 1}',
        b'{"event": "counted", "step": true, "generation": 0}',
        b'{"event": "counted", "step": 1%s, "generation": 0}' % (b"0" * 5000),
        b'{"event": "took", "epoch": 0, "step": 1, "generation": 0, "samples": [1]}',
        b'{"event": "took", "epoch": 0, "step": 1, "generation": 0, "samples": {"x": [1]}}',
        b'{"event": "took", "epoch": 0, "step": 1, "generation": 0, "samples": {"-1": [1]}}',
        b'{"event": "took", "epoch": 0, "step": 1, "generation": 0, "samples": {"0": [1.5]}}',
        b'{"event": "took", "epoch": 0, "step": 1, "generation": 0, "samples": {"0": 1}}',
    ],
    ids=lambda line: repr(line[:40]),
)
def test_other_damage_is_an_error_that_names_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(RecordingError, match=rf"damaged \(.*{path.name}, line 5: "):
        read_ledger(tmp_path)


def test_numbers_without_end_are_judged_all_the_same(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path, rank=0, epoch_samples=2**62)
    for step in (0, 2**62):
        writer.took(epoch=step, step=step, generation=0, samples={2**62: [step]})
        writer.counted(step=step, generation=0)
    assert not check_ledger(read_ledger(tmp_path)).is_right


def test_a_folder_without_a_ledger_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"there is no ledger.*PACELINE_LEDGER=1"):
        read_ledger(tmp_path)
    assert ledger_files(tmp_path / "none") == []


def count_three(folder: Path) -> None:
    writer = LedgerWriter(folder, rank=0)
    for step in range(3):
        writer.counted(step=step, generation=0)


def test_a_folder_that_cannot_be_written_is_told_once_and_does_not_stop_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="the ledger lacks the samples") as told:
        count_three(tmp_path / "file")
    assert len(told) == 1


def test_a_full_disk_is_told_once_and_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr("os.write", lambda file, line: write(file, line[:7]))
    with pytest.warns(RuntimeWarning, match="no space is left for the whole line") as told:
        count_three(tmp_path)
    assert len(told) == 1
    assert not read_ledger(tmp_path).counted


def test_nothing_is_written_to_a_file_that_is_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda _: "00000000")
    (tmp_path / f"ledger-0-{os.getpid()}-00000000.jsonl").symlink_to(tmp_path / "kept")
    with pytest.warns(RuntimeWarning, match="File exists"):
        LedgerWriter(tmp_path, rank=0)
    assert (tmp_path / "kept").read_text() == "mine"
