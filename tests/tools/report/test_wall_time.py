"""All of the wall time of recorded runs has a name, and the right one.

Pauses are long, so that they are pauses on a busy machine too.
"""

import io
import json
import re
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from recordings import PauseEvery, Run, Slow, StepKind, write, write_healed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline import DistributedDataParallel
from paceline.recording.ring_buffer import Header
from paceline.recording.rows import StepColumn, SumColumn
from paceline.testing import RankPool
from paceline.tools.main import main
from paceline.tools.report.analysis import RunAnalysis, analyse_recording
from paceline.tools.report.step_parts import StepPart, rank_part_times
from paceline.tools.report.timeline_overlays import step_overlays
from paceline.tools.report.wall_time import rank_wall_times
from paceline.tools.report.wrapper_runs import RankTimeline, WrapperRun

STEPS = 13
PAUSE = 0.3
SHORT = 0.02


class Net(nn.Module):
    """Sleeps in forward, as long as it is told."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.layers(x).square().mean()


class Critic(Net):
    """The other module of two."""


class SlowItems(Dataset[Tensor]):
    """Takes its time for each item."""

    def __init__(self, length: int = STEPS) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SHORT)
        return torch.randn(8)


class SlowStart(DataLoader[Tensor]):
    """Takes its time to begin, as one that starts processes."""

    def _get_iterator(self) -> Any:
        time.sleep(PAUSE)
        return super()._get_iterator()


class SlowState:
    """Takes its time to be pickled."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        time.sleep(PAUSE)
        return SlowState, ()


