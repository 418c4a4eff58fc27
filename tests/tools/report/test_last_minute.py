"""The end of a run that stalled or failed, from the pages that its ranks have left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner
from recordings import Run, write

from paceline.recording.healings import Healing, write_healing
from paceline.tools.main import main
from paceline.tools.report.last_minute import last_minute
from paceline.watch.rank_page import Activity, Moment, RankPage, Sample, Told, read_pages

SECOND = 10**9


def left_page(folder: Path, rank: int, told: Told, *, end: int = 100) -> None:
    page = RankPage(rank, folder)
    page.mark(Activity.BACKWARD, 1, 7)
    page.beat(end * SECOND, usual_step=0, thread=0)
    page.write_stack(end * SECOND, "train.py\t31\tload\ntrain.py\t50\tmain")
    for at in range(end - 59, end + 1):
        line = "train.py:46 in main" if at <= end - 20 else "train.py:31 in load\x1b[31m<b>"
        page.add_sample(Sample(at * SECOND, Activity.OUTSIDE, at // 10, -1, line))
    page.tell(told)


def test_a_run_that_ended_in_order_has_no_last_minute(tmp_path: Path) -> None:
    left_page(tmp_path, 0, Told(Moment.EXITED))
    assert last_minute(read_pages(tmp_path)) is None
    assert last_minute([]) is None


def test_a_rank_that_was_lost_and_not_replaced_has_no_last_minute(tmp_path: Path) -> None:
    write(Run(ranks=2, steps=3), tmp_path)
    left_page(tmp_path, 0, Told(Moment.EXITED))
    left_page(tmp_path, 1, Told())
    assert "the last minute" in CliRunner().invoke(main, ["report", str(tmp_path)]).output
    write_healing(tmp_path, Healing(1, 2, 1, [(1, "SIGKILL")], 0, 1.0))
    assert "the last minute" not in CliRunner().invoke(main, ["report", str(tmp_path)]).output


def test_the_rank_that_others_waited_for_first_is_named_first(tmp_path: Path) -> None:
    left_page(tmp_path, 0, Told(Moment.FAILED, 2, 90 * SECOND, "rank 2 is missing: it has ended"))
    left_page(tmp_path, 1, Told(Moment.FAILED, 0, 95 * SECOND, "rank 0 is missing"))
    left_page(tmp_path, 2, Told(), end=91)
    last = last_minute(read_pages(tmp_path))
    assert last is not None
    assert last.first.startswith("first, rank 0 waited in vain since ")
    assert last.first.endswith(": rank 2 is missing: it has ended")


def test_without_a_word_the_rank_that_was_silent_first_is_named(tmp_path: Path) -> None:
    left_page(tmp_path, 0, Told(), end=100)
    left_page(tmp_path, 1, Told(), end=90)
    last = last_minute(read_pages(tmp_path))
    assert last is not None
    assert last.first.startswith("first, rank 1 gave its last sign of life, at ")
    assert last.first.endswith("(backward, step 7)")


def test_an_exception_that_ended_a_rank_was_first_unless_it_tells_of_another(tmp_path: Path) -> None:
    left_page(tmp_path, 0, Told(Moment.EXITED, since=90 * SECOND, text="PeerError('rank 1 raised …')"))
    left_page(tmp_path, 1, Told(Moment.EXITED, since=95 * SECOND, text="KeyError('x') (train.py:31 in load)"))
    left_page(tmp_path, 2, Told(Moment.FAILED, 1, 80 * SECOND, "rank 1 is missing: it has ended"))
    last = last_minute(read_pages(tmp_path))
    assert last is not None
    assert last.first == "first, rank 1 ended by KeyError('x') (train.py:31 in load)"


def test_if_all_ranks_raised_because_of_each_other_the_first_is_named(tmp_path: Path) -> None:
    for rank in range(2):
        left_page(tmp_path, rank, Told(Moment.EXITED, since=(90 - rank) * SECOND, text=f"PeerError({rank})"))
    last = last_minute(read_pages(tmp_path))
    assert last is not None
    assert last.first == "first, rank 1 ended by PeerError(1)"


def test_samples_of_one_line_are_put_together_and_nothing_can_act_on_a_terminal(tmp_path: Path) -> None:
    left_page(tmp_path, 0, Told())
    last = last_minute(read_pages(tmp_path))
    assert last is not None
    [rank] = last.ranks
    assert rank.lines[1:] == [
        "-59 s to -20 s  steps 4 to 8, outside of forward and backward: train.py:46 in main",
        "-19 s to 0 s  steps 8 to 10, outside of forward and backward: train.py:31 in load�[31m<b>",
    ]
    assert rank.stack == ["train.py:31 in load", "train.py:50 in main"]


def lines(folder: Path, samples: list[tuple[float, int]]) -> list[str]:
    """The lines of samples, each of another place in a script: seconds and step."""
    page = RankPage(0, folder)
    for number, (at, step) in enumerate(samples):
        page.add_sample(
            Sample(int(at * SECOND), Activity.OUTSIDE, step, -1, f"train.py:{number // 2} in main")
        )
    last = last_minute(read_pages(folder))
    assert last is not None
    return [line.partition(", ")[0] for line in last.ranks[0].lines[1:]]


def test_a_time_is_told_once_if_it_is_both_the_first_and_the_last(tmp_path: Path) -> None:
    found = lines(tmp_path, [(90, 4), (95, 4), (98, 5), (98.2, 5), (99.8, 5), (100, 5)])
    assert found == ["-10 s to -5 s  step 4", "-2 s  step 5", "0 s  step 5"]


def test_before_the_first_step_there_is_no_number_of_a_step(tmp_path: Path) -> None:
    found = lines(tmp_path, [(90, -1), (95, -1), (98, -1), (100, 2)])
    assert found == ["-10 s to -5 s  before the first step", "-2 s to 0 s  until step 2"]
    page = RankPage(1, tmp_path)
    page.mark(Activity.WRAPPING, 1)
    page.beat(80 * SECOND, usual_step=0, thread=0)
    last = last_minute(read_pages(tmp_path))
    assert last is not None
    assert "step -1" not in last.first
    assert last.first.endswith("before the first step)")


def test_the_command_shows_it_also_without_a_step_and_the_page_has_it_as_text(tmp_path: Path) -> None:
    left_page(tmp_path, 0, Told())
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "first, rank 0 gave its last sign of life" in result.output
    write(Run(), tmp_path)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "train.py:50 in main" in result.output
    page = (tmp_path / "report.html").read_text()
    assert "The last minute" in page
    assert "train.py:31 in load�[31m&lt;b&gt;" in page


TRAIN = """
import os, sys, torch
from torch import nn
from paceline import DistributedDataParallel
store = torch.distributed.FileStore(sys.argv[2], 2)
torch.distributed.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
ddp = DistributedDataParallel(nn.Linear(4, 4))
for step in range(4):
    if step == 3 and sys.argv[1] == "1":
        os.kill(os.getpid(), 9)
    ddp(torch.ones(2, 4)).sum().backward()
"""


def test_the_report_of_a_run_with_a_killed_rank_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "PACELINE_RECORD": str(tmp_path / "acts")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(rank), str(tmp_path / "store")],
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=100) for rank in ranks] == [1, -signal.SIGKILL]
    result = CliRunner().invoke(main, ["report", str(tmp_path / "acts")])
    assert result.exit_code == 0, result.output
    assert "first, rank 0 waited in vain since" in result.output
    assert "rank 1 is missing: it has ended" in result.output
