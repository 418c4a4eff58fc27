"""Peak memory of training steps with AdamW, of all ranks of a host together.

python benchmarks/memory.py [--models NAME ...] [--worlds N ...] [--in-use] [--runs N] [--quick]
                            [--json FILE] [--figures FILE]

The sides:
  torch                          torch's wrapper on a gloo group, with torch's AdamW
  torch-ZeroRedundancyOptimizer  the same wrapper, with the optimizer's state once for all ranks
  paceline                       paceline's wrapper, with torch's AdamW
  paceline-HostOptimizer         the same wrapper, with parameters and optimizer state once per host

Memory is measured as in paceline.tools.bench.held_memory, minus what the ranks held before the module was
made. So on every side it is that of parameters, gradients, buckets, optimizer state, inputs and activations.
The figure is the highest of all points of five steps. Each run has fresh ranks. With --in-use, memory that
malloc keeps for later does not count. Targets are for the ratio to torch's wrapper with its plain optimizer,
with --in-use and without. A figure without a target is for information.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

from targets import Row, add_output_options, report, save_figures

from paceline.tools.bench.held_memory import MemoryCase, held_memory
from paceline.tools.bench.measure import Size, size
from paceline.tools.bench.models import ADAMW, MODELS
from paceline.tools.bench.sides import HOST, PLAIN, TORCH, ZERO, Side

MEMORY_MODELS = ("mlp", "transformer")
WORLDS = (2, 4, 8)
SIDES = (TORCH, ZERO, PLAIN, HOST)
# By the number of ranks: the memory with a HostOptimizer, divided by that of torch's wrapper.
TARGETS = {4: 1 / 2, 8: 1 / 3}
TIMEOUT_SECONDS = 3600.0


def peak(case: MemoryCase, world: int) -> int:
    """The most that fresh ranks hold together at any point; it depends on what happens to overlap."""
    return max(held_memory(case, world=world, timeout=TIMEOUT_SECONDS).since_module)


def rows(name: str, world: int, found: Mapping[Side, Size]) -> list[Row]:
    """The HostOptimizer's peak, compared with the others."""
    what = f"peak memory of {MODELS[name].what}, {world} ranks"
    shown = {str(side): held for side, held in found.items()}
    case: dict[str, str | int] = {"model": name, "label": MODELS[name].what, "world": world}
    return [
        Row(
            what,
            shown,
            f"{HOST} / {base}",
            found[HOST].median / found[base].median,
            TARGETS.get(world) if base == TORCH else None,
            case=case,
        )
        for base in SIDES
        if base != HOST
    ]


def measure(models: Sequence[str], worlds: Sequence[int], runs: int, *, in_use: bool) -> list[Row]:
    measured = []
    for name in models:
        for world in worlds:
            print(f"memory of {MODELS[name].what}, {world} ranks", file=sys.stderr)
            cases = {side: MemoryCase(MODELS[name], side, ADAMW, in_use=in_use) for side in SIDES}
            found = {side: size([peak(case, world) for _ in range(runs)]) for side, case in cases.items()}
            measured += rows(name, world, found)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the memory of training steps with AdamW.")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=MEMORY_MODELS, metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument(
        "--worlds", nargs="+", type=int, default=WORLDS, metavar="N", help=f"ranks (default: {WORLDS})"
    )
    parser.add_argument("--in-use", action="store_true", help="without what malloc keeps for later")
    parser.add_argument("--runs", type=int, default=5, help="fresh starts of each side (default: 5)")
    parser.add_argument("--quick", action="store_true", help="2 runs, to see that all works")
    add_output_options(parser)
    arguments = parser.parse_args()
    if arguments.runs < 2 or min(arguments.worlds) < 2:
        parser.error("quartiles need two runs or more, and there must be two ranks or more")
    runs = 2 if arguments.quick else arguments.runs
    found = measure(arguments.models, arguments.worlds, runs, in_use=arguments.in_use)
    what = "Memory in use" if arguments.in_use else "Memory"
    report(f"{what} of all ranks together, with AdamW", found, arguments.json)
    save_figures(arguments.figures, "memory_in_use" if arguments.in_use else "memory", found)


if __name__ == "__main__":
    main()
