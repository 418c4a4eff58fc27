"""Outer steps between two hosts beside exact averages: final loss, bytes, step time, and a host that stops.

python benchmarks/outer.py [--parts loss times stop] [--rate RATE] [--steps N] [--seeds N] [--rounds N]
                           [--period N] [--quick] [--json FILE] [--figures FILE]

Two network namespaces stand for hosts, with two ranks each and a link of limited rate between them. All train
a small transformer on text made on the spot, on the same batches with AdamW. Bytes are counted at the link,
of the host that sent more. What exact averages end with does not depend on the link, so in "loss" they have
a link without a limit, to save time. In "times", three sides take turns of a whole period each: exact
averages, the outer loop, and hosts that train alone, as if there were no network. In "stop", one host's
processes are stopped for 20 seconds. Needs root, to make the namespaces.
"""

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from language_training import LanguageModel, batches, encode, loss_of, make_text, test_loss
from targets import Row, add_output_options, report, save_figures
from torch import nn

import paceline
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts, sent_bytes, why_not
from paceline.tools.bench.measure import Turn, ratio, size, slowest, take_turns, timing

RANKS = 2  # per host
WORLD = 2 * RANKS
EXACT, OUTER, ALONE = "exact averages", "outer loop", "no network"
TIMEOUT_SECONDS = 7200.0
STOP_SECONDS = 20.0
GRACE_SECONDS = 2.0
CHARACTERS = 400_000
LEARNING_RATE = 1e-3
LOSS_TARGET, FEWER_TARGET, FEWER_AIM, STEP_TARGET = 1.01, 100, 400, 1.05


class Training:
    """One side's training on one rank."""

    def __init__(self, side: str, seed: int, rank: int, period: int, **options: Any) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.net = LanguageModel()
        self.ddp = paceline.DistributedDataParallel(self.net)
        self.outer = None
        if side == OUTER:
            self.outer = paceline.OuterLoop(self.ddp, period=period, **options)
        elif side == ALONE:
            self.ddp._update_process_group(dist.new_subgroups(RANKS)[0])
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=LEARNING_RATE)
        self._batches = batches(encode(make_text(CHARACTERS, seed=seed)), seed=seed, rank=rank)

    def step(self) -> None:
        loss_of(self.ddp, *next(self._batches)).backward()
        self.optimizer.step()
        if self.outer is not None:
            self.outer.step()
        self.optimizer.zero_grad()

    def finish(self) -> nn.Module:
        if self.outer is not None:
            self.outer.finish()
        return self.net


