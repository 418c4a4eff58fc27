"""What ``paceline report`` writes: the page, the trace, the scalars, and the summary in the terminal."""

import base64
import gzip
import json
import os
import re
import stat
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import MS, Run, Slow, write

from paceline.recording.reader import PlanRecording
from paceline.recording.rows import SumColumn, row_width
from paceline.tools.main import main
from paceline.tools.report.analysis import analyse, analyse_recording
from paceline.tools.report.html_page import html_page
from paceline.tools.report.page_numbers import encode
from paceline.tools.report.wrapper_runs import wrapper_runs

DESCRIPTION = {
    "version": 2, "rank": 0, "world": 2, "group": [0, 1], "module": "Net", "wrapper": 0,
    "slots": ["a", "b"], "nbytes": [4, 4], "first_cap": 1, "cap": 1,
    "backend": "gloo", "transport": "c10d", "hosts": 1, "device": "cpu",
    "exchange": "average", "plan": 0, "unit": "samples", "host": "here", "boot": "", "pid": 1, "epoch": 0,
    "buckets": [{"slots": [1], "nbytes": 4}, {"slots": [0], "nbytes": 4}],
}  # fmt: skip


def paceline(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def decode(encoded: str, lengths: list[int]) -> list[list[int]]:
    """The columns, decoded as the page does it."""
    data = zlib.decompress(base64.b64decode(encoded))
    columns = []
    for length in lengths:
        planes, data = [data[byte * length : (byte + 1) * length] for byte in range(4)], data[4 * length :]
        value, column = 0, []
        for cell in zip(*planes, strict=True):
            change = int.from_bytes(cell, "little")
            value += (change >> 1) ^ -(change & 1)
            column.append(value)
        columns.append(column)
    assert not data
    return columns


@given(st.lists(st.lists(st.integers(-(2**30) + 1, 2**30 - 1), max_size=9), max_size=4))
def test_columns_are_decoded_to_what_they_were(columns: list[list[int]]) -> None:
    assert decode(encode(columns), [len(column) for column in columns]) == columns


cells = st.one_of(st.just(0), st.integers(-(2**62), 2**62), st.integers(0, 10**9))
rows = st.lists(st.lists(cells, min_size=row_width(2), max_size=row_width(2)), max_size=4)
sums = st.lists(st.lists(cells, min_size=len(SumColumn), max_size=len(SumColumn)), max_size=3)


@settings(deadline=None, max_examples=40)
@given(st.tuples(rows, rows), st.tuples(sums, sums), st.sampled_from([("x", "x"), ("x", "y")]))
def test_there_is_a_page_whatever_the_numbers_are(
    written: tuple[list[list[int]], ...], added: tuple[list[list[int]], ...], boots: tuple[str, str]
) -> None:
    recordings = [
        PlanRecording(
            {**DESCRIPTION, "rank": rank, "boot": boots[rank]}, written[rank], added[rank], len(written[rank])
        )
        for rank in range(2)
    ]
    if any(written):
        assert "</html>" in html_page([(run, analyse(run)) for run in wrapper_runs(recordings)])


def test_no_name_ends_the_script_and_nothing_is_fetched(tmp_path: Path) -> None:
    names = ["</script><script>alert(1)</script>", "<!--", "{{script}}", "\ud800", "&amp;\u2028"]
    run = Run(ranks=1, steps=3, names=names, module="</title><b>{{numbers}}")
    made = html_page(analyse_recording(write(run, tmp_path)))
    assert made.count("</script>") == made.count("<script") == 4
    assert made.count("</title>") == 1
    assert "alert(1)" in made
    assert "alert(1)<" not in made
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://|fetch\(""", made)
    made.encode("utf-8")


def test_many_ranks_and_steps_stay_small(tmp_path: Path) -> None:
    run = Run(ranks=8, steps=250, buckets=6, jitter=0.3)
    made = len(html_page(analyse_recording(write(run, tmp_path))))
    assert made * 10_000 / run.steps < 20e6


def test_a_page_has_no_more_numbers_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.tools.report.html_page._MOST_NUMBERS", 30 * 3 * 10)
    monkeypatch.setattr("paceline.tools.report.html_page._MOST_RANKS", 3)
    analysed = analyse_recording(write(Run(ranks=5, steps=60, slow=[Slow(4, 9)]), tmp_path))
    data = json.loads(re.search(r'application/json">(.*?)</script>', html_page(analysed))[1])
    drawn = [{"rank": rank, "rows": 10, "sums": 60, "last_rows": [9], "overlays": 0} for rank in (0, 1, 4)]
    assert data["wrappers"][0]["timelines"] == drawn


def test_a_trace_has_ranks_as_processes_on_one_clock(tmp_path: Path) -> None:
    run = Run(ranks=2, steps=5, hosts=[0, 1], skews=[0, 9_000_000 * MS], transfer=7, slow=[Slow(1, 4)])
    write(run, tmp_path / "run")
    result = paceline(tmp_path / "run", "--trace", tmp_path / "trace.json.gz")
    assert result.exit_code == 0, result.output
    assert "trace of the last 4 steps" in result.output
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {
        (each["pid"], each["args"]["name"]) for each in events if each["ph"] == "M" and "name" in each["args"]
    }
    assert {(0, "rank 0 on node-0"), (1, "rank 1 on node-1")} <= names
    assert {(1, "compute"), (1, "communication"), (1, "communication 2"), (1, "optimizer")} <= names
    slices = [each for each in events if each["ph"] == "X"]
    backwards = [each for each in slices if each["name"] == "backward" and each["args"]["step"] == 2]
    assert [each["dur"] for each in backwards] == [20_000, 24_000]
    ends = [each["ts"] + each["dur"] for each in backwards]
    # Rank 1 is late by 4 ms, so its backward ends that much later, as far as the clocks are known.
    assert ends[1] - ends[0] == pytest.approx(4000, abs=2500)
    [bucket] = [
        each
        for each in slices
        if each["name"] == "bucket 3" and each["args"]["step"] == 2 and not each["pid"]
    ]
    assert bucket["args"]["last gradient"] == "layers.0.weight"
    assert {each["id"] for each in events if each["ph"] == "s"} == {
        each["id"] for each in events if each["ph"] == "f"
    }
    assert_nothing_overlaps(slices)


def test_in_a_trace_buffers_and_forward_begin_when_the_exchange_of_join_ends(tmp_path: Path) -> None:
    write(Run(ranks=1, steps=3, join=6, buffers=2), tmp_path / "run")
    paceline(tmp_path / "run", "--trace", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lengths = [(each["name"], each["dur"]) for each in events if each["ph"] == "X"][:3]
    assert lengths == [("waiting in join", 6000), ("buffer sync", 2000), ("forward", 8000)]


def assert_nothing_overlaps(slices: list[dict[str, object]]) -> None:
    """On one thread a slice is inside another one or after it."""
    threads: dict[object, list[tuple[float, float]]] = {}
    for each in slices:
        threads.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["ts"] + each["dur"]))
    for spans in threads.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        for (_, end), (start, later) in pairwise(spans):
            assert start >= end - 1e-3 or later <= end + 1e-3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scalars_are_by_rank_and_step(tmp_path: Path) -> None:
    write(Run(ranks=2, steps=6, module="Net/../x"), tmp_path / "run")
    result = paceline(tmp_path / "run", "--tensorboard", tmp_path / "scalars")
    assert result.exit_code == 0, result.output
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [folder] = (tmp_path / "scalars").iterdir()
    assert sorted(each.name for each in folder.iterdir()) == ["rank0", "rank1"]
    events = EventAccumulator(str(folder / "rank1"))
    events.Reload()
    backward = events.Scalars("milliseconds/backward")
    assert [(each.step, round(each.value, 3)) for each in backward] == [(step, 20.0) for step in range(6)]
    assert events.Scalars("samples per second")[3].value == pytest.approx(32 / 35.81e-3, rel=0.01)


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Run(ranks=1, steps=3), tmp_path)
    for name in [each for each in sys.modules if each.startswith(("tensorboard", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    result = paceline(tmp_path, "--tensorboard", tmp_path / "scalars")
    assert result.exit_code == 1
    assert "paceline[tensorboard]" in result.output


def test_the_terminal_shows_a_summary_and_where_the_page_is(tmp_path: Path) -> None:
    write(Run(ranks=3, steps=60, slow=[Slow(1, 12, since=20)], module="Net[red]"), tmp_path)
    result = paceline(tmp_path)
    assert result.exit_code == 0, result.output
    assert "Net[red] on ranks 0 to 2, 60 steps" in result.output
    assert "Rank 1 has been a straggler since step 20: 12.0 ms behind" in result.output
    assert f"page: {tmp_path / 'report.html'}" in result.output
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_text_of_a_recording_has_no_effect_on_the_terminal(tmp_path: Path) -> None:
    write(Run(ranks=1, steps=30, module="Net\x1b]0;title\x07\u202e\n[red]", data=90), tmp_path)
    result = paceline(tmp_path)
    assert result.exit_code == 0, result.output
    assert r"Net\x1b]0;title\x07\u202e\n[red] on rank 0" in result.output
    assert all(each.isprintable() for each in result.output.replace("\n", ""))


@pytest.mark.parametrize("output", ["report.html", "trace.json", "scalars/Net/rank0", "scalars/Net"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_is_written_through_a_link(tmp_path: Path, output: str) -> None:
    run, kept, link = tmp_path / "run", tmp_path / "kept", tmp_path / "run" / output
    write(Run(ranks=1, steps=3), run)
    link.parent.mkdir(parents=True, exist_ok=True)
    kept.mkdir() if "scalars" in output else kept.write_text("mine")
    link.symlink_to(kept)
    result = paceline(run, "--trace", run / "trace.json", "--tensorboard", run / "scalars")
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)
    assert f"{link} is a symbolic link" in result.output
    assert not any(kept.iterdir()) if kept.is_dir() else kept.read_text() == "mine"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_written_is_for_its_owner_only(tmp_path: Path) -> None:
    write(Run(ranks=1, steps=3), tmp_path)
    assert (
        paceline(tmp_path, "--trace", tmp_path / "t.json", "--tensorboard", tmp_path / "logs").exit_code == 0
    )
    written = [tmp_path / "report.html", tmp_path / "t.json", *(tmp_path / "logs").rglob("*")]
    modes = {stat.S_IMODE(each.stat().st_mode) for each in written if each.is_file()}
    assert (modes, len(written)) == ({0o600}, 5)


def test_a_fifo_in_place_of_a_recording_does_not_block_the_report(tmp_path: Path) -> None:
    write(Run(ranks=1, steps=3), tmp_path)
    (tmp_path / "rank0-wrapper0-plan1.json").unlink()
    os.mkfifo(tmp_path / "rank0-wrapper0-plan1.json")
    result = paceline(tmp_path)
    assert result.exit_code == 1
    assert "rank0-wrapper0-plan1.json: it is not a regular file" in result.output


def test_the_page_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    write(Run(ranks=1, steps=3), tmp_path)
    assert paceline(tmp_path, "--open").exit_code == 0
    assert opened == [(tmp_path / "report.html").as_uri()]


def test_the_analysis_can_be_printed_as_json(tmp_path: Path) -> None:
    write(Run(ranks=2, steps=30), tmp_path)
    result = paceline(tmp_path, "--json", "-o", tmp_path / "elsewhere.html")
    [found] = json.loads(result.stdout)
    assert found["module"] == "Net"
    assert found["parts"]["backward"] == pytest.approx(20)
    assert (tmp_path / "elsewhere.html").exists()
    assert not (tmp_path / "report.html").exists()


def damage(folder: Path, kind: str) -> None:
    description, numbers = folder / "rank1-wrapper0-plan1.json", folder / "rank1-wrapper0-plan1.rows"
    known = json.loads(description.read_text())
    match kind:
        case "cut off":
            numbers.write_bytes(numbers.read_bytes()[:5000])
        case "cut off in a number":
            numbers.write_bytes(numbers.read_bytes()[:5003])
        case "emptied":
            numbers.write_bytes(b"")
        case "without its rows":
            numbers.unlink()
        case "of another version":
            description.write_text(json.dumps(known | {"version": 999}))
        case "half described":
            description.write_text(description.read_text()[:100])
        case "of something else":
            description.write_text("[1, 2]")
        case "without its rank":
            description.write_text(json.dumps({key: value for key, value in known.items() if key != "rank"}))
        case "without its group":
            description.write_text(json.dumps({key: value for key, value in known.items() if key != "group"}))
        case "with a text for a number":
            description.write_text(json.dumps(known | {"cap": "many"}))
        case "of no text":
            description.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cut off", "damaged"),
        ("cut off in a number", "truncated"),
        ("emptied", "truncated after 0 bytes"),
        ("without its rows", "damaged"),
        (
            "of another version",
            "another version of paceline (recording's format: 999, format that this version reads: 4",
        ),
        ("half described", "not the description of a recording"),
        ("of something else", "not the description of a recording"),
        ("without its rank", "rank"),
        ("without its group", "a value is missing: 'group'"),
        ("with a text for a number", "damaged"),
        ("of no text", "not the description of a recording"),
    ],
)
def test_a_damaged_recording_is_an_error_that_says_so(tmp_path: Path, kind: str, words: str) -> None:
    write(Run(ranks=2, steps=5), tmp_path)
    damage(tmp_path, kind)
    result = paceline(tmp_path)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert words in result.output
    assert "rank1-wrapper0-plan1" in result.output
    assert isinstance(result.exception, SystemExit)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder, "there is no such folder"),
        (lambda folder: folder.mkdir(), "there is no recording in the folder"),
        (lambda folder: write(Run(ranks=1, steps=0), folder), "no step was recorded"),
    ],
    ids=["no folder", "an empty folder", "no step"],
)
def test_a_folder_without_steps_is_an_error_that_says_so(tmp_path: Path, make: object, words: str) -> None:
    make(tmp_path / "run")
    result = paceline(tmp_path / "run")
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)
    assert words in result.output


@pytest.mark.parametrize("option", ["-o", "--trace"])
def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path, option: str) -> None:
    write(Run(ranks=1, steps=3), tmp_path)
    asked = tmp_path / "missing" / "page.json"
    result = paceline(tmp_path, option, asked)
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)
    assert f"there is no such folder (file: {asked}, folder: {asked.parent})" in result.output
    assert ".part" not in result.output
