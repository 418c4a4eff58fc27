"""What the recorder costs a training step, on two ranks.

python benchmarks/recorder.py [--models NAME ...] [--rounds N] [--quick] [--json FILE]

Two figures per model. The first compares steps with the recorder to steps of a wrapper whose recorder does
nothing, in turn; on a noisy machine it varies by more than the recorder costs. So the second figure times the
recorder's calls alone, as many as a step of that model makes, and divides by the median step.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from targets import Row, report
from torch import nn

import paceline
from paceline.recording.recorder import Recorder, optimizer_began, optimizer_ended
from paceline.testing import run_ranks
from paceline.tools.bench.measure import ratio, samples, slowest, timing
from paceline.tools.bench.models import MODELS
from paceline.tools.bench.step_times import WARMUPS

WORLD = 2
TIMEOUT_SECONDS = 3600.0
TARGET = 0.01
RECORDED, SILENT = "paceline", "without a recorder"
# Calls of a step, timed many times over.
REPEATS = 2000
FIVE = ("tiny-layers", "transformer", "mlp", "conv", "parameters-5000")


class SilentRecorder(Recorder):
    """A recorder that does nothing in a step."""


def _nothing(*_: object) -> None:
    pass


STEPWISE = (
    "forward_began",
    "buffers_synced",
    "forward_ended",
    "backward_began",
    "ready",
    "launched",
    "reduced",
    "backward_ended",
    "all_reduced",
    "step_ended",
)
for _name in STEPWISE:
    setattr(SilentRecorder, _name, _nothing)


def wrap(module: nn.Module, side: str) -> paceline.DistributedDataParallel:
    recorder = Recorder if side == RECORDED else SilentRecorder
    with mock.patch("paceline.ddp.recorder_setup.Recorder", recorder):
        return paceline.DistributedDataParallel(module)


def measure_on_rank(rank: int, name: str, rounds: int, calls: int, folder: str) -> dict[str, list[float]]:
    """Seconds per step with and without the recorder, and of its calls alone: one value per round."""
    with mock.patch.dict("os.environ", {"PACELINE_RECORD": folder}):
        trainings = {side: MODELS[name].make(rank) for side in (RECORDED, SILENT)}
        wrapped = {side: wrap(training.module, side) for side, training in trainings.items()}
    steps = {side: replace(trainings[side], module=module).step() for side, module in wrapped.items()}
    seconds = samples(steps, rounds=rounds, calls=calls, warmups=WARMUPS, before=dist.barrier)
    alone = stamper(wrapped[RECORDED])
    dist.barrier()
    seconds["alone"] = [_seconds(alone) for _ in range(max(3, rounds // 4))]
    del trainings, wrapped, steps, alone
    gc.collect()
    return seconds


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(REPEATS):
        call()
    return (time.perf_counter() - start) / REPEATS


def stamper(ddp: paceline.DistributedDataParallel) -> Callable[[], None]:
    """The calls that the recorder of this wrapper gets in one step."""
    recorder, buckets = ddp.recorder, range(len(ddp._reducer.context.bucket_set.buckets))
    first = [id(next(ddp.parameters()))]

    def stamp() -> None:
        recorder.forward_began()
        recorder.buffers_synced()
        recorder.forward_ended()
        recorder.backward_began(0)
        for bucket in buckets:
            recorder.ready(bucket, 0)
            recorder.launched(bucket)
        recorder.backward_ended()
        for bucket in buckets:
            recorder.reduced(bucket)
        recorder.all_reduced()
        recorder.step_ended()
        optimizer_began(first)
        optimizer_ended(first)

    return stamp


def rows(name: str, seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    what = f"step of {MODELS[name].what}"
    timings = {side: timing(values) for side, values in seconds.items()}
    value, (low, high) = ratio(seconds[RECORDED], seconds[SILENT])
    alone = timings["alone"].median / timings[SILENT].median
    return [
        Row(what, timings, "recorded / not, less 1", value - 1, None, spread=(low - 1, high - 1)),
        Row(what, timings, "the recorder's own calls / step", alone, TARGET),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the recorder.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=FIVE, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="4 rounds, to see that all works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    arguments = parser.parse_args()
    found: list[Row] = []
    for name in arguments.models:
        print(f"timing {MODELS[name].what}", file=sys.stderr)
        rounds, calls = (4, 1) if arguments.quick else (arguments.rounds, MODELS[name].steps)
        with tempfile.TemporaryDirectory() as folder:
            args = (name, rounds, calls, folder)
            ranks = run_ranks(measure_on_rank, WORLD, args=args, timeout=TIMEOUT_SECONDS)
        found += rows(name, slowest(ranks))
    report(f"What the recorder costs, {WORLD} ranks of one thread each", found, arguments.json)


if __name__ == "__main__":
    main()
