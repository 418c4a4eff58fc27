"""The simulated step: what waits for what, on the link and on a rank's thread."""

import pytest

from paceline.tools.plan.simulation import (
    BucketWork,
    HookStage,
    HostLink,
    MessageRounds,
    SlowestTimes,
    simulate_step,
)

MB = 1e6


def link(latency: float = 0.0) -> HostLink:
    return HostLink(bytes_per_second=MB, latency=latency)


def plain(*nbytes: float, rounds: int = 2) -> list[BucketWork]:
    return [
        BucketWork(0.0, [HookStage(0.0, [MessageRounds(rounds, each / rounds)])], 0.0, 0.0) for each in nbytes
    ]


def step(
    times: SlowestTimes, work: list[BucketWork], *, latency: float = 0.0, has_hook: bool = False
) -> float:
    return simulate_step(times, work, link(latency), has_hook=has_hook, report=None)


def test_an_exchange_that_fits_into_backward_is_hidden() -> None:
    assert step(SlowestTimes([1.0, 5.0], 5.0), plain(2 * MB, 0.0)) == pytest.approx(5.0)


def test_what_is_left_after_backward_is_exposed() -> None:
    assert step(SlowestTimes([1.0, 5.0], 5.0), plain(6 * MB, 1 * MB)) == pytest.approx(8.0)


def test_buckets_share_one_link() -> None:
    assert step(SlowestTimes([0.0, 0.0, 0.0], 0.0), plain(MB, MB, MB)) == pytest.approx(3.0)


def test_rounds_of_one_collective_wait_for_each_other_but_not_those_of_two() -> None:
    alone = step(SlowestTimes([0.0], 0.0), plain(2.0, rounds=4), latency=1.0)
    together = step(SlowestTimes([0.0, 0.0], 0.0), plain(2.0, 2.0, rounds=4), latency=1.0)
    assert alone == pytest.approx(4.0, abs=1e-4)
    assert together == pytest.approx(4.0, abs=1e-4)


def test_a_third_collective_waits_for_one_of_two_threads() -> None:
    three = step(SlowestTimes([0.0] * 3, 0.0), plain(2.0, 2.0, 2.0, rounds=4), latency=1.0)
    assert three == pytest.approx(8.0, abs=1e-4)


def test_many_rounds_take_as_long_as_they_do_one_by_one() -> None:
    for rounds in (33, 126, 2046):
        together = step(SlowestTimes([0.0], 0.0), plain(MB, rounds=rounds), latency=1e-3)
        assert together == pytest.approx(1 + 1e-3 * rounds)


def test_an_exchange_of_nothing_without_latency_ends() -> None:
    assert step(SlowestTimes([0.0], 1.0), plain(0.0)) == 1.0


def test_sums_inside_the_host_delay_later_gradients() -> None:
    work = [BucketWork(0.5, [], 0.0, 0.25), BucketWork(0.5, [], 0.0, 0.25)]
    assert step(SlowestTimes([1.0, 2.0], 2.0), work) == pytest.approx(2.0 + 2 * 0.5 + 2 * 0.25)


def test_sums_that_were_recorded_are_not_done_twice() -> None:
    # Each bucket is summed and spread for a second, which backward's times contain; the averages come later.
    work = [BucketWork(0.75, [], 0.0, 0.25, recorded_seconds=1.0)] * 2
    assert step(SlowestTimes([1.0, 3.0], 4.0, averaged=4.5), work) == pytest.approx(4.5)
    # Twice as many ranks: twice as much is summed.
    more = [BucketWork(1.5, [], 0.0, 0.5, recorded_seconds=1.0)] * 2
    assert step(SlowestTimes([1.0, 3.0], 4.0, averaged=4.5), more) == pytest.approx(6.5)


def test_without_recorded_sums_an_exchange_begins_as_early_as_recorded() -> None:
    # The last bucket was ready at 3, of which one second was for the sum of the first.
    stages = [HookStage(0.0, [MessageRounds(1, MB)])]
    work = [BucketWork(0.0, stages, 0.0, 0.0, recorded_seconds=1.0)] * 2
    assert step(SlowestTimes([1.0, 3.0], 4.0), work) == pytest.approx(3.0)


def hooked(encode: float, nbytes: float, decode: float) -> BucketWork:
    return BucketWork(0.0, [HookStage(encode, [MessageRounds(1, nbytes)])], decode, 0.0)


def test_a_hook_begins_when_the_next_bucket_is_launched() -> None:
    # Ready at 1, begun at 4, one second of encoding, two on the link.
    work = [hooked(1.0, 2 * MB, 0.0), hooked(0.0, 0.0, 0.0)]
    assert step(SlowestTimes([1.0, 4.0], 4.0), work, has_hook=True) == pytest.approx(7.0)


def test_a_hooks_second_collective_waits_for_all_first_ones() -> None:
    two = BucketWork(
        0.0, [HookStage(0.0, [MessageRounds(1, MB)]), HookStage(0.0, [MessageRounds(1, MB)])], 0.0, 0.0
    )
    # First collectives at 0 and 1 o'clock; then bucket 0 sends behind bucket 1, and bucket 1 after it.
    assert step(SlowestTimes([0.0, 0.0], 0.0), [two, two], has_hook=True) == pytest.approx(4.0)


def test_decoding_goes_one_bucket_after_the_other() -> None:
    work = [hooked(0.0, MB, 2.0), hooked(0.0, MB, 2.0)]
    assert step(SlowestTimes([0.0, 0.0], 0.0), work, has_hook=True) == pytest.approx(5.0)


def test_the_report_of_a_step_with_a_hook_is_one_more_collective() -> None:
    times, work = SlowestTimes([0.0], 0.0), [hooked(0.0, 0.0, 0.0)]
    assert simulate_step(
        times, work, link(0.5), has_hook=True, report=MessageRounds(2, 0.0)
    ) == pytest.approx(1.5)