class SlowSGD(torch.optim.SGD):
    """Takes its time after the closure."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        time.sleep(SHORT)
        return loss


def batch() -> Tensor:
    return torch.randn(5, 8)


class Loop:
    """A wrapper with its optimizer, and one method per kind of training."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ddp = DistributedDataParallel(Net())
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)

    def backward(self, x: Tensor | None = None) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.ddp(batch() if x is None else x)
        loss.backward()
        return loss

    def step(self, x: Tensor | None = None) -> None:
        self.backward(x)
        self.optimizer.step()

    def evaluation(self) -> None:
        for number in range(STEPS):
            self.step()
            if self.rank == 0 and number % 4 == 3:
                self.ddp.module.seconds = PAUSE
                with torch.no_grad():
                    self.ddp(batch())
                self.ddp.module.seconds = 0.0

    def checkpoint(self) -> None:
        for number in range(STEPS):
            self.step()
            if self.rank == 0 and number % 4 == 3:
                torch.save({"net": self.ddp.state_dict(), "more": SlowState()}, io.BytesIO())

    def bursts(self) -> None:
        for number in range(STEPS):
            self.step()
            if number % 2:
                time.sleep(PAUSE)

    def other_model(self) -> None:
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        other = torch.optim.SGD([parameter], lr=0.1)
        for number in range(STEPS):
            self.step()
            if number % 4 == 3:
                time.sleep(PAUSE)
                other.step()

    def join(self) -> None:
        with self.ddp.join():
            for _ in range(STEPS):
                time.sleep(SHORT * self.rank)
                self.step()

    def skips(self) -> None:
        for number in range(STEPS):
            if self.rank == 0 and number % 4 == 3:
                self.ddp.skip()
            else:
                self.backward()
            self.optimizer.step()
            time.sleep(SHORT)

    def accumulation(self) -> None:
        for number in range(2 * STEPS):
            with self.ddp.no_sync():
                for _ in range((0, 0, 1, 8)[number % 4]):
                    self.ddp(batch()).backward()
                    time.sleep(SHORT)
            self.step()

    def accumulation_of_batches(self) -> None:
        batches = iter(DataLoader(SlowItems(20 * STEPS)))
        for number in range(2 * STEPS):
            with self.ddp.no_sync():
                for _ in range((0, 0, 1, 8)[number % 4]):
                    self.ddp(next(batches)).backward()
            self.step(next(batches))

    def evaluation_with_gradients(self) -> None:
        for number in range(STEPS):
            self.step()
            if number % 4 == 3:
                for _ in range(3):
                    self.ddp(batch())
                    time.sleep(PAUSE / 3)

    def evaluation_of_data(self) -> None:
        for number in range(STEPS):
            self.step()
            if number % 4 == 3:
                with torch.no_grad():
                    self.ddp(batch())
                time.sleep(PAUSE)

    def loader_begun_early(self) -> None:
        for _ in range(3):
            batches = iter(DataLoader(SlowItems(4)))
            time.sleep(PAUSE)
            for x in batches:
                self.step(x)

    def loader_begins_slowly(self) -> None:
        for _ in range(3):
            for x in SlowStart(SlowItems(4)):
                self.step(x)

    def after_join(self) -> None:
        for _ in range(3):
            with self.ddp.join():
                for _ in range(STEPS // 3 + (self.rank == 0)):
                    self.step()
                    time.sleep(SHORT)
            if self.rank == 1:
                time.sleep(PAUSE)

    def two_wrappers(self) -> None:
        critic = DistributedDataParallel(Critic(SHORT))
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        for _ in range(STEPS):
            self.step()
            optimizer.zero_grad()
            critic(batch()).backward()
            optimizer.step()
        critic.recorder.close()

    def forward_without_gradients(self) -> None:
        teacher = DistributedDataParallel(Critic(SHORT))
        for _ in range(STEPS):
            with torch.no_grad():
                teacher(batch())
            self.step()

    def loader_between_backwards(self) -> None:
        for number, x in enumerate(DataLoader(SlowItems(4 * STEPS))):
            if number % 4 < 3:
                with self.ddp.no_sync():
                    self.ddp(x).backward()
            else:
                self.ddp(x).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    def loader_before_backward(self) -> None:
        for x in DataLoader(SlowItems()):
            self.optimizer.zero_grad()
            loss = self.ddp(batch())
            (loss * next(iter(DataLoader(SlowItems())))[0, 0]).backward()
            self.optimizer.step()
            del x

    def shared_backward(self) -> None:
        """The critic's gradients come first, then the other's; rank 1 takes longer for these."""
        critic = DistributedDataParallel(Critic())
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            self.optimizer.zero_grad()
            made = self.ddp(batch())
            made.register_hook(lambda _: time.sleep(SHORT * (1 + self.rank)))
            critic(batch() * made).backward()
            self.optimizer.step()
            optimizer.step()
        critic.recorder.close()

    def closure(self) -> None:
        self.optimizer = SlowSGD(self.ddp.parameters(), lr=0.1)
        for _ in range(STEPS):
            self.optimizer.step(self.backward)
            time.sleep(2 * SHORT)

    def two_optimizers(self) -> None:
        later = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        for _ in range(STEPS):
            self.step()
            time.sleep(SHORT)
            later.step()

    def clipping(self) -> None:
        for _ in range(STEPS):
            self.backward()
            time.sleep(SHORT)
            self.optimizer.step()

    def loader(self) -> None:
        for x in DataLoader(SlowItems()):
            self.step(x)
            time.sleep(2 * SHORT)  # in place of a scheduler


def train(rank: int, folder: Path, kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_RECORD", str(folder))
        loop = Loop(rank)
        getattr(loop, kind)()
    loop.ddp.recorder.close()


Recorded = Callable[[str], list[tuple[WrapperRun, RunAnalysis]]]


@pytest.fixture
def recorded(pool: RankPool, tmp_path: Path) -> Recorded:
    """The analysis of a kind of training on two ranks."""

    def record(kind: str) -> list[tuple[WrapperRun, RunAnalysis]]:
        pool.run(train, tmp_path, kind)
        return analyse_recording(tmp_path)

    return record


def usual(run: WrapperRun, part: StepPart) -> float:
    """The median of a part over all steps, in milliseconds: one delay of the machine does not change it."""
    return statistics.median(time for times in rank_part_times(run) for time in times[part]) / 1e6


def planted(run: WrapperRun) -> Counter[tuple[int, str]]:
    """How many pauses of the planted length each rank has, by cause: not those of a busy machine."""
    return Counter(
        (timeline.rank, str(pause.cause))
        for timeline, wall in zip(run.timelines, rank_wall_times(run), strict=True)
        for pause in wall.pauses
        if pause.nanoseconds >= PAUSE * 900e6
    )


def wall_ms(timeline: RankTimeline) -> float:
    """From the begin of the first step to the end of the last, as it was recorded."""
    end = max(timeline[StepColumn.END][-1], timeline[StepColumn.OPTIMIZER_END][-1])
    return (end - timeline[StepColumn.BEGIN][0]) / 1e6


KINDS = [
    "evaluation", "checkpoint", "bursts", "other_model", "join", "two_wrappers", "closure", "clipping",
    "loader", "two_optimizers", "forward_without_gradients", "loader_between_backwards",
    "loader_before_backward", "shared_backward",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_named_parts_add_up_to_the_wall_time(recorded: Recorded, kind: str) -> None:
    for whole, analysis in recorded(kind):
        run = whole.from_step(analysis.figures_from_step)  # on a busy machine a rank may seem to be late
        for timeline, rank in zip(run.timelines, analysis.ranks, strict=True):
            named = sum(rank.parts.values()) * len(timeline)
            assert named == pytest.approx(wall_ms(timeline), rel=0.02)
        mean = sum(map(wall_ms, run.timelines)) / len(run.timelines)
        assert analysis.steps_per_second == pytest.approx(len(run.timelines[0]) / mean * 1e3, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "cause", "ranks"),
    [
        ("evaluation", "evaluation", [0]),
        ("evaluation_with_gradients", "evaluation", [0, 1]),
        ("evaluation_of_data", "evaluation", [0, 1]),
        ("checkpoint", "checkpoint", [0]),
        ("bursts", "code outside of the wrapper", [0, 1]),
        ("other_model", "training of another model", [0, 1]),
        ("loader_begun_early", "code outside of the wrapper", [0, 1]),
        ("loader_begins_slowly", "data", [0, 1]),
    ],
)
def test_a_pause_has_its_cause_its_share_and_its_advice(
    recorded: Recorded, kind: str, cause: str, ranks: list[int]
) -> None:
    [(run, found)] = recorded(kind)
    # The machine may once have another pause that is as long.
    often = {each for each, count in planted(run).items() if count >= 2}
    waits = {(1, "a pause of another rank")} if ranks == [0] else set()
    assert often == {(rank, cause) for rank in ranks} | waits
    [longest] = [each for each in found.pauses if each.cause == cause]
    assert longest.others_wait or not waits
    assert longest.longest_ms >= PAUSE * 900
    assert longest.total_ms >= 2 * PAUSE * 900
    assert longest.step_ms >= longest.longest_ms / STEPS
    assert found.parts["pauses"] > 0
    assert found.summary.startswith("Pauses take ")
    assert f"pauses: {cause}" in [each.kind for each in found.suggestions]


def test_the_exchange_of_join_is_not_forward(recorded: Recorded) -> None:
    [(run, found)] = recorded("join")
    assert found.ranks[0].parts["waiting in join"] > SHORT * 200
    for timeline in run.timelines:
        columns = (StepColumn.FORWARD_START, StepColumn.JOIN_END, StepColumn.FORWARD_END)
        for start, joined, end in zip(*(timeline[column] for column in columns), strict=True):
            assert start < joined < end


def test_more_backwards_than_usual_that_accumulate_are_no_pause(recorded: Recorded) -> None:
    [(run, found)] = recorded("accumulation")
    assert max(run.timelines[0][StepColumn.ACCUMULATED]) == 8
    assert "evaluation" not in [each.cause for each in found.pauses]
    assert found.parts["gradient accumulation"] > SHORT * 1000 * 9 / 4 * 0.8


def test_more_batches_than_usual_for_an_accumulation_are_no_pause(recorded: Recorded) -> None:
    [(_, found)] = recorded("accumulation_of_batches")
    # A busy machine may pause, but not for as long as the six times eight batches take.
    assert sum(each.total_ms for each in found.pauses) < 3 * 8 * SHORT * 1000
    assert found.parts["DataLoader"] > SHORT * 1000 * 13 / 4 * 0.8


def test_what_follows_join_is_no_wait(recorded: Recorded) -> None:
    [(run, _)] = recorded("after_join")
    # Rank 1 pauses twice between two steps; the machine may do so too, once.
    for wall in rank_wall_times(run):
        assert sum(time > PAUSE * 900e6 for time in wall.times[StepPart.JOIN]) < 2
    found = planted(run)
    assert 2 <= found[1, "code outside of the wrapper"] <= 3
    assert found[0, "code outside of the wrapper"] < 2


def test_a_rank_that_skips_a_step_does_not_wait_in_join(recorded: Recorded) -> None:
    [(run, found)] = recorded("skips")
    assert run.steps_of_kind(StepKind.NO_INPUTS) > 0
    assert found.parts["waiting in join"] == 0


def test_the_time_of_another_wrapper_is_named(recorded: Recorded) -> None:
    by_module = {run.module: analysis for run, analysis in recorded("two_wrappers")}
    assert by_module["Net"].parts["other wrappers"] > SHORT * 800
    assert by_module["Critic"].parts["forward"] > SHORT * 800


def test_a_forward_without_gradients_of_another_wrapper_is_named(recorded: Recorded) -> None:
    [(run, _)] = recorded("forward_without_gradients")
    assert usual(run, StepPart.OTHER_WRAPPERS) > SHORT * 800
    assert usual(run, StepPart.DATA) < SHORT * 500


def test_a_data_loader_between_backwards_that_accumulate_is_no_accumulation(recorded: Recorded) -> None:
    [(run, found)] = recorded("loader_between_backwards")
    assert usual(run, StepPart.LOADER) > 4 * SHORT * 800
    assert usual(run, StepPart.ACCUMULATION) < SHORT * 500
    assert "data" in [each.kind for each in found.suggestions]


def test_a_data_loader_between_forward_and_backward_is_no_loss(recorded: Recorded) -> None:
    [(run, _)] = recorded("loader_before_backward")
    assert usual(run, StepPart.LOADER) > 2 * SHORT * 800
    assert usual(run, StepPart.LOSS) < SHORT * 500


@pytest.mark.parametrize(
    ("kind", "since"),
    [
        ("loader_between_backwards", StepColumn.BEGIN),
        ("loader_before_backward", StepColumn.FORWARD_END),
    ],
)
def test_a_data_loader_inside_of_a_step_is_drawn_there(
    recorded: Recorded, kind: str, since: StepColumn
) -> None:
    [(run, _)] = recorded(kind)
    for timeline, wall in zip(run.timelines, rank_wall_times(run), strict=True):
        for row, drawn in enumerate(step_overlays(timeline, wall)):
            if not wall.times[StepPart.PAUSE][row]:  # as there may be on a busy machine
                loaders = [each for each in drawn if each.part is StepPart.LOADER]
                [own] = [each for each in loaders if each.start == timeline[since][row]]
                assert own.nanoseconds > SHORT * 800e6


def test_a_backward_has_neither_another_wrappers_gradients_nor_its_wait_for_other_ranks(
    recorded: Recorded,
) -> None:
    [critic] = [run for run, _ in recorded("shared_backward") if run.module == "Critic"]
    for rank in range(2):
        own = replace(critic, timelines=[critic.timelines[rank]])
        assert usual(own, StepPart.BACKWARD) < SHORT * 500
        assert usual(own, StepPart.OTHER_WRAPPERS) > SHORT * 800 * (1 + rank)
    early, _ = rank_part_times(critic)
    assert statistics.median(early[StepPart.WAITING]) > SHORT * 800e6


def test_forward_and_backward_in_a_closure_leave_the_rest_to_the_optimizer(recorded: Recorded) -> None:
    [(run, found)] = recorded("closure")
    assert found.parts["optimizer"] > SHORT * 900
    assert found.parts["data loading and other"] > 2 * SHORT * 800
    assert found.parts["before optimizer"] == 0
    for timeline in run.timelines:
        assert timeline[StepColumn.OPTIMIZER_START] == timeline[StepColumn.END]


def test_time_between_backward_and_optimizer_is_before_the_optimizer(recorded: Recorded) -> None:
    [(_, found)] = recorded("clipping")
    assert found.parts["before optimizer"] > SHORT * 900


def test_time_between_two_optimizers_is_not_in_an_optimizer(recorded: Recorded) -> None:
    [(run, found)] = recorded("two_optimizers")
    assert found.parts["before optimizer"] > SHORT * 900
    assert usual(run, StepPart.OPTIMIZER) < SHORT * 500


def test_a_data_loader_is_named_and_so_is_what_comes_before_it(recorded: Recorded) -> None:
    [(_, found)] = recorded("loader")
    assert found.parts["DataLoader"] > SHORT * 800
    assert found.parts["after optimizer"] > 2 * SHORT * 800


def analysed(run: Run, folder: Path) -> RunAnalysis:
    [(_, found)] = analyse_recording(write(run, folder))
    return found


# Steps of 35.8 ms; after every tenth, rank 0 evaluates for 450 ms.
EVALUATES = Run(ranks=2, steps=201, pauses=[PauseEvery(0, 450, 10, StepColumn.EVALUATION)])


def test_rates_and_shares_count_pauses_and_the_usual_step_does_not(tmp_path: Path) -> None:
    found = analysed(EVALUATES, tmp_path)
    assert found.step_ms == pytest.approx((35.8, 35.8, 35.8), abs=0.2)
    assert found.mean_step_ms == pytest.approx(35.8 + 45, abs=0.2)
    assert found.steps_per_second == pytest.approx(1000 / 80.8, rel=0.01)
    assert found.units_per_second == pytest.approx(64 * found.steps_per_second)
    assert found.parts["pauses"] == pytest.approx(45, abs=0.2)
    [pauses] = found.pauses
    assert (pauses.cause, list(pauses.ranks), pauses.others_wait) == ("evaluation", [0], True)
    assert (pauses.count, pauses.total_ms) == (20, pytest.approx(9000, abs=20))
    assert (pauses.longest_ms, pauses.share) == (pytest.approx(450, abs=1), pytest.approx(0.557, abs=0.002))
    assert found.summary.startswith(
        "Pauses take 56% of the wall time (evaluation on rank 0). A step takes 35.8 ms"
    )
    [advice] = [each for each in found.suggestions if each.kind == "pauses: evaluation"]
    assert advice.evidence.startswith(
        "20 pauses for evaluation on rank 0, 9.0 s together, the longest 450 ms"
    )
    assert advice.evidence.endswith(", while other ranks wait: 56% of the wall time")


def test_a_step_is_said_to_be_without_pauses_that_its_rate_has(tmp_path: Path) -> None:
    seldom = Run(ranks=1, steps=201, pauses=[PauseEvery(0, 200, 100, StepColumn.EVALUATION)])
    expected = "A step takes 35.8 ms without pauses, most of it in backward (56% of the usual step)"
    assert analysed(seldom, tmp_path / "some").summary.startswith(expected)
    without = analysed(replace(seldom, pauses=[]), tmp_path / "none").summary
    assert without.startswith("A step takes 35.8 ms, most of it in backward (56%)")


def test_pauses_of_two_causes_are_large_together(tmp_path: Path) -> None:
    pauses = [PauseEvery(0, 150, 40, StepColumn.EVALUATION), PauseEvery(0, 140, 49, StepColumn.SAVING)]
    found = analysed(Run(ranks=1, steps=201, pauses=pauses), tmp_path)
    assert found.summary.startswith("Pauses take 15% of the wall time (evaluation, checkpoint). ")
    assert {each.kind for each in found.suggestions} == {"pauses: evaluation", "pauses: checkpoint"}


def test_headline_and_suggestions_have_one_share(tmp_path: Path) -> None:
    # The ranks pause in turn, and each waits for the other.
    slow = [Slow(step // 10 % 2, 300, step, step + 1, "data") for step in range(10, 100, 10)]
    found = analysed(Run(ranks=2, steps=100, slow=slow), tmp_path)
    [pauses] = found.pauses
    assert (pauses.count, pauses.others_wait, list(pauses.ranks)) == (9, True, [0, 1])
    assert pauses.share == pytest.approx(found.parts["pauses"] / found.mean_step_ms)
    told = found.summary.split("%")[0].removeprefix("Pauses take ")
    [advice] = [each for each in found.suggestions if each.kind.startswith("pauses")]
    assert advice.evidence.endswith(f": {told}% of the wall time")


@pytest.mark.parametrize(
    ("run", "kind", "part"),
    [
        (Run(ranks=2, data=150), "between steps", "data loading and other"),
        (Run(ranks=2, loader=150), "data", "DataLoader"),
        (Run(ranks=2, loss=150), "loss", "loss"),
        (Run(ranks=2, join=150), "join", "waiting in join"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_headline_and_suggestion_have_one_share_of_the_usual_step(
    tmp_path: Path, run: Run, kind: str, part: str
) -> None:
    # Rank 0 spends more, and pauses once.
    slow = [
        Slow(0, 40, step, step + 1, part) for step in range(0, 60, 4) for part in ("data", "loader", "loss")
    ]
    once = Slow(0, 500, 31, 32, "data")
    found = analysed(replace(run, steps=60, slow=[*slow, once]), tmp_path)
    [told] = re.findall(r"\((\d+%)(?: of the usual step)?\)", found.summary)
    [advice] = [each for each in found.suggestions if each.kind == kind]
    assert f"({told} of a step)" in advice.evidence
    assert advice.saves_at_most_ms < found.parts[part]


def test_of_time_between_steps_a_part_has_another_name_than_all_of_it(tmp_path: Path) -> None:
    found = analysed(Run(ranks=1, steps=60, data=80, loader=20, logging=20), tmp_path)
    assert "most of it in data loading and other (52%)" in found.summary
    [advice] = [each for each in found.suggestions if each.kind == "between steps"]
    assert "(65% of a step) is spent between the optimizer and the next forward" in advice.evidence


def test_if_all_ranks_pause_at_once_or_nobody_has_to_wait_no_other_rank_waits(tmp_path: Path) -> None:
    at_once = [PauseEvery(rank, 450, 10) for rank in (0, 1)]
    [pauses] = analysed(Run(ranks=2, steps=61, pauses=at_once), tmp_path / "at once").pauses
    assert not pauses.others_wait
    # After step 39, rank 0 saves while rank 1 does something else.
    saves = PauseEvery(0, 450, 40, StepColumn.SAVING)
    meanwhile = Run(ranks=2, steps=61, pauses=[saves], slow=[Slow(1, 450, 39, 40, "data")])
    pauses = analysed(meanwhile, tmp_path / "meanwhile").pauses
    assert sorted(map(str, pauses)) == ["checkpoint on rank 0", "code outside of the wrapper on rank 1"]
    assert not any(each.others_wait for each in pauses)


def test_a_rank_that_waits_for_a_pause_has_no_other_name_for_it(tmp_path: Path) -> None:
    waiting = analysed(EVALUATES, tmp_path).ranks[1]
    assert waiting.parts["pauses"] == pytest.approx(45, abs=0.3)
    assert waiting.parts["waiting for the slowest rank"] < 1


def longer(rank: int, every: int, size: float) -> list[Slow]:
    """Every few steps, a batch of a rank is larger: so are forward, backward and, even more, loss."""
    lengths = {"forward": 8.0, "loss": 60.0, "backward": 20.0}
    return [
        Slow(rank, size * ms, step, step + 1, part)
        for step in range(every, 200, every)
        for part, ms in lengths.items()
    ]


def test_a_loss_that_grows_with_its_step_is_no_pause(tmp_path: Path) -> None:
    larger = [*longer(0, 5, 1), *longer(0, 21, 4), *longer(1, 7, 2)]
    found = analysed(Run(ranks=2, steps=200, slow=larger), tmp_path)
    assert found.pauses == []
    assert found.parts["pauses"] == 0


def test_time_between_forward_and_backward_is_a_pause_if_the_step_is_as_long_as_others(
    tmp_path: Path,
) -> None:
    seldom = [Slow(0, 300, step, step + 1, "loss") for step in range(10, 60, 10)]
    [pauses] = analysed(Run(ranks=1, steps=60, slow=seldom), tmp_path).pauses
    assert (pauses.cause, pauses.count) == ("code outside of the wrapper", 5)


def test_a_wait_is_a_pause_only_for_as_long_as_another_rank_pauses(tmp_path: Path) -> None:
    # In step 40, rank 0 has a batch that takes 2 s longer, and pauses for 100 ms.
    long = [Slow(0, 2000, 40, 41, "backward"), Slow(0, 100, 40, 41, "loss")]
    [paused, waiting] = analysed(Run(ranks=2, steps=60, slow=long), tmp_path).ranks
    assert paused.parts["pauses"] == pytest.approx(0)
    assert waiting.parts["pauses"] == pytest.approx(0)
    short = [Slow(0, 2000, 40, 41, "backward"), Slow(0, 100, 39, 40, "data")]
    [paused, waiting] = analysed(Run(ranks=2, steps=60, slow=short), tmp_path / "short").ranks
    assert paused.parts["pauses"] * 59 == pytest.approx(100, abs=1)
    assert waiting.parts["pauses"] * 59 == pytest.approx(100, abs=1)
    assert waiting.parts["waiting for the slowest rank"] * 59 == pytest.approx(2000, abs=5)


@pytest.mark.parametrize(
    ("column", "cause"),
    [
        (StepColumn.SAVING, "checkpoint"),
        (StepColumn.EVALUATION, "evaluation"),
        (StepColumn.LOADER, "data"),
        (StepColumn.OTHERS, "another wrapper"),
        (StepColumn.OTHER_OPTIMIZERS, "training of another model"),
        (None, "code outside of the wrapper"),
    ],
)
def test_what_was_recorded_in_a_pause_is_its_cause(
    tmp_path: Path, column: StepColumn | None, cause: str
) -> None:
    found = analysed(Run(ranks=1, steps=60, pauses=[PauseEvery(0, 450, 10, column)]), tmp_path)
    assert [each.cause for each in found.pauses] == [cause]


def test_another_wrapper_in_every_step_is_named_and_is_no_pause(tmp_path: Path) -> None:
    others = [PauseEvery(rank, 100, 1, StepColumn.OTHERS) for rank in (0, 1)]
    write(Run(ranks=2, steps=60, pauses=others, slow=[Slow(0, 400, 30, 31, "data")]), tmp_path)
    write(Run(ranks=2, steps=60, module="Critic", wrapper=1), tmp_path)
    found = analyse_recording(tmp_path)[0][1]
    assert found.parts["other wrappers"] == pytest.approx(100 * 58 / 59, abs=0.1)
    assert "most of it in other wrappers (73% of the usual step, Critic)" in found.summary
    assert "data" not in [each.kind for each in found.suggestions]
    # The one that is there was for something else.
    assert [(each.cause, each.count) for each in found.pauses] == [("code outside of the wrapper", 1)]


def test_another_wrapper_that_usually_works_may_take_longer_once(tmp_path: Path) -> None:
    often, once = PauseEvery(0, 90, 1, StepColumn.OTHERS), PauseEvery(0, 400, 20, StepColumn.OTHERS)
    assert analysed(Run(ranks=1, steps=60, pauses=[often, once]), tmp_path / "both").pauses == []
    found = analysed(Run(ranks=1, steps=60, pauses=[once]), tmp_path / "once")
    assert [each.cause for each in found.pauses] == ["another wrapper"]


@pytest.mark.parametrize(
    ("column", "part"),
    [(StepColumn.SAVING, "torch.save"), (StepColumn.EVALUATION, "forward without gradients")],
)
def test_what_is_too_short_for_a_pause_has_a_name(tmp_path: Path, column: StepColumn, part: str) -> None:
    # Usual steps of 35.8 ms.
    found = analysed(Run(ranks=1, steps=60, pauses=[PauseEvery(0, 34, 2, column)]), tmp_path)
    assert found.pauses == []
    assert found.parts[part] == pytest.approx(34 * 29 / 59, abs=0.1)
    assert found.parts["data loading and other"] == pytest.approx(2, abs=0.1)


def test_waiting_in_join_comes_first_if_it_is_most(tmp_path: Path) -> None:
    kinds = {(step, rank): StepKind.NO_INPUTS for step in range(30) for rank in range(2)}
    found = analysed(Run(ranks=2, steps=30, kinds=kinds, data=50), tmp_path)
    assert found.parts["data loading and other"] == 0
    assert "is waiting in join" in found.summary


def test_what_takes_long_in_every_step_or_is_short_is_no_pause(tmp_path: Path) -> None:
    assert analysed(Run(ranks=2, steps=60, data=500), tmp_path / "long").pauses == []
    short = Run(ranks=2, steps=60, pauses=[PauseEvery(0, 30, 10)])
    assert analysed(short, tmp_path / "short").pauses == []


def test_the_time_in_which_ranks_are_replaced_is_a_pause(tmp_path: Path) -> None:
    [(run, found)] = analyse_recording(write_healed(Run(ranks=2, steps=60), tmp_path, [(20, 1)], pause=700))
    assert [(each.cause, each.count) for each in found.pauses] == [("healing", 1)]
    for timeline, rank in zip(run.timelines, found.ranks, strict=True):
        assert sum(rank.parts.values()) * len(timeline) == pytest.approx(wall_ms(timeline), rel=1e-6)


# The buckets change at step 60, and rank 0 pauses for 3 s after step 30.
CHANGES_PLAN = Run(ranks=2, steps=140, other_plan_from=60, slow=[Slow(0, 3000, 30, 31, "data")])


def test_steps_with_another_plan_are_in_the_wall_time(tmp_path: Path) -> None:
    [(run, found)] = analyse_recording(write(CHANGES_PLAN, tmp_path))
    assert [timeline[StepColumn.STEP] for timeline in run.timelines] == [[*range(1, 140)]] * 2
    assert [(plan.steps, plan.buckets) for plan in run.plans] == [(1, 1), (59, 4), (80, 2)]
    assert [(each.cause, each.count) for each in found.pauses] == [("code outside of the wrapper", 1)]
    for timeline, rank in zip(run.timelines, found.ranks, strict=True):
        assert sum(rank.parts.values()) * 139 == pytest.approx(wall_ms(timeline), rel=1e-6)
    assert found.steps_per_second == pytest.approx(139 / found.wall_ms * 1e3)
    assert (found.figures_from_step, found.figures_to_step, found.figures_steps) == (1, 139, 139)


def test_communication_is_that_of_the_steps_with_buckets(tmp_path: Path) -> None:
    changes = Run(ranks=2, steps=140, other_plan_from=80)
    found = analysed(changes, tmp_path / "changes")
    whole = analysed(Run(ranks=2, steps=140), tmp_path / "whole")
    assert found.communication_ms == pytest.approx(whole.communication_ms, rel=0.01)
    assert found.overlap == pytest.approx(whole.overlap, rel=0.01)


def test_it_is_told_of_which_steps_the_figures_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.recording.ring_buffer._BYTES_OF_ROWS", 0)  # 16 rows
    write(replace(CHANGES_PLAN, steps=900), tmp_path)
    told = CliRunner().invoke(main, ["report", str(tmp_path)]).output
    assert "900 steps, 28 steps/s, 1,793 samples/s (figures of steps 884 to 899)" in told
    [found] = json.loads(CliRunner().invoke(main, ["report", str(tmp_path), "--json"]).stdout)
    of = [found[f"figures_{each}"] for each in ("from_step", "to_step", "steps")]
    assert (found["steps"], of) == (900, [884, 899, 16])


def test_terminal_and_json_tell_the_pauses(tmp_path: Path) -> None:
    write(EVALUATES, tmp_path)
    told = CliRunner().invoke(main, ["report", str(tmp_path)]).output
    assert "12.4 steps/s" in told
    assert "pauses" in told
    assert "56%" in told
    [found] = json.loads(CliRunner().invoke(main, ["report", str(tmp_path), "--json"]).stdout)
    assert found["pauses"][0]["cause"] == "evaluation"
    assert sum(found["parts"].values()) == pytest.approx(found["wall_ms"] / 200, rel=1e-3)


def lose_last(folder: Path, *, ms: int, kind: StepKind) -> None:
    """The last step of rank 0 is lost, after it has waited in vain; rank 1 has not ended it."""
    for rank in range(2):
        path = folder / f"rank{rank}-wrapper0-plan1.rows"
        cells = array("q", path.read_bytes())
        rows = len(Header) + cells[Header.SUM_CAPACITY] * len(SumColumn)
        last = rows + (cells[Header.ROWS] - 1) * cells[Header.COLUMNS]
        for column in (StepColumn.ALL_REDUCED, StepColumn.OPTIMIZER_START, StepColumn.OPTIMIZER_END):
            cells[last + column] = 0
        cells[last + StepColumn.OPTIMIZER] = 0
        cells[last + StepColumn.KIND] = kind
        cells[last + StepColumn.END] = cells[last + StepColumn.BACKWARD_END] + ms * 1_000_000
        if rank == 1:
            cells[Header.ROWS] -= 1
        path.write_bytes(cells.tobytes())


@pytest.mark.parametrize("kind", [StepKind.LOST, StepKind.LOST | StepKind.NO_INPUTS])
def test_the_wait_in_a_lost_step_is_a_pause_and_no_exposed_communication(
    tmp_path: Path, kind: StepKind
) -> None:
    lose_last(write(Run(ranks=2, steps=60), tmp_path), ms=6000, kind=kind)
    [(run, found)] = analyse_recording(tmp_path)
    [pauses] = found.pauses
    assert (pauses.cause, list(pauses.ranks), pauses.count) == ("lost steps", [0], 1)
    assert (pauses.longest_ms, pauses.longest_step) == (pytest.approx(6000), 59)
    assert found.parts["exposed communication"] == pytest.approx(2, abs=0.1)
    assert found.summary.startswith("Pauses take ")
    kinds = [each.kind for each in found.suggestions]
    assert "pauses: lost steps" in kinds
    assert "lost" not in kinds
    for timeline, rank in zip(run.timelines, found.ranks, strict=True):
        assert sum(rank.parts.values()) * len(timeline) == pytest.approx(wall_ms(timeline), rel=1e-6)
    [own] = rank_wall_times(run)[0].pauses
    assert own.start == run.timelines[0][StepColumn.BACKWARD_END][-1]


def test_a_short_wait_in_a_lost_step_is_no_pause(tmp_path: Path) -> None:
    lose_last(write(Run(ranks=2, steps=60), tmp_path), ms=20, kind=StepKind.LOST)
    [(_, found)] = analyse_recording(tmp_path)
    assert found.pauses == []
    assert "lost" in [each.kind for each in found.suggestions]


def test_a_lost_steps_wait_for_a_rank_that_paused_counts_once(tmp_path: Path) -> None:
    pause = Slow(1, 3000, 58, 59, "data")
    lose_last(write(Run(ranks=2, steps=60, buffers=1.0, slow=[pause]), tmp_path), ms=6000, kind=StepKind.LOST)
    [(run, found)] = analyse_recording(tmp_path)
    waiting = rank_wall_times(run)[0]
    [own] = waiting.pauses
    assert (str(own.cause), own.nanoseconds) == ("lost steps", pytest.approx(9001e6, rel=1e-3))
    assert waiting.paused == sum(waiting.times[StepPart.PAUSE])
    assert min(map(min, waiting.times.values())) >= 0
    assert sum(found.ranks[0].parts.values()) * 59 == pytest.approx(wall_ms(run.timelines[0]), rel=1e-6)
