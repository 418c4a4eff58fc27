"""The hook "auto" against fixed hooks of the default error bound or less, on links of several rates.

python benchmarks/auto_hook.py [--models NAME ...] [--rates RATE ...] [--rounds N] [--settle N] [--quick]
                               [--json FILE] [--figures FILE]

Two ranks, one in each of two network namespaces, with a link of limited rate between them. A step is
zero_grad, forward, backward and plain SGD. Each rank has one thread and holds a copy of the model for every
side. All sides take some steps first, in which auto settles; then they take turns, and a turn is over when
the slower rank is done. Needs root, to make the namespaces.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from links import stepper
from targets import Row, add_output_options, report, save_figures
from torch import nn

import paceline
from paceline import hooks
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts, why_not
from paceline.tools.bench.measure import ratio, samples, slowest, timing
from paceline.tools.bench.models import MODELS, Model

WORLD = 2
UNLIMITED = "unlimited"
RATES = ("10mbit", "100mbit", "1gbit", UNLIMITED)
AUTO = "auto"
TARGET = 1.10
# Enough for a decision with ready times, a trial of a bucket cap, and steps that settle.
SETTLE = 32
TIMEOUT_SECONDS = 7200.0
FIXED: Mapping[str, Callable[[], hooks.Hook]] = {
    "average": hooks.average,
    "fp16": lambda: hooks.with_error_feedback(hooks.fp16()),
    "bf16": lambda: hooks.with_error_feedback(hooks.bf16()),
}


def two_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 768))


LINKED = {
    "linears": Model("1.3M in two linear layers", two_linears, (8, 512), 1),
    # One step per turn: over a slow link a step takes seconds.
    "conv": replace(MODELS["conv"], steps=1),
    "tiny-layers": replace(MODELS["tiny-layers"], steps=1),
}


def steps_on_rank(
    rank: int, hosts: Hosts, name: str, rounds: int, settle: int
) -> tuple[dict[str, list[float]], str]:
    """Seconds per step of each side, one value per round; and what auto has chosen."""
    with hosts.group(rank, world=WORLD, host=rank):
        model, chosen = LINKED[name], hooks.auto()
        given = {**{side: make() for side, make in FIXED.items()}, AUTO: chosen}
        training = model.make(rank)
        sides = {side: wrap(model, hook) for side, hook in given.items()}
        steps = {side: stepper(each, training.args[0], []) for side, each in sides.items()}
        # One after the other: a side's speed must not depend on what the others leave in the link.
        for step in steps.values():
            for _ in range(settle if step is steps[AUTO] else 2):
                step()
        seconds = samples(steps, rounds=rounds, calls=model.steps, warmups=1, before=dist.barrier)
        # Wrappers are gone before their group.
        del sides, steps
        gc.collect()
        return seconds, chosen.name.removeprefix("auto: ")


def wrap(model: Model, hook: hooks.Hook) -> nn.Module:
    return paceline.DistributedDataParallel(model.make(0).module, hook=hook)


def row(name: str, rate: str, rounds: int, settle: int) -> Row:
    with Hosts() as hosts:
        if rate != UNLIMITED:
            hosts.limit(rate)
        ranks = run_ranks(
            steps_on_rank,
            WORLD,
            args=(hosts, name, rounds, settle),
            timeout=TIMEOUT_SECONDS,
            backend=None,
        )
    return compared(name, rate, slowest([seconds for seconds, _ in ranks]), ranks[0][1])


def compared(name: str, rate: str, seconds: Mapping[str, Sequence[float]], chosen: str) -> Row:
    """Auto against the fixed hook whose median is the shortest."""
    best = min(FIXED, key=lambda side: statistics.median(seconds[side]))
    value, spread = ratio(seconds[AUTO], seconds[best])
    return Row(
        f"step of {LINKED[name].what} at {rate}",
        {side: timing(values) for side, values in seconds.items()},
        f"auto ({chosen}) / best fixed ({best})",
        value,
        TARGET,
        spread=spread,
        case={"model": name, "rate": rate, "chosen": chosen, "best": best},
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description='Measure the hook "auto".')
    parser.add_argument("--models", nargs="+", choices=LINKED, default=[*LINKED])
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE", help=f"default: {RATES}")
    parser.add_argument("--rounds", type=int, default=12, help="timed turns of each side (default: 12)")
    parser.add_argument("--settle", type=int, default=SETTLE, help=f"steps before (default: {SETTLE})")
    parser.add_argument(
        "--quick", action="store_true", help="2 rounds, 4 steps before, to see that all works"
    )
    add_output_options(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.settle = 2, 4
    if arguments.rounds < 2:
        parser.error("quartiles need two rounds or more")
    if (reason := why_not()) is not None:
        parser.error(f"no hosts can be made: {reason}")
    return arguments


def main() -> None:
    arguments = parse()
    rows: list[Row] = []
    for name in arguments.models:
        for rate in arguments.rates:
            print(f"timing {name} at {rate}", file=sys.stderr)
            rows.append(row(name, rate, arguments.rounds, arguments.settle))
    report("The hook auto and fixed hooks of its bound", rows, arguments.json)
    save_figures(arguments.figures, "auto_hook", rows)


if __name__ == "__main__":
    main()
