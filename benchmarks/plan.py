"""Holds what ``paceline plan`` predicts from one host against steps that are measured on two.

python benchmarks/plan.py [--models NAME ...] [--rates RATE ...] [--hooks NAME ...] [--rounds N] [--quick]
                          [--json FILE] [--figures FILE]

Two network namespaces stand for hosts, with two ranks each and a link of limited rate between them. A step is
zero_grad, forward, backward and plain SGD. Each rank has one thread. One more wrapper of the same four ranks,
all in shared memory as on one host, is recorded. The prediction for two hosts is made from that alone. All
wrappers take turns, so that a slow moment of the machine affects the recording and what it is held against.

All ranks share this machine's cores, while recorded and while measured. So the recording has as many ranks as
both hosts together, and the prediction is told that a host has half of the cores. Needs root, to make the
namespaces. The model "transformer" and the rate 300mbit are held out: the simulation was written without
them.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from hosts import LINKED
from links import Step, stepper
from targets import Row, add_output_options, report, save_figures

import paceline
from paceline import hooks
from paceline.comm.shm.local_ranks import HOST_VARIABLE
from paceline.recording.recorder import FOLDER_VARIABLE
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts, why_not
from paceline.tools.bench.measure import samples, slowest, timing
from paceline.tools.bench.models import Model
from paceline.tools.plan.calibration import Calibration
from paceline.tools.plan.cluster import Cluster, parse_link
from paceline.tools.plan.prediction import OUTER_PERIOD, predict
from paceline.tools.plan.recorded_steps import RecordedSteps, read_steps

HOSTS = 2
RANKS = 2  # per host
WORLD = HOSTS * RANKS
STEPS = 4  # per turn
TIMEOUT_SECONDS = 3600.0
TARGET = 0.15
HELD_OUT_TARGET = 0.20
HELD_OUT = ("transformer", "300mbit")
RATES = ("100mbit", "1gbit", "300mbit")
LATENCY_SECONDS = 50e-6  # of a small message between two namespaces
NAMED_HOOKS: Mapping[str, Callable[[], hooks.Hook]] = {"fp16": hooks.fp16, "int8": hooks.int8}
RECORDED = "recorded"
CHOICES = ("none", *NAMED_HOOKS, "outer")


def wrap(model: Model, group: dist.ProcessGroup | None = None) -> paceline.DistributedDataParallel:
    torch.manual_seed(0)
    return paceline.DistributedDataParallel(model.build(), process_group=group)


def batch_of(model: Model, rank: int) -> torch.Tensor:
    torch.manual_seed(rank)
    return torch.randn(model.shape)


def recorded_side(folder: str, hosts: Hosts, model: Model, batch: torch.Tensor) -> Step:
    """All ranks as on one host, and recorded."""
    own = os.environ[HOST_VARIABLE]
    os.environ |= {HOST_VARIABLE: hosts.names[0], FOLDER_VARIABLE: folder}
    step = stepper(wrap(model, dist.new_group()), batch, [])
    os.environ[HOST_VARIABLE] = own
    del os.environ[FOLDER_VARIABLE]
    return step


def side(hook: str, model: Model, batch: torch.Tensor) -> Step:
    wrapped = wrap(model)
    if hook == "outer":
        return stepper(wrapped, batch, [], paceline.OuterLoop(wrapped).step)
    if hook in NAMED_HOOKS:
        wrapped.register_comm_hook(None, NAMED_HOOKS[hook]())
    return stepper(wrapped, batch, [])


def steps_on_rank(
    rank: int, hosts: Hosts, folder: str, name: str, chosen: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    """Seconds per step of each hook, one value per turn."""
    with hosts.group(rank, world=WORLD, host=rank // RANKS):
        model, batch = LINKED[name], batch_of(LINKED[name], rank)
        steps = {RECORDED: recorded_side(folder, hosts, model, batch)}
        steps |= {hook: side(hook, model, batch) for hook in chosen if hook != "outer"}
        seconds = samples(steps, rounds=rounds, calls=STEPS, before=dist.barrier)
        if "outer" in chosen:
            # A turn is a whole period, with all of its exchanges.
            outer = {"outer": side("outer", model, batch)}
            seconds |= samples(outer, rounds=2, calls=OUTER_PERIOD, before=dist.barrier)
        return seconds


def train(
    name: str, rate: str, chosen: Sequence[str], rounds: int
) -> tuple[RecordedSteps, dict[str, list[float]]]:
    """What was recorded as on one host, and the seconds per step of each hook on two."""
    with tempfile.TemporaryDirectory() as folder:
        with Hosts() as hosts:
            hosts.limit(rate)
            args = (hosts, folder, name, chosen, rounds)
            ranks = run_ranks(steps_on_rank, WORLD, args=args, timeout=TIMEOUT_SECONDS, backend=None)
        # The last step of each turn has a pause, which lasts until the next turn: it is left out.
        return read_steps(Path(folder)), slowest(ranks)


def predicted(of: RecordedSteps, rate: str, chosen: Sequence[str]) -> dict[str, float]:
    """Seconds per step with each hook."""
    cores = max(1, len(os.sched_getaffinity(0)) // HOSTS)
    cluster = Cluster((HOSTS,), RANKS, parse_link(rate), LATENCY_SECONDS, cores)
    return {each.hook: each.step_ms / 1e3 for each in predict(of, cluster, chosen, Calibration(of, cluster))}


def row(name: str, rate: str, hook: str, guess: float, seconds: Sequence[float]) -> Row:
    is_held_out = bool({name, rate} & {*HELD_OUT})
    found = timing(seconds)
    return Row(
        f"{LINKED[name].what}, {hook} at {rate}{' (held out)' if is_held_out else ''}",
        {"predicted": timing([guess, guess]), "measured": found},
        "error",
        abs(guess / found.median - 1),
        HELD_OUT_TARGET if is_held_out else TARGET,
        case={"model": name, "rate": rate, "hook": hook},
    )


def rows_of(name: str, rate: str, chosen: Sequence[str], rounds: int) -> list[Row]:
    recorded, seconds = train(name, rate, chosen, rounds)
    guesses = predicted(recorded, rate, chosen)
    return [row(name, rate, hook, guesses[hook], seconds[hook]) for hook in chosen]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hold predictions against measurements.")
    parser.add_argument("--models", nargs="+", choices=LINKED, default=[*LINKED])
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE", help=f"default: {RATES}")
    parser.add_argument("--hooks", nargs="+", choices=CHOICES, default=CHOICES)
    parser.add_argument("--rounds", type=int, default=8, help="timed turns of each hook (default: 8)")
    parser.add_argument("--quick", action="store_true", help="2 rounds, to see that all works")
    add_output_options(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 2
    if arguments.rounds < 2:
        parser.error("quartiles need two rounds or more")
    if (reason := why_not()) is not None:
        parser.error(f"no hosts can be made: {reason}")
    return arguments


def main() -> None:
    arguments = parse()
    found: list[Row] = []
    for name in arguments.models:
        print(f"timing {name}", file=sys.stderr)
        for rate in arguments.rates:
            found += rows_of(name, rate, arguments.hooks, arguments.rounds)
    report(
        "Steps of two hosts with two ranks each: predicted from one host, and measured", found, arguments.json
    )
    save_figures(arguments.figures, "plan", found)


if __name__ == "__main__":
    main()
