"""Runs a training that fails at random on one rank, with restarts, and counts how the runs end.

python tests/soak/restarts.py --runs 50
python tests/soak/restarts.py --runs 50 --hosts 2

Each run has two ranks and two restarts. At each start one rank fails with a probability of one half: before
it opens the group, right after that, or in the middle of a step. If a start goes well, the run has to end
well. If none does, it has to end with the error of the last start. With --hosts 2, each rank has a launcher
of its own, and the launchers meet as those of two hosts do.
"""

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESTARTS = 2
PLACES = ("before the group", "with the group", "in a step")
DONE = "trained"
PACELINE = "from paceline.tools.main import main; main()"
STEPS = 5
# How long a launcher that hangs may take to end after SIGTERM: longer than it gives ranks.
SECONDS_TO_END = 60.0


def be_rank(places: list[str], folder: Path) -> None:
    """Train, and fail where the plan of this start says so."""
    import torch
    from torch import distributed

    from paceline import DistributedDataParallel

    rank = int(os.environ["RANK"])
    start = _count_starts(folder / f"starts of rank {rank}")
    place = places[start] if rank == int(places[-1]) else ""

    def fail_at(here: str) -> None:
        if place == here:
            raise ValueError(f"start {start} fails {here}")

    fail_at("before the group")
    distributed.init_process_group("gloo")
    fail_at("with the group")
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(STEPS):
        loss = ddp(torch.ones(2, 4)).sum()
        if step == STEPS // 2:
            fail_at("in a step")
        loss.backward()
    distributed.destroy_process_group()
    print(DONE)


def _count_starts(file: Path) -> int:
    with file.open("a+") as starts:
        starts.write("x")
        return starts.tell() - 1


def choose_places(chance: random.Random) -> list[str]:
    """Where each start fails, or an empty text; then the rank that fails."""
    starts = [chance.choice(PLACES) if chance.random() < 0.5 else "" for _ in range(RESTARTS + 1)]
    return [*starts, str(chance.randrange(2))]


def wrong_with(places: list[str], codes: list[int | None], said: str) -> str:
    """What is wrong with the end of a run; empty if nothing is."""
    if None in codes:
        return "it hangs"
    if "" in places[:-1]:
        return "" if not any(codes) and said.count(DONE) == 2 else "it has not recovered"
    if not all(codes):
        return "it has ended well, though all starts fail"
    return "" if f"ValueError: start {RESTARTS} fails {places[RESTARTS]}" in said else "it says another error"


def run(places: list[str], hosts: int, seconds: float) -> tuple[list[int | None], str]:
    """The exit code of each launcher, None for one that did not end in time; and what all of them said."""
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        options = ["-n", str(2 // hosts), "--max-restarts", str(RESTARTS), "--nnodes", str(hosts)]
        if hosts > 1:
            options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}"]
            options += ["--local-addr", "127.0.0.1"]
        command = [sys.executable, "-c", PACELINE, "run", *options]
        command += [__file__, "--folder", folder, "--places", *places]
        with said.open("a") as file:
            launchers = [subprocess.Popen(command, stdout=file, stderr=file) for _ in range(hosts)]
        return [_code(launcher, until) for launcher in launchers], said.read_text()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _code(launcher: "subprocess.Popen[bytes]", until: float) -> int | None:
    try:
        return launcher.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        end(launcher, SECONDS_TO_END)
        return None


def end(launcher: "subprocess.Popen[bytes]", seconds: float) -> None:
    """End a launcher by SIGTERM, or by SIGKILL if that takes longer; its guard then ends the ranks."""
    launcher.terminate()
    try:
        launcher.wait(seconds)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--hosts", type=int, choices=[1, 2], default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="for one run, before it counts as hanging"
    )
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # given to ranks, as is the next one
    parser.add_argument("--places", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        be_rank(options.places, Path(options.folder))
        return
    chance, restarted, failed, wrong = random.Random(options.seed), 0, 0, 0
    for number in range(options.runs):
        places = choose_places(chance)
        codes, said = run(places, options.hosts, options.seconds)
        restarted += "" in places[:-1] and places[0] != ""
        failed += "" not in places[:-1]
        if problem := wrong_with(places, codes, said):
            wrong += 1
            print(f"run {number}, {places}: {problem} (exit codes: {codes})\n{said}", flush=True)
    print(
        f"{options.runs} runs on {options.hosts} host(s): {restarted} had to recover, {failed} had to fail, "
        f"{options.runs - restarted - failed} had no fault; {wrong} ended otherwise"
    )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
