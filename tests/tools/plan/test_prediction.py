"""Predictions: stragglers that are drawn, the outer loop, and which hook is taken."""

import random
from dataclasses import dataclass

import pytest

from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.prediction import Prediction, choose, draw_steps, predict
from paceline.tools.plan.recorded_steps import BucketSizes, RankStep, RecordedSteps
from paceline.tools.plan.simulation import BucketWork, HookStage, MessageRounds


def recorded(steps: list[list[float]]) -> RecordedSteps:
    """Steps with one bucket of a million elements, which is ready when backward ends."""
    rows = [[RankStep((end,), end) for end in ranks] for ranks in steps]
    return RecordedSteps("Net", len(steps[0]), len(steps[0]), [BucketSizes((0,), (1_000_000,))], rows, 1.0, 1)


@dataclass(frozen=True)
class Cost:
    seconds: float
    nbytes: int


@dataclass(frozen=True)
class MadeUpCosts:
    """A hook sends a quarter of the bytes, and works a tenth of a second for it."""

    outer_seconds: float = 0.64
    report_cost: Cost = Cost(0.0, 0)

    def work(self, hook: str, hosts: int) -> list[BucketWork]:
        if hosts == 1:
            return [BucketWork(0.0, [], 0.0, 0.0)]
        stage = (
            HookStage(0.0, [MessageRounds(2, 2e6)])
            if hook == "none"
            else HookStage(0.1, [MessageRounds(1, 1e6)])
        )
        return [BucketWork(0.0, [stage], 0.0, 0.0)]

    def report(self, hosts: int) -> Cost:  # noqa: ARG002  # as it is with two
        return self.report_cost

    def outer(self, hosts: int) -> Cost:  # noqa: ARG002  # as it is with two
        return Cost(self.outer_seconds, 515_600)


def cluster(*hosts: int, link: float = 8e9, cores: int | None = None) -> Cluster:
    return Cluster(hosts, 2, link, 0.0, cores)


def prediction(hook: str, step_ms: float) -> Prediction:
    return Prediction(2, hook, step_ms, step_ms, step_ms, 1.0, 0.0, 0.0, 0.0, 0.0, 0.5)


def test_more_ranks_wait_for_slower_ranks() -> None:
    times = recorded([[1.0, 1.0]] * 19 + [[1.0, 3.0]])
    few, many = ([each.backward_end for each in draw_steps(times, ranks=ranks)] for ranks in (2, 2_000))
    assert sum(few) / len(few) < 1.5
    assert many == [3.0] * len(many)


def test_of_the_last_drawn_step_only_the_ranks_that_are_left_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random.Random, "choices", lambda _, numbers, k: numbers[:k])
    times = recorded([[1.0, 1.0], [1.0, 9.0]] * 4)
    assert {each.backward_end for each in draw_steps(times, ranks=3)} == {1.0}
    assert {each.backward_end for each in draw_steps(times, ranks=4)} == {9.0}


def test_for_very_many_ranks_every_recorded_step_is_drawn() -> None:
    times = recorded([[1.0, 1.0]] * 19 + [[1.0, 3.0]])
    assert {each.backward_end for each in draw_steps(times, ranks=10**15)} == {3.0}


def test_a_bucket_is_ready_when_the_last_rank_has_it_ready() -> None:
    times = recorded([[1.0, 2.0]] * 8)
    assert {each.ready[0] for each in draw_steps(times, ranks=2)} == {2.0}


def test_ranks_that_recorded_together_are_drawn_together() -> None:
    # In each step one of the two is slow: never both, never neither.
    times = recorded([[1.0, 2.0], [2.0, 1.0]] * 8)
    assert {each.backward_end for each in draw_steps(times, ranks=2)} == {2.0}


def test_a_slower_link_exposes_what_it_has_to_carry() -> None:
    times = recorded([[1.0, 1.0]] * 8)
    [fast] = predict(times, cluster(2, link=8e9), ["none"], MadeUpCosts())
    [slow] = predict(times, cluster(2, link=8e6), ["none"], MadeUpCosts())
    assert fast.exposed_ms == pytest.approx(4.0, rel=0.05)
    assert slow.exposed_ms == pytest.approx(4_000, rel=0.05)
    assert slow.efficiency == pytest.approx(0.2, rel=0.05)


def test_an_outer_exchange_that_fits_costs_its_work_where_no_core_is_free() -> None:
    times = recorded([[1.0, 1.0]] * 8)
    # Of a core that two ranks share, the thread's 0.64 s take 0.32 s.
    [each] = predict(times, cluster(2, cores=1), ["outer"], MadeUpCosts())
    assert each.step_ms == pytest.approx(1_005)
    assert each.sent_bytes == pytest.approx(515_600 / 64)
    assert each.hook_ms == pytest.approx(10)


def test_one_host_has_no_outer_exchange() -> None:
    [each] = predict(recorded([[1.0, 1.0]] * 8), cluster(1, cores=1), ["outer"], MadeUpCosts())
    assert (each.step_ms, each.sent_bytes, each.hook_ms) == (pytest.approx(1_000), 0, 0)


def test_a_report_is_sent_after_the_hook_and_read_by_every_rank() -> None:
    times, costs = recorded([[1.0, 1.0]] * 8), MadeUpCosts(report_cost=Cost(0.25, 8_000_000))
    [before] = predict(times, cluster(2, link=8e8), ["int8"], MadeUpCosts())
    [each] = predict(times, cluster(2, link=8e8), ["int8"], costs)
    on_the_link = 8_000_000 / (1e8 * 1448 / 1514)
    assert each.step_ms - before.step_ms == pytest.approx(250 + 1e3 * on_the_link)
    assert each.sent_bytes - before.sent_bytes == pytest.approx(8_000_000)
    assert each.hook_ms - before.hook_ms == pytest.approx(250)


def test_an_outer_exchange_that_finds_a_free_core_costs_nothing() -> None:
    [each] = predict(recorded([[1.0, 1.0]] * 8), cluster(2, cores=4), ["outer"], MadeUpCosts())
    assert each.step_ms == pytest.approx(1_000)


def test_an_outer_exchange_that_does_not_fit_into_its_period_sets_the_pace() -> None:
    [each] = predict(recorded([[0.01, 0.01]] * 8), cluster(1025, link=8e6), ["outer"], MadeUpCosts(0.0))
    assert each.step_ms == pytest.approx(1e3 * 1024 * 0.5156 / 64 * 1514 / 1448, rel=0.01)


def test_one_thread_does_an_outer_exchange_even_if_other_cores_are_free() -> None:
    [each] = predict(recorded([[0.01, 0.01]] * 8), cluster(2, cores=4), ["outer"], MadeUpCosts(64 * 0.05))
    assert each.step_ms == pytest.approx(50)


def test_the_fastest_hook_is_taken() -> None:
    [choice] = choose([prediction("none", 100.0), prediction("int8", 50.0)])
    assert (choice.hook, choice.why) == ("int8", "a step takes 50% of the next best (none)")


def test_of_hooks_that_are_about_equally_fast_the_most_exact_is_taken() -> None:
    [choice] = choose([prediction("none", 100.0), prediction("int8", 97.0)])
    assert (choice.hook, choice.why) == ("none", "int8 is less than 5% faster, and coarser")
