"""What communication hooks cost and save: step time over slow links, bytes sent, and what a network learns.

python benchmarks/hooks.py [--parts links digits] [--rates RATE ...] [--rounds N] [--seeds N] [--epochs N]
                           [--quick] [--json FILE] [--figures FILE]

Links: two ranks, one in each of two network namespaces, with a link of limited rate between them. A step is
zero_grad, forward, backward and plain SGD. Each rank has one thread and holds a copy of a model of 1.3M
parameters for every side. The sides take turns; a turn is over when the slower rank is done. Bytes are
counted at the link. Needs root, to make the namespaces.

Digits: a small network is trained on two ranks, with the same seeds under every hook.
"""

import argparse
import gc
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from digits_training import HOOKS, accuracy_on_rank
from links import SecondsAndBytes, by_turn, check_same_gradients, stepper
from rich.console import Console
from rich.table import Table
from targets import Row, add_output_options, report, save_figures
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import paceline
from paceline import hooks
from paceline.testing import RankPool, run_ranks
from paceline.testing.hosts import Hosts, why_not
from paceline.tools.bench.measure import Size, machine, ratio, samples, size, slowest, timing

WORLD = 2
RATES = ("100mbit", "1gbit")
# The period of post-local SGD, so that each turn has one average of parameters.
STEPS = 4
WARMUPS = 1
RANK = 4
TIMEOUT_SECONDS = 3600.0
BASE = "torch: no hook"


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 768))


def torch_side(state: Any = None, hook: Callable[..., Any] | None = None, **options: Any) -> nn.Module:
    wrapped = torch.nn.parallel.DistributedDataParallel(module(), **options)
    if hook is not None:
        wrapped.register_comm_hook(state, hook)
    return wrapped


def torch_power_sgd() -> nn.Module:
    # The earliest start that torch allows.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    # In one bucket: with two, ranks mix up the collectives of its callbacks, and gloo aborts.
    return torch_side(state, powerSGD_hook.powerSGD_hook, bucket_cap_mb=25)


def paceline_side(hook: hooks.Hook | None) -> tuple[nn.Module, hooks.Hook | None]:
    wrapped = paceline.DistributedDataParallel(module())
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped, hook


def all_sides() -> dict[str, tuple[nn.Module, hooks.Hook | None]]:
    return {
        BASE: (torch_side(), None),
        "torch: fp16 hook": (torch_side(None, default_hooks.fp16_compress_hook), None),
        f"torch: PowerSGD hook of rank {RANK}": (torch_power_sgd(), None),
        "paceline: no hook": paceline_side(None),
        "average": paceline_side(hooks.average()),
        "fp16": paceline_side(hooks.fp16()),
        "bf16": paceline_side(hooks.bf16()),
        "int8": paceline_side(hooks.int8()),
        "int4": paceline_side(hooks.int4()),
        "top_k(0.01)": paceline_side(hooks.top_k(0.01)),
        f"power_sgd({RANK})": paceline_side(hooks.power_sgd(RANK, start_step=2)),
        f"post_local_sgd, period {STEPS}": paceline_side(hooks.post_local_sgd(start_step=0, period=STEPS)),
    }


def average_parameters(wrapped: nn.Module, hook: hooks.Hook | None) -> None:
    if isinstance(hook, hooks.PostLocalSGD):
        hook.average_parameters(wrapped.parameters())


def steps_on_rank(rank: int, hosts: Hosts, rounds: int) -> SecondsAndBytes:
    """Seconds per step and bytes per step of each side, one value per round."""
    with hosts.group(rank, world=WORLD, host=rank):
        torch.manual_seed(rank)
        batch = torch.randn(8, 512)
        sides = all_sides()
        sent: dict[str, list[int]] = {name: [] for name in sides}
        steps = {
            name: stepper(wrapped, batch, sent[name], partial(average_parameters, wrapped, hook))
            for name, (wrapped, hook) in sides.items()
        }
        seconds = samples(steps, rounds=rounds, calls=STEPS, warmups=WARMUPS, before=dist.barrier)
        check_same_gradients(*(sides[name][0] for name in (BASE, "paceline: no hook", "average")))
        # torch's wrapper can hang if it outlives the group.
        del sides, steps
        gc.collect()
        return seconds, {name: by_turn(counts, STEPS)[WARMUPS:] for name, counts in sent.items()}


