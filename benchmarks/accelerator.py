"""Steps on accelerators under torch's wrapper and paceline's, and a report to send.

torchrun --nproc-per-node=2 benchmarks/accelerator.py [--models NAME...] [--rounds N] [--report FILE]

The wrappers take turns in one run. *Issued* is the time until the host has issued a turn's steps and could go
on; *done* is the time until the device has done them. Gradients of both are compared. The report has the
versions, the devices and all figures, as JSON. Nothing is measured without an accelerator.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel

import paceline
from paceline.tools.bench.measure import machine, timing, versions, with_quartiles
from paceline.tools.bench.models import MODELS, Model, Training

WARMUPS, STEPS = 3, 5
WRAPPERS = {"torch": torch.nn.parallel.DistributedDataParallel, "paceline": paceline.DistributedDataParallel}
Figures = dict[str, dict[str, list[float]]]


def wrapped(side: str, model: Model, rank: int, device: torch.device, group: Any) -> Training:
    """The model on the device, in the side's wrapper."""
    training = model.make(rank)
    module = WRAPPERS[side](training.module.to(device), process_group=group)
    return replace(training, module=module, args=tuple(arg.to(device) for arg in training.args))


def measure(model: Model, rank: int, device: torch.device, group: Any, rounds: int) -> dict[str, Any]:
    """Seconds per step of each side in each round, and how far their gradients differ."""
    synchronize = partial(torch.get_device_module(device.type).synchronize, device)
    trainings = {side: wrapped(side, model, rank, device, group) for side in WRAPPERS}
    steps = {side: training.step() for side, training in trainings.items()}
    seconds: Figures = {side: {"issued": [], "done": []} for side in WRAPPERS}
    for number in range(-1, rounds):  # the first one warms up
        for side in sorted(steps, reverse=bool(number % 2)):
            synchronize()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(WARMUPS if number < 0 else STEPS):
                steps[side]()
            issued = time.perf_counter()
            synchronize()
            if number >= 0:
                seconds[side]["issued"].append((issued - began) / STEPS)
                seconds[side]["done"].append((time.perf_counter() - began) / STEPS)
    return {"seconds": seconds, "difference": difference(*trainings.values())}


def difference(one: Training, other: Training) -> float:
    """The largest difference of two gradients, relative to the largest gradient."""
    pairs = [
        (a.grad.cpu().double(), b.grad.cpu().double())
        for a, b in zip(one.module.parameters(), other.module.parameters(), strict=True)
        if a.grad is not None and b.grad is not None
    ]
    largest = max(float(a.abs().max()) for a, _ in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


def describe(device: torch.device, group: Any) -> dict[str, Any]:
    """What results depend on."""
    module = torch.get_device_module(device.type)
    name = getattr(module, "get_device_name", lambda _: device.type)(device)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None
    return {
        "machine": machine(),
        "versions": versions() | {"paceline": paceline.__version__, "nccl": nccl},
        "device": str(name),
        "ranks": dist.get_world_size(group),
        "backend": str(dist.get_backend(group)),
    }


def show(what: str, seconds: Mapping[str, Mapping[str, Sequence[float]]], apart: float) -> None:
    """Print one model's figures."""
    for side, times in seconds.items():
        issued, done = (with_quartiles(timing(times[kind]), " ms", 1e3) for kind in ("issued", "done"))
        print(f"{what} | {side} | issued {issued} | done {done}")
    print(f"{what} | largest difference of gradients, relative: {apart:.2g}", flush=True)


def run(options: argparse.Namespace, rank: int, device: torch.device, group: Any) -> None:
    """Measure the models, and write the report."""
    report = describe(device, group) | {"models": {}}
    for name in options.models:
        report["models"][name] = measured = measure(MODELS[name], rank, device, group, options.rounds)
        if rank == 0:
            show(MODELS[name].what, measured["seconds"], measured["difference"])
    if rank == 0:
        options.report.write_text(json.dumps(report, indent=1))
        print(f"report: {options.report}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--models",
        nargs="+",
        choices=[*MODELS],
        default=["tiny-layers", "transformer", "mlp", "conv"],
        help="what to train",
    )
    parser.add_argument("--rounds", type=int, default=10, help="turns of each wrapper")
    parser.add_argument(
        "--report", type=Path, default=Path("paceline-accelerator.json"), help="where to write"
    )
    options = parser.parse_args(arguments)
    if not torch.accelerator.is_available():
        sys.exit("this measures steps on an accelerator, and torch finds none; on CPUs use benchmarks/ddp.py")
    me = paceline.init()
    run(options, me.rank, me.device, dist.group.WORLD)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