def train(rank: int, hosts: Hosts, side: str, seed: int, steps: int, period: int) -> tuple[float, float]:
    """The final loss, and the bytes per step that this rank's host has sent."""
    with hosts.group(rank, world=WORLD, host=rank // RANKS):
        training = Training(side, seed, rank, period)
        before = sent_bytes()
        for _ in range(steps):
            training.step()
        net = training.finish()
        sent = (sent_bytes() - before) / steps
        return test_loss(net, encode(make_text(CHARACTERS // 10, seed=seed + 1_000))), sent


def loss_rows(rate: str, steps: int, seeds: int, period: int) -> list[Row]:
    losses: dict[str, list[float]] = {EXACT: [], OUTER: []}
    sent: dict[str, list[float]] = {EXACT: [], OUTER: []}
    for seed in range(seeds):
        for side in losses:
            with Hosts() as hosts:
                if side == OUTER:
                    hosts.limit(rate)
                ranks = run_ranks(
                    train,
                    WORLD,
                    args=(hosts, side, seed, steps, period),
                    timeout=TIMEOUT_SECONDS,
                    backend=None,
                )
            assert len({loss for loss, _ in ranks}) == 1, "ranks end with different models"
            losses[side].append(ranks[0][0])
            sent[side].append(max(each for _, each in ranks))
            print(f"seed {seed}, {side}: loss {losses[side][-1]:.4f}", file=sys.stderr)
    ratios = [ours / theirs for ours, theirs in zip(losses[OUTER], losses[EXACT], strict=True)]
    case: dict[str, str | int] = {"quantity": "loss", "steps": steps, "period": period}
    what = f"final loss after {steps} steps, means over {seeds} seeds"
    found = [
        Row(
            what,
            {},
            side,
            statistics.mean(values),
            None,
            spread=(min(values), max(values)),
            case=case,
        )
        for side, values in losses.items()
    ]
    mean = statistics.mean(ratios)
    spread = min(ratios), max(ratios)
    found.append(Row(what, {}, "outer / exact", mean, LOSS_TARGET, spread=spread, case=case))
    fewer = statistics.median(sent[EXACT]) / statistics.median(sent[OUTER])
    sizes = {side: size(values) for side, values in sent.items()}
    for figure, target in (("exact / outer", FEWER_TARGET), ("exact / outer, aim", FEWER_AIM)):
        found.append(
            Row("bytes sent per step and host", sizes, figure, fewer, target, at_most=False, case=case)
        )
    return found


def times_on_rank(rank: int, hosts: Hosts, rounds: int, period: int) -> dict[str, list[Turn]]:
    with hosts.group(rank, world=WORLD, host=rank // RANKS):
        sides = {side: Training(side, 0, rank, period) for side in (EXACT, OUTER, ALONE)}
        steps = {side: each.step for side, each in sides.items()}
        turns = take_turns(steps, rounds=rounds, calls=period, before=dist.barrier)
        for each in sides.values():
            each.finish()
        return turns


def time_rows(rate: str, rounds: int, period: int) -> list[Row]:
    with Hosts() as hosts:
        hosts.limit(rate)
        ranks = run_ranks(
            times_on_rank, WORLD, args=(hosts, rounds, period), timeout=TIMEOUT_SECONDS, backend=None
        )
    wall = slowest([_of_turns(turns, lambda turn: turn.mean_seconds) for turns in ranks])
    # A process's CPU time in a turn is that side's, but for what is exchanged later.
    each_cpu = [_of_turns(turns, lambda turn: turn.mean_cpu) for turns in ranks]
    cpu = {side: [sum(turn) for turn in zip(*(own[side] for own in each_cpu), strict=True)] for side in wall}
    return [
        time_row(f"step at {rate}", wall, STEP_TARGET, {"quantity": "step", "rate": rate, "period": period}),
        time_row(
            f"CPU time of a step at {rate}, all ranks",
            cpu,
            None,
            {"quantity": "cpu", "rate": rate, "period": period},
        ),
    ]


def _of_turns(turns: Mapping[str, Sequence[Turn]], value: Callable[[Turn], float]) -> dict[str, list[float]]:
    return {side: [value(turn) for turn in of_side] for side, of_side in turns.items()}


def time_row(
    what: str, seconds: Mapping[str, Sequence[float]], target: float | None, case: dict[str, str | int]
) -> Row:
    value, spread = ratio(seconds[OUTER], seconds[ALONE])
    times = {side: timing(values) for side, values in seconds.items()}
    return Row(what, times, "outer / no network", value, target, spread=spread, case=case)


def stopped_on_rank(rank: int, hosts: Hosts, period: int) -> tuple[list[float], int, list[int], float]:
    """Seconds of each step, the rounds decided, the hosts seen at the end, and a sum of the final model."""
    with hosts.group(rank, world=WORLD, host=rank // RANKS):
        training = Training(OUTER, 0, rank, period, grace=GRACE_SECONDS)
        outer = training.outer
        assert outer is not None
        seconds: list[float] = []
        if rank >= RANKS:
            _stop_later(STOP_SECONDS)
        began = time.monotonic()
        while not _all_say(rank, training, time.monotonic() - began >= 2.5 * STOP_SECONDS):
            start = time.monotonic()
            training.step()
            seconds.append(time.monotonic() - start)
        hosts_seen = outer.hosts
        rounds = 0 if outer._exchange is None else outer._exchange.rounds.decided
        if outer._exchange is not None:  # the other host may have finished a moment ago
            kept = [[*each.changes] for each in outer._exchange.rounds._kept.values()]
            assert [0, 1] in kept, f"no round counted both hosts after one was stopped (rounds: {kept})"
        net = training.finish()
        return (
            seconds,
            rounds,
            hosts_seen,
            sum(float(each.detach().double().sum()) for each in net.parameters()),
        )


def _all_say(rank: int, training: Training, is_over: bool) -> bool:  # noqa: FBT001
    """Whether the first rank of this host says that it is over, so that its ranks do as many steps."""
    flag = torch.tensor([float(is_over and rank % RANKS == 0)])
    dist.all_reduce(flag, group=training.ddp.process_group)
    return bool(flag)


def _stop_later(seconds: float) -> None:
    """Stop this process in a while, and have another one continue it."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds / 2)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)


def stop_rows(rate: str, period: int) -> list[Row]:
    with Hosts() as hosts:
        hosts.limit(rate)
        ranks = run_ranks(stopped_on_rank, WORLD, args=(hosts, period), timeout=TIMEOUT_SECONDS, backend=None)
    seconds = ranks[0][0]
    print(
        f"rounds decided: {[ranks[0][1], ranks[RANKS][1]]}, hosts seen at the end: "
        f"{[ranks[0][2], ranks[RANKS][2]]}, equal models: {len({rank[3] for rank in ranks}) == 1}",
        file=sys.stderr,
    )
    assert len({rank[3] for rank in ranks}) == 1, "hosts end with different models"
    return [
        Row(
            f"steps of the other host while one is stopped for {STOP_SECONDS:g} s",
            {"outer loop": timing(seconds)},
            "longest step, seconds",
            max(seconds[2:]),
            GRACE_SECONDS,
            case={"quantity": "stop", "period": period},
        )
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure outer steps between hosts.")
    parser.add_argument(
        "--parts", nargs="+", choices=("loss", "times", "stop"), default=["loss", "times", "stop"]
    )
    parser.add_argument("--rate", default="100mbit", help="rate of the link, each way (default: 100mbit)")
    parser.add_argument("--steps", type=int, default=1500, help="steps of each training (default: 1500)")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each side (default: 5)")
    parser.add_argument("--rounds", type=int, default=8, help="timed turns of each side (default: 8)")
    parser.add_argument("--period", type=int, default=64, help="steps per outer step (default: 64)")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that all works")
    add_output_options(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.seeds, arguments.rounds, arguments.period = 32, 2, 2, 8
    if (reason := why_not()) is not None:
        parser.error(f"no hosts can be made: {reason}")
    return arguments


def main() -> None:
    arguments = parse()
    rate, period = arguments.rate, arguments.period
    measure = {
        "loss": lambda: loss_rows(rate, arguments.steps, arguments.seeds, period),
        "times": lambda: time_rows(rate, arguments.rounds, period),
        "stop": lambda: stop_rows(rate, period),
    }
    rows: list[Row] = []
    for part in arguments.parts:
        found = measure[part]()
        save_figures(arguments.figures, f"outer_{part}", found)
        rows += found
    report("Two hosts with two ranks each: outer steps and exact averages", rows, arguments.json)


if __name__ == "__main__":
    main()
