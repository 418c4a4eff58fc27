"""Trains for long without any fault, and counts what ranks say as if there were one.

python tests/soak/healthy.py --steps 10000

Two ranks train a small network with BatchNorm. Nothing is wrong, but much is uneven: the first step of rank 1
takes 4 s, all ranks evaluate every 200 steps, rank 0 alone evaluates for 2 s every 2,000 steps and saves a
checkpoint every 1,000. No rank may say that another one stalls or differs.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from paceline import DistributedDataParallel

WORLD = 2
FEATURES = 32
SLOW_FIRST_STEP = 4.0
EVALUATION_ALONE = 2.0
# In steps: evaluation on all ranks, evaluation on rank 0, a checkpoint.
EVERYWHERE, ALONE, CHECKPOINT = 200, 2000, 1000
# Beyond what the sleeps take.
SECONDS_PER_STEP = 0.2
START = 120.0
# paceline's log, its warnings, and any line about a rank.
_ALARM = re.compile(r"paceline|\brank", re.IGNORECASE)


@dataclass(frozen=True)
class RankResult:
    """What one rank wrote, and how it ended."""

    exit_code: int
    digest: str
    said: list[str]


def alarms(said: list[str]) -> list[str]:
    """The lines that warn of something."""
    return [line for line in said if _ALARM.search(line)]


def wrong_with(results: list[RankResult]) -> list[str]:
    """What is wrong with a run in which nothing should be."""
    wrong = [f"rank {rank} says: {line}" for rank, each in enumerate(results) for line in alarms(each.said)]
    wrong += [
        f"rank {rank} ended with {each.exit_code}" for rank, each in enumerate(results) if each.exit_code
    ]
    if len({each.digest for each in results}) > 1:
        wrong.append("ranks have different parameters")
    return wrong


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, FEATURES))


def evaluate(model: nn.Module, seconds: float) -> None:
    """Run forwards without gradients: one, and more until the time is over."""
    until = time.monotonic() + seconds
    model.eval()
    with torch.no_grad():
        model(torch.randn(64, FEATURES))
        while time.monotonic() < until:
            model(torch.randn(64, FEATURES))
    model.train()


def train(rank: int, steps: int, transport: Any, folder: Path) -> str:
    """Train; returns a digest of the parameters."""
    ddp = DistributedDataParallel(make_net(), transport=transport)
    optimizer = torch.optim.Adam(ddp.parameters())
    for step in range(1, steps + 1):
        if step == 1 and rank == 1:
            time.sleep(SLOW_FIRST_STEP)
        optimizer.zero_grad()
        inputs = torch.randn(8, FEATURES)
        (ddp(inputs) - inputs).square().mean().backward()
        optimizer.step()
        if step % EVERYWHERE == 0:
            evaluate(ddp, 0.0)
        if step % ALONE == 0 and rank == 0:
            evaluate(ddp.module, EVALUATION_ALONE)
        if step % CHECKPOINT == 0 and rank == 0:
            torch.save([ddp.state_dict(), optimizer.state_dict()], folder / "checkpoint.pt")
    joined = b"".join(each.detach().numpy().tobytes() for each in ddp.parameters())
    return hashlib.sha256(joined).hexdigest()


def be_rank(options: argparse.Namespace) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=START))
    print(train(rank, options.steps, options.transport, Path(options.folder)))
    distributed.destroy_process_group()


def run(steps: int, transport: str) -> list[RankResult]:
    """Run the ranks as processes of their own, and return what came of them."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--steps", str(steps), "--transport", transport, "--folder", folder]
        files = [Path(folder, f"said-by-{rank}") for rank in range(WORLD)]
        ranks = [start(rank, store.port, options, said) for rank, said in enumerate(files)]
        try:
            seconds = START + steps * SECONDS_PER_STEP
            return [ended(*each, seconds) for each in zip(ranks, files, strict=True)]
        finally:
            for each in ranks:
                each.kill()
                each.communicate()


def start(rank: int, port: int, options: list[str], said: Path) -> "subprocess.Popen[str]":
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As under torchrun: the store is not on a rank.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    with said.open("w") as file:  # a pipe that nobody reads could fill up
        return subprocess.Popen(
            [sys.executable, __file__, *options],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )


def ended(process: "subprocess.Popen[str]", said: Path, seconds: float) -> RankResult:
    digest, _ = process.communicate(timeout=seconds)
    return RankResult(process.returncode, digest.strip(), said.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--transport", choices=["auto", "c10d"], default="auto")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # given to ranks
    options = parser.parse_args()
    if options.folder is not None:
        be_rank(options)
        return
    start = time.monotonic()
    wrong = wrong_with(run(options.steps, options.transport))
    print("\n".join(wrong), end="\n" if wrong else "")
    print(f"{options.steps} steps, {time.monotonic() - start:.0f} s: {len(wrong)} alarms or other faults")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
