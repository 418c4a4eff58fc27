"""What grows with ranks and with hosts: wrap, step, memory, recording and report; and eight hosts.

python benchmarks/scale.py [--ranks N ...] [--hosts N] [--runs N] [--rounds N] [--quick] [--json FILE]
                           [--figures FILE]

The model is tiny, so that what is measured is what paceline does for each rank. First all ranks are on one
host, in shared memory. They are far more than the cores, so a step is mostly the time in which each rank gets
its turn on a core; CPU time per rank and step shows what a rank has to do. Each run has fresh ranks; a wrap
counts as long as the slowest rank takes. Then network namespaces stand for hosts, with two ranks each and a
bridge between them: plain averages, and OuterLoop with 16 steps per outer step. Bytes are counted at the
links, of the host that sent most. The hosts need root; without it, or with --hosts 0, they are left out.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from links import LEARNING_RATE, by_turn, stepper
from targets import Row, add_output_options, report, save_figures
from torch import nn

import paceline
from paceline.recording.recorder import FOLDER_VARIABLE
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts, why_not
from paceline.tools.bench.held_memory import held_bytes
from paceline.tools.bench.measure import Size, Timing, size, slowest, take_turns, timing
from paceline.tools.report.analysis import analyse_recording
from paceline.tools.report.html_page import html_page

LAYERS, WIDTH = 8, 32
STEPS = 4  # per turn, of ranks on one host
PERIOD = 16  # steps per outer step, and per turn of hosts
RANKS_PER_HOST = 2
TIMEOUT_SECONDS = 900.0
PLAIN, OUTER = "plain averages", "outer loop"


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@dataclass(frozen=True)
class RankResult:
    """What one rank has measured.

    Attributes:
        wrap: seconds of the first wrap, which also opens shared memory.
        wrap_again: seconds of a second one.
        steps: seconds per step, one value per round.
        cpu: CPU seconds per step of this rank, one value per round.
        held: bytes of memory that this rank has taken since before the first wrap.
        count: how many steps were recorded.
    """

    wrap: float
    wrap_again: float
    steps: Sequence[float]
    cpu: Sequence[float]
    held: int
    count: int


@dataclass(frozen=True)
class RunResult:
    """What one run of fresh ranks gave.

    Attributes:
        ranks: what each rank has measured.
        recorded: bytes of the recording on disk.
        report: seconds to read and analyse the recording, and to make the page.
        page: bytes of the page.
    """

    ranks: Sequence[RankResult]
    recorded: int
    report: float
    page: int


def measure_on_rank(_: int, folder: str, rounds: int) -> RankResult:
    step_alone = stepper_of(tiny())
    step_alone()  # loads what any step needs
    os.environ[FOLDER_VARIABLE] = folder
    before = held_bytes()
    wrap, wrapped = _timed_wrap()
    step = stepper_of(wrapped)
    [turns] = take_turns({PLAIN: step}, rounds=rounds, calls=STEPS, before=dist.barrier).values()
    held = held_bytes() - before
    del os.environ[FOLDER_VARIABLE]
    wrap_again, _second = _timed_wrap()
    dist.barrier()
    return RankResult(
        wrap=wrap,
        wrap_again=wrap_again,
        steps=[turn.mean_seconds for turn in turns],
        cpu=[turn.mean_cpu for turn in turns],
        held=held,
        count=(rounds + 1) * STEPS,
    )


def _timed_wrap() -> tuple[float, nn.Module]:
    module = tiny()
    dist.barrier()
    start = time.perf_counter()
    wrapped = paceline.DistributedDataParallel(module)
    return time.perf_counter() - start, wrapped


def stepper_of(module: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    batch = torch.ones(2, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()

    return step


def run_once(world: int, rounds: int) -> RunResult:
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(measure_on_rank, world, args=(folder, rounds), timeout=TIMEOUT_SECONDS)
        recorded = sum(512 * path.stat().st_blocks for path in Path(folder).iterdir())
        start = time.perf_counter()
        page = html_page(analyse_recording(Path(folder)))
        return RunResult(ranks, recorded, time.perf_counter() - start, len(page))


def rank_row(world: int, runs: Sequence[RunResult]) -> Row:
    """All that was measured of one number of ranks."""
    steps = [max(turn) for run in runs for turn in zip(*(rank.steps for rank in run.ranks), strict=True)]
    cpu = [sum(turn) / world for run in runs for turn in zip(*(rank.cpu for rank in run.ranks), strict=True)]
    spreads: Mapping[str, Timing | Size] = {
        "first wrap": timing([max(rank.wrap for rank in run.ranks) for run in runs]),
        "second wrap": timing([max(rank.wrap_again for rank in run.ranks) for run in runs]),
        "step": timing(steps),
        "CPU per rank and step": timing(cpu),
        "memory per rank": size([sum(rank.held for rank in run.ranks) / world for run in runs]),
        "recording per rank": size([run.recorded / world for run in runs]),
        "report": timing([run.report for run in runs]),
        "page": size([run.page for run in runs]),
    }
    steps_recorded = runs[0].ranks[0].count
    return Row(
        f"{world} ranks on one host",
        spreads,
        "steps recorded per rank",
        steps_recorded,
        None,
        case={"quantity": "ranks", "ranks": world, "steps": steps_recorded},
    )


def host_steps_on_rank(
    rank: int, hosts: Hosts, count: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and bytes per step of each side, one value per round."""
    with hosts.group(rank, world=count * RANKS_PER_HOST, host=rank // RANKS_PER_HOST):
        plain, outer = paceline.DistributedDataParallel(tiny()), paceline.DistributedDataParallel(tiny())
        loop = paceline.OuterLoop(outer, period=PERIOD)
        sent: dict[str, list[int]] = {PLAIN: [], OUTER: []}
        batch = torch.ones(2, WIDTH)
        steps = {
            PLAIN: stepper(plain, batch, sent[PLAIN]),
            OUTER: stepper(outer, batch, sent[OUTER], after=loop.step),
        }
        turns = take_turns(steps, rounds=rounds, calls=PERIOD, before=dist.barrier)
        seconds = {side: [turn.mean_seconds for turn in of_side] for side, of_side in turns.items()}
        loop.finish()
        return seconds, {side: by_turn(counts, PERIOD)[1:] for side, counts in sent.items()}


def host_rows(count: int, rounds: int) -> list[Row]:
    """Step time and bytes per step of hosts with two ranks each."""
    with Hosts(count=count) as hosts:
        ranks = run_ranks(
            host_steps_on_rank,
            count * RANKS_PER_HOST,
            args=(hosts, count, rounds),
            timeout=TIMEOUT_SECONDS,
            backend=None,
        )
    seconds = {side: timing(values) for side, values in slowest([each for each, _ in ranks]).items()}
    sent = {side: size(values) for side, values in slowest([each for _, each in ranks]).items()}
    what, figure = f"{count} hosts with {RANKS_PER_HOST} ranks", f"{OUTER} / {PLAIN}"
    return [
        Row(
            f"{quantity} of {what}",
            spreads,
            figure,
            spreads[OUTER].median / spreads[PLAIN].median,
            None,
            case={"quantity": f"hosts, {quantity}", "hosts": count},
        )
        for quantity, spreads in (("step", seconds), ("bytes per step", sent))
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what grows with ranks and hosts.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 16, 32, 64], help="on one host")
    parser.add_argument("--hosts", type=int, default=8, help="hosts of two ranks, or 0 (default: 8)")
    parser.add_argument("--runs", type=int, default=3, help="runs of fresh ranks (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="timed turns of each run (default: 3)")
    parser.add_argument("--quick", action="store_true", help="3 ranks and 3 hosts, to see that all works")
    add_output_options(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.ranks, arguments.hosts = [3], 3
    if min(arguments.runs, arguments.rounds) < 3:
        parser.error("quartiles need three runs and three rounds or more")
    if arguments.hosts and (reason := why_not()) is not None:
        print(f"without hosts: {reason}", file=sys.stderr)
        arguments.hosts = 0
    return arguments


def main() -> None:
    arguments = parse()
    load = os.getloadavg()[0]
    rows = []
    for world in arguments.ranks:
        print(f"timing {world} ranks", file=sys.stderr)
        rows.append(rank_row(world, [run_once(world, arguments.rounds) for _ in range(arguments.runs)]))
    if arguments.hosts:
        print(f"timing {arguments.hosts} hosts", file=sys.stderr)
        rows += host_rows(arguments.hosts, arguments.rounds)
    report("What grows with ranks and hosts", rows, arguments.json)
    save_figures(arguments.figures, "scale", rows, load=round(load, 1))


if __name__ == "__main__":
    main()
