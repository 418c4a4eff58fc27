"""Kills ranks of a training at random moments: does it end with the same bits, and how long does it stall?

python benchmarks/heal.py [--sides NAME ...] [--worlds N ...] [--kills N] [--other-kills N] [--seed N]
                          [--keep FOLDER] [--figures FILE]

Each run trains a small network (heal_training.py) and loses up to five ranks by SIGKILL, each at a random
moment (heal_plan.py) after the loss before was healed. With `paceline run --heal`, two ranks are also killed
at once, or one after the other before the first is replaced. Such a run is right if

- its parameters, optimizer state and module buffers have the sha256 of a run on one rank without kills,
- the ledger says that every sample counted once per epoch,
- it ends with 0, and leaves no process, no shared memory and no temporary folder.

A stall lasts from the kill until all ranks have ended a step that none had ended before the kill. So steps
that are done again, because the last snapshot is older, belong to it. torchrun starts all ranks anew, from a
snapshot. It has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, because it hangs otherwise. With torchft the other
replicas go on soon, without the samples of the one that was killed, until it is back. With both, ranks are
compared with each other only.

Runs take turns, one at a time. What a run that is not right has printed is shown, and kept in --keep.
``--figures`` keeps the results of the sides that are not repeated.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import heal_tables
from figures import load, merge, table
from heal_judge import Ran, Side, problems, stall
from heal_plan import first_run, plan, share_kills
from heal_run import Job, output, run_job

from paceline.tools.bench.measure import processor, versions

WORLDS = (2, 3, 4)
SIDES = ("paceline", "torchrun", "torchft")
KILLS_PER_RUN = 5
SHOWN_LINES = 40


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill ranks of a training, and see what comes of it.")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS, metavar="N")
    parser.add_argument("--kills", type=int, default=50, help="with paceline, in all (default: 50)")
    parser.add_argument("--other-kills", type=int, default=9, help="with each other side (default: 9)")
    parser.add_argument("--seed", type=int, default=0, help="decides about ranks and moments")
    parser.add_argument("--epochs", type=int, default=40, help="epochs per run, of 8 steps (default: 40)")
    parser.add_argument(
        "--pause", type=float, default=0.01, help="how many seconds longer each phase of a step takes"
    )
    parser.add_argument("--workers", type=int, default=0, help="data loader processes, with paceline")
    parser.add_argument(
        "--snapshot-every", type=int, default=20, help="steps per snapshot, with torchrun (default: 20)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the files of all runs")
    parser.add_argument(
        "--figures", type=Path, metavar="FILE", help="put the results into FILE, from which docs take them"
    )
    return parser.parse_args()


class Runs:
    """Makes runs, one after the other, each in a folder of its own.

    Args:
        arguments: the options.
        folder: where the folders of the runs are.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder

    def quiet(self) -> Mapping[str, str]:
        """What a run without kills says at its end."""
        job = replace(self._job("quiet", 1), pause=0.0)
        ran = run_job(job, [], self._folder / "quiet")
        if ran.code != 0:
            raise SystemExit(f"the run without kills has failed: {_last_lines(self._folder / 'quiet')}")
        return ran.results[0]

    def side(self, name: str, quiet: Mapping[str, str]) -> Side:
        """All runs of one side."""
        side = Side()
        kills = self._arguments.kills if name == "paceline" else self._arguments.other_kills
        for world, count in share_kills(kills, self._arguments.worlds).items():
            self._world(side, self._job(name, world), count, quiet if name == "paceline" else None)
        return side

    def _job(self, side: str, world: int) -> Job:
        options = self._arguments
        return Job(side, world, options.epochs, options.pause, options.workers, options.snapshot_every)

    def _world(self, side: Side, job: Job, kills: int, quiet: Mapping[str, str] | None) -> None:
        """Runs until all planned kills were done; what a run was too short for is left to the next."""
        strikes = plan(job.world, kills, self._arguments.seed, pairs=job.side == "paceline")
        number = 0
        while strikes:
            folder = self._folder / f"{job.side}-{job.world}-{number}"
            ran = run_job(job, first_run(strikes, KILLS_PER_RUN), folder)
            wrong = problems(ran, quiet)
            side.add(ran, wrong)
            print(f"{folder.name}: {describe(ran, wrong)}", flush=True)
            if wrong:
                print(_last_lines(folder), flush=True)
            if not ran.kills:
                raise SystemExit(f"no rank was killed: a run needs more than {job.epochs} epochs")
            strikes, number = strikes[ran.strikes :], number + 1


def describe(ran: Ran, wrong: Sequence[str]) -> str:
    """A run in one line: its kills, each with the phase and the stall, and what was wrong."""
    stalls = [stall(kill, ran.ends, ran.world) for kill in ran.kills]
    kills = [
        f"rank {each.kill.rank} in {each.kill.phase.words}: "
        f"{'not healed' if each.seconds is None else f'{each.seconds:.2f} s'}"
        for each in stalls
    ]
    return "; ".join([*kills, f"WRONG: {'; '.join(wrong)}" if wrong else "right"])


def _last_lines(folder: Path) -> str:
    lines = output(folder).read_text(errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-SHOWN_LINES:])


def save(path: Path | None, entry: Mapping[str, Any]) -> None:
    """Put the results into a file of figures; those of other sides stay there."""
    if path is None:
        return
    before = load(path).get("healing", {}).get("sides", {})
    merge(path, "healing", {**entry, "sides": {**before, **entry["sides"]}})


def show(entry: Mapping[str, Any]) -> None:
    """Print all tables."""
    for make in (heal_tables.stalls, heal_tables.ends, heal_tables.phases):
        print("", *table(*make(entry)), sep="\n")
    print("", *heal_tables.aims(entry), sep="\n")


def main() -> None:
    arguments = parse()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="heal-"))
    entry: dict[str, Any] = {
        "command": f"python benchmarks/heal.py --kills {arguments.kills}",
        "machine": processor(),
        **versions(),
        "snapshot_every": arguments.snapshot_every,
        "sides": {},
    }
    runs = Runs(arguments, folder)
    quiet = runs.quiet()
    for name in arguments.sides:
        entry["sides"][name] = runs.side(name, quiet).figures()
        save(arguments.figures, entry)
    show(entry)
    is_right = not any(side["wrong"] for side in entry["sides"].values())
    if is_right and arguments.keep is None:
        shutil.rmtree(folder)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
