"""Peak memory of training steps with and without lazy_bucket_allocation, on two ranks.

python benchmarks/lazy_buckets.py [--runs N] [--quick] [--json FILE] [--figures FILE]

The sides are torch's wrapper, torch's with gradient_as_bucket_view, and paceline's, each with buckets that
are kept and with lazy ones. torch's lazy sides are left out if the installed torch does not know the option.
Memory in use is measured, as in paceline.tools.bench.held_memory, minus what was held before wrapping: the
peak, and the most at the end of a forward, when all activations are there.
"""

import argparse
import inspect
import sys
from collections.abc import Sequence

from targets import Row, add_output_options, report, save_figures
from torch.nn.parallel import DistributedDataParallel

from paceline.tools.bench.held_memory import MEMORY_GRADIENTS, MEMORY_STEPS, MemoryCase, held_memory
from paceline.tools.bench.measure import Size, size
from paceline.tools.bench.models import MODELS, Model, transformer
from paceline.tools.bench.sides import Side

WORLD = 2
TIMEOUT_SECONDS = 3600.0
# One whose gradients need more memory than its activations, and one where it is the other way round.
LAZY_MODELS = {
    "mlp": MODELS["mlp"],
    "transformer": Model("10M transformer, 16 sequences of 32 tokens", transformer, (16, 32, 320), 1),
}


def sides() -> list[Side]:
    plain = [Side("torch"), Side("torch", views=True), Side("paceline")]
    lazy = [Side(side.wrapper, views=side.views, lazy=True) for side in plain]
    known = "lazy_bucket_allocation" in inspect.signature(DistributedDataParallel).parameters
    return [*plain, *(side for side in lazy if known or side.wrapper != "torch")]


def held_since_wrapping(model: Model, side: Side) -> list[int]:
    """What the ranks hold together at each point of the steps, minus what they held before wrapping."""
    case = MemoryCase(model, side, in_use=True)
    return held_memory(case, world=WORLD, timeout=TIMEOUT_SECONDS).since_wrapping


def forward_points(model: Model, points: Sequence[int]) -> Sequence[int]:
    """Those of the reading points that are at the end of a forward."""
    parameters = len(list(model.build().parameters()))
    in_backward = len(range(0, parameters, -(-parameters // MEMORY_GRADIENTS)))
    per_step = 1 + in_backward + 2
    assert len(points) == MEMORY_STEPS * per_step, (len(points), per_step)
    return points[::per_step]


def measure(runs: int, models: Sequence[str]) -> list[Row]:
    rows = []
    for name in models:
        model = LAZY_MODELS[name]
        print(f"memory of {model.what}", file=sys.stderr)
        peak: dict[str, Size] = {}
        forward: dict[str, Size] = {}
        for side in sides():
            held = [held_since_wrapping(model, side) for _ in range(runs)]
            # The first step has no gradients or buckets from before.
            peak[str(side)] = size([max(points) for points in held])
            forward[str(side)] = size([max(forward_points(model, points)[1:]) for points in held])
        for what, shown in ((f"{model.what}, peak", peak), (f"{model.what}, end of forward", forward)):
            for kept in ("torch", "torch-views", "paceline"):
                if f"{kept}-lazy" in shown:
                    value = shown[f"{kept}-lazy"].median / shown[kept].median
                    rows.append(Row(what, shown, f"{kept}-lazy / {kept}", value, None, case={"model": name}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure memory with lazy_bucket_allocation.")
    parser.add_argument("--runs", type=int, default=5, help="fresh starts of each side (default: 5)")
    parser.add_argument("--models", nargs="+", choices=LAZY_MODELS, default=list(LAZY_MODELS))
    parser.add_argument("--quick", action="store_true", help="3 runs, to see that all works")
    add_output_options(parser)
    arguments = parser.parse_args()
    rows = measure(3 if arguments.quick else arguments.runs, arguments.models)
    report(f"Memory of DistributedDataParallel on {WORLD} ranks", rows, arguments.json)
    save_figures(arguments.figures, "lazy_buckets", rows)


if __name__ == "__main__":
    main()