def link_rows(rate: str, rounds: int) -> list[Row]:
    with Hosts() as hosts:
        hosts.limit(rate)
        ranks = run_ranks(steps_on_rank, WORLD, args=(hosts, rounds), timeout=TIMEOUT_SECONDS, backend=None)
    seconds = slowest([seconds for seconds, _ in ranks])
    return [link_row(name, rate, seconds, size(ranks[0][1][name])) for name in seconds]


def link_row(name: str, rate: str, seconds: Mapping[str, Sequence[float]], sent: Size) -> Row:
    value, spread = ratio(seconds[name], seconds[BASE])
    return Row(
        f"{name} at {rate}",
        {"step": timing(seconds[name]), "sent": sent},
        f"step / {BASE}",
        value,
        None,
        spread=spread,
        case={"hook": name, "rate": rate},
    )


def digits(seeds: int, epochs: int) -> dict[str, list[float]]:
    """Each hook's accuracies, one value per seed."""
    found: dict[str, list[float]] = {}
    with RankPool(WORLD, timeout=TIMEOUT_SECONDS) as pool:
        for name in HOOKS:
            print(f"training with {name}", file=sys.stderr)
            found[name] = [pool.run(accuracy_on_rank, name, seed, epochs)[0] for seed in range(seeds)]
    return found


def accuracy_summary(found: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """The mean, the standard deviation and the range of each hook's accuracies."""
    return {
        name: {
            "mean": statistics.mean(values),
            "deviation": statistics.stdev(values) if len(values) > 1 else math.nan,
            "lowest": min(values),
            "highest": max(values),
        }
        for name, values in found.items()
    }


def report_digits(accuracy: Mapping[str, Mapping[str, float]], seeds: int, epochs: int) -> None:
    table = Table(title=f"Test accuracy on the digits, {epochs} epochs, {seeds} seeds", caption=machine())
    for column in ("hook", "mean", "standard deviation", "lowest to highest"):
        table.add_column(column)
    for name, values in accuracy.items():
        spread = f"{values['lowest']:.2%} to {values['highest']:.2%}"
        table.add_row(name, f"{values['mean']:.2%}", f"{values['deviation']:.2%}", spread)
    Console(width=120).print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure communication hooks.")
    parser.add_argument("--parts", nargs="+", choices=("links", "digits"), default=("links", "digits"))
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE", help=f"default: {RATES}")
    parser.add_argument("--rounds", type=int, default=8, help="timed turns of each side (default: 8)")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each hook (default: 5)")
    parser.add_argument("--epochs", type=int, default=20, help="of each training (default: 20)")
    parser.add_argument(
        "--quick", action="store_true", help="2 rounds, 2 seeds, 4 epochs, to see that all works"
    )
    add_output_options(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seeds, arguments.epochs = 2, 2, 4
    if arguments.rounds < 2:
        parser.error("quartiles need two rounds or more")
    if arguments.figures is not None and (len(arguments.parts) < 2 or arguments.seeds < 2):
        parser.error("figures need both parts, and two seeds or more (options: --figures, --parts, --seeds)")
    if "links" in arguments.parts and (reason := why_not()) is not None:
        parser.error(f"no links can be made: {reason}; run as root, or with --parts digits")
    return arguments


def main() -> None:
    arguments = parse()
    rows: list[Row] = []
    accuracy: dict[str, dict[str, float]] = {}
    if "digits" in arguments.parts:
        accuracy = accuracy_summary(digits(arguments.seeds, arguments.epochs))
        report_digits(accuracy, arguments.seeds, arguments.epochs)
    if "links" in arguments.parts:
        for rate in arguments.rates:
            print(f"timing at {rate}", file=sys.stderr)
            rows += link_rows(rate, arguments.rounds)
        report("Steps of two ranks with a link of limited rate between them", rows, arguments.json)
    save_figures(arguments.figures, "hooks", rows, accuracy=accuracy)


if __name__ == "__main__":
    main()
