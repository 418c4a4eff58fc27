import os
import time
from pathlib import Path

import pytest

from paceline.watch.rank_page import (
    SAMPLES,
    Activity,
    Moment,
    PageContent,
    PageReader,
    RankPage,
    Sample,
    Told,
    delete_pages,
    read_page,
    read_pages,
)


def read(page: RankPage) -> PageContent:
    reader = PageReader(page.path)
    try:
        content = reader.read()
    finally:
        reader.close()
    assert content is not None
    return content


@pytest.fixture(params=["file", "memory"])
def page(request: pytest.FixtureRequest, tmp_path: Path) -> RankPage:
    return RankPage(3, tmp_path / "new" if request.param == "file" else None)


def test_others_read_what_was_marked_and_written(page: RankPage) -> None:
    page.mark(Activity.BUCKET, 2**32 - 1, 7, 1)
    page.beat(50, usual_step=9, thread=4)
    page.write_stack(40, "a\t1\tf")
    page.tell(Told(Moment.STALLED, 2, 30, "räñk 2"))
    page.write_header(watcher=99)
    content = read(page)
    assert (content.rank, content.pid, content.watcher) == (3, os.getpid(), 99)
    assert content.doing == page.doing()
    assert content.doing.awaited == (Activity.BUCKET, 2**32 - 1, 7, 1)
    assert (content.heartbeat, content.usual_step, content.thread) == (50, 9, 4)
    assert (content.stack, content.stack_at) == ("a\t1\tf", 40)
    assert content.told == Told(Moment.STALLED, 2, 30, "räñk 2")


def test_another_activity_keeps_the_step(page: RankPage) -> None:
    page.mark(Activity.OUTSIDE, 5, 7)
    page.change(Activity.OPTIMIZER)
    doing = read(page).doing
    assert (doing.activity, doing.wrapper, doing.step) == (Activity.OPTIMIZER, 5, 7)


def test_the_last_minute_is_kept(page: RankPage) -> None:
    for at in range(1, SAMPLES + 11):
        page.add_sample(Sample(at, Activity.FORWARD, at, -1, f"line {at}"))
    samples = read(page).samples
    assert [sample.at for sample in samples] == list(range(11, SAMPLES + 11))
    assert samples[-1].line == f"line {SAMPLES + 10}"


def test_long_texts_are_cut(page: RankPage) -> None:
    page.write_stack(1, "x" * 100_000)
    page.tell(Told(Moment.STALLED, 0, 1, "y" * 100_000))
    page.add_sample(Sample(1, Activity.FORWARD, 1, -1, "z" * 100_000))
    content = read(page)
    assert set(content.stack) == {"x"}
    assert set(content.told.text) == {"y"}
    assert set(content.samples[0].line) == {"z"}


def test_a_mark_costs_little(page: RankPage) -> None:
    best = min(_timed(page) for _ in range(20))
    assert best < 20e-6  # it is below 1 us; other programs may use the machine


def _timed(page: RankPage) -> float:
    start = time.perf_counter()
    for _ in range(100):
        page.mark(Activity.BUCKET, 1, 2, 3)
    return (time.perf_counter() - start) / 100


def test_a_file_is_for_its_owner_only_and_no_link_is_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "rank0.status").symlink_to(target)
    assert read_page(tmp_path / "rank0.status") is None
    page = RankPage(0, tmp_path)
    assert target.read_text() == "precious"
    assert page.path.startswith("/proc/")  # the folder is left alone
    (tmp_path / "rank0.status").unlink()
    assert Path(RankPage(0, tmp_path).path).stat().st_mode & 0o777 == 0o600


def test_what_is_no_page_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0.status")
    (tmp_path / "rank1.status").write_bytes(b"")
    (tmp_path / "rank2.status").write_bytes(os.urandom(100_000))
    (tmp_path / "rank3.status").write_bytes(b"paceline" + os.urandom(100_000))
    RankPage(4, tmp_path)
    assert [page.rank for page in read_pages(tmp_path)] == [4]
    delete_pages(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_cannot_be_written_to_leaves_the_page_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    page = RankPage(0, tmp_path / "file")
    assert read(page).rank == 0


def test_a_forked_child_writes_to_its_own_copy(page: RankPage) -> None:
    page.mark(Activity.FORWARD, 1, 2)
    child = os.fork()
    if child == 0:
        page.become_private()
        page.mark(Activity.BACKWARD, 1, 3)
        os._exit(0)
    os.waitpid(child, 0)
    assert read(page).doing.step == 2
