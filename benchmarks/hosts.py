"""Hosts of several ranks: step time and bytes between hosts, torch's flat gloo and paceline's hierarchy.

python benchmarks/hosts.py [--models NAME ...] [--rate RATE] [--rounds N] [--quick] [--json FILE]
                           [--figures FILE]

Two network namespaces stand for hosts, with two ranks each and a link of limited rate between them. A step
is zero_grad, forward, backward and plain SGD. Each rank has one thread and holds a copy of the model for
each side. The sides take turns; a turn is over when the slowest rank is done. Bytes are counted at the link,
of the host that sent more. An all-reduce of N bytes between H hosts needs at least 2 N (H-1)/H per host: N
with two hosts. Needs root, to make the namespaces.
"""

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from links import SecondsAndBytes, by_turn, check_same_gradients, stepper
from targets import Row, add_output_options, report, save_figures
from torch import nn

import paceline
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts, why_not
from paceline.tools.bench.measure import ratio, samples, size, slowest, timing
from paceline.tools.bench.models import MODELS, Model

HOSTS = 2
RANKS = 2  # per host
STEPS = 2
WARMUPS = 2
TIMEOUT_SECONDS = 3600.0
TARGET = 0.7
BYTES_TARGET = 1.02
TORCH, PACELINE = "torch: flat gloo", "paceline"


def linears() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))


LINKED = {
    "linears": Model("6.3M in six linear layers", linears, (8, 1024), 1),
    "transformer": MODELS["transformer"],
}


def wrap(side: str, model: Model) -> nn.Module:
    torch.manual_seed(0)
    if side == TORCH:
        return torch.nn.parallel.DistributedDataParallel(model.build())
    return paceline.DistributedDataParallel(model.build())


def steps_on_rank(rank: int, hosts: Hosts, name: str, rounds: int) -> SecondsAndBytes:
    """Seconds per step and bytes per step of each side, one value per round."""
    with hosts.group(rank, world=HOSTS * RANKS, host=rank // RANKS):
        model = LINKED[name]
        sides = {side: wrap(side, model) for side in (TORCH, PACELINE)}
        torch.manual_seed(rank)
        batch = torch.randn(model.shape)
        sent: dict[str, list[int]] = {side: [] for side in sides}
        steps = {side: stepper(wrapped, batch, sent[side]) for side, wrapped in sides.items()}
        seconds = samples(steps, rounds=rounds, calls=STEPS, warmups=WARMUPS, before=dist.barrier)
        check_same_gradients(*sides.values())
        # torch's wrapper can hang if it outlives the group.
        del sides, steps
        gc.collect()
        return seconds, {side: by_turn(counts, STEPS)[WARMUPS:] for side, counts in sent.items()}


def rows(name: str, rate: str, rounds: int) -> list[Row]:
    with Hosts() as hosts:
        hosts.limit(rate)
        ranks = run_ranks(
            steps_on_rank,
            HOSTS * RANKS,
            args=(hosts, name, rounds),
            timeout=TIMEOUT_SECONDS,
            backend=None,
        )
    return [time_row(name, rate, slowest([seconds for seconds, _ in ranks])), bytes_row(name, rate, ranks)]


def time_row(name: str, rate: str, seconds: Mapping[str, Sequence[float]]) -> Row:
    value, spread = ratio(seconds[PACELINE], seconds[TORCH])
    return Row(
        f"step of {LINKED[name].what} at {rate}",
        {side: timing(values) for side, values in seconds.items()},
        "paceline / torch",
        value,
        TARGET,
        spread=spread,
        case={"quantity": "step", "model": name, "rate": rate},
    )


def bytes_row(name: str, rate: str, ranks: Sequence[SecondsAndBytes]) -> Row:
    least = sum(parameter.nbytes for parameter in LINKED[name].build().parameters())
    sent = {
        side: max((size(rank[1][side]) for rank in ranks), key=lambda each: each.median)
        for side in (TORCH, PACELINE)
    }
    return Row(
        f"bytes sent per step of {LINKED[name].what} at {rate}",
        sent,
        "paceline / the least possible",
        sent[PACELINE].median / least,
        BYTES_TARGET,
        case={"quantity": "bytes", "model": name, "rate": rate},
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure hosts of several ranks.")
    parser.add_argument("--models", nargs="+", choices=LINKED, default=[*LINKED])
    parser.add_argument("--rate", default="1gbit", help="rate of the link, each way (default: 1gbit)")
    parser.add_argument("--rounds", type=int, default=12, help="timed turns of each side (default: 12)")
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
        found += rows(name, arguments.rate, arguments.rounds)
    report("Two hosts with two ranks each, with a link of limited rate between them", found, arguments.json)
    save_figures(arguments.figures, "hosts", found)


if __name__ == "__main__":
    main()
