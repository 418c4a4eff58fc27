"""Lines of several ranks: whole, in order, and none lost."""

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.tools.run.console import Console, Destination, Source, StatusLine
from paceline.tools.run.progress import RunProgress, SlowestRank
from paceline.tools.run.rank_output import LONGEST_LINE, LineBuffer, OutputThread, RankStream


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Pieces(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str, /) -> int:
        self.pieces.append(text)
        return len(text)


def progress(step: int) -> RunProgress:
    slowest = SlowestRank(1, 0.004, "backward")
    return RunProgress(step, 12.5, 0.0, 800.0, "rows", 0.25, buckets=2, slowest=slowest)


SILENT = StatusLine(Destination(io.StringIO()), lambda: None, lambda: 80)


@pytest.mark.parametrize(
    ("pieces", "lines", "unfinished"),
    [
        ([b"a\nb", b"c\n"], ["a", "bc"], ""),
        ([b"dos\r", b"\n"], ["dos"], ""),
        ([b"\r1%", b"\r2%", b"\r3%"], [], "3%"),
        ([b"1%\r", b"2%\r"], [], "2%"),
        ([b"\r1%\r2%\ndone\n"], ["2%", "done"], ""),
        (["é".encode()[:1], "é".encode()[1:] + b"\n"], ["é"], ""),
        ([b"\xff\n", b"\n"], ["�", ""], ""),
        ([b"x" * (LONGEST_LINE + 1)], ["x" * (LONGEST_LINE + 1)], ""),
    ],
    ids=["pieces", "dos", "bar", "bar ahead", "bar done", "cut letter", "not text", "long"],
)
def test_a_stream_is_cut_into_lines(pieces: list[bytes], lines: list[str], unfinished: str) -> None:
    stream = LineBuffer()
    assert [line for piece in pieces for line in stream.feed(piece)] == lines
    assert stream.unfinished == unfinished
    assert stream.feed(b"", final=True) == ([unfinished] if unfinished else [])


def test_an_unfinished_line_is_gone_on_with_until_another_rank_speaks() -> None:
    stream = io.StringIO()
    destination = Destination(stream)
    console, (zero, one) = Console(), (Source(0, destination), Source(1, destination))
    console.unfinished(zero, "name? ")
    console.line(zero, "name? me")
    console.unfinished(zero, "half")
    console.line(one, "other")
    console.line(zero, "half and half")
    assert stream.getvalue() == "[0] name? me\n[0] half\n[1] other\n[0] half and half\n"


def test_a_line_and_its_end_are_one_write_for_another_command_may_have_the_screen_too() -> None:
    stream = Pieces()
    console, (zero, one) = Console(), (Source(0, Destination(stream)), Source(1, Destination(stream)))
    for source in (zero, one, one):
        console.line(source, "words")
    assert stream.pieces == ["[0] words\n", "[1] words\n", "[1] words\n"]


def test_terminals_get_colours_and_bars_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    console, source = Console(), Source(0, Destination(stream))
    for text in ("1%", "2%"):
        console.unfinished(source, text)
    assert stream.getvalue() == "\x1b[32m[0]\x1b[0m 1%\r\x1b[K\x1b[32m[0]\x1b[0m 2%"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Source(0, Destination(stream)).prefix == "[0] "


def test_what_cannot_be_encoded_or_written_does_not_stop_a_run() -> None:
    raw = io.BytesIO()
    destination = Destination(io.TextIOWrapper(raw, encoding="ascii"))
    destination.write("é\n")
    assert raw.getvalue() == b"?\n"
    reader, writer = os.pipe()
    os.close(reader)
    broken = os.fdopen(writer, "w")
    destination = Destination(broken)
    destination.write("lost\n")
    destination.write("lost too\n")
    with pytest.raises(BrokenPipeError):
        broken.close()


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_output_shows_a_prompt_keeps_a_log_and_does_not_repeat_bars(tmp_path: Path) -> None:
    shown, output = io.StringIO(), OutputThread(SILENT)
    destination = Destination(shown)
    pipes = [tmp_path / str(rank) for rank in (0, 1)]
    for rank, pipe in enumerate(pipes):
        output.add(RankStream(pipe, Source(rank, destination), log=tmp_path / f"{rank}.log", is_shown=True))
    with pipes[0].open("wb", buffering=0) as zero, pipes[1].open("wb", buffering=0) as one:
        zero.write(b"name? ")
        wait_until(lambda: shown.getvalue() == "[0] name? ")
        for percent in range(100):
            one.write(b"\r%d%%" % percent)
        one.write(b"\nend")
        zero.write(b"\n")
    output.finish()
    *lines, last = shown.getvalue().splitlines()
    assert [line for line in lines if line.startswith("[0]")] == ["[0] name? "]
    assert last == "[1] end"
    bars = [line for line in lines if "%" in line]
    assert bars[-1] == "[1] 99%"
    assert len(bars) <= 2
    assert (tmp_path / "0.log").read_bytes() == b"name? \n"
    assert (tmp_path / "1.log").read_bytes().startswith(b"\r0%\r1%")


def test_on_a_terminal_the_status_stays_below_what_ranks_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    destination = Destination(screen)
    console, source = Console(), Source(0, destination)
    console.line(source, "before")
    console.status(destination, "step 1")
    console.status(destination, "step 2")
    console.line(source, "after")
    console.unfinished(source, "name? ")
    console.status(destination, "step 3")  # which would be in its way
    assert screen.getvalue() == "[0] before\n\r\x1b[Kstep 1\r\x1b[Kstep 2\r\x1b[K[0] after\n[0] name? "


def test_the_status_fits_the_terminal_and_is_told_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    steps = iter([None, progress(3), progress(3), progress(4), progress(4)])
    status = StatusLine(Destination(Terminal()), lambda: next(steps), lambda: 31)
    told = []
    for now in (1.0, 1.1, 1.5, 2.0, 2.5):
        monkeypatch.setattr("paceline.tools.run.console.time.monotonic", lambda now=now: now)
        told.append(status.due())
    assert told == [None, None, "step 3 · 12.5 steps/s · 800 r…", None, "step 4 · 12.5 steps/s · 800 r…"]
    assert status.last() == told[-1]


def test_elsewhere_the_status_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([progress(30), progress(99)])
    status = StatusLine(Destination(io.StringIO()), lambda: next(steps), lambda: 31)
    told = []
    for now in (1.0, 5.0, 11.5, 12.0):
        monkeypatch.setattr("paceline.tools.run.console.time.monotonic", lambda now=now: now)
        told.append(status.due())
    line = (
        "paceline: step {}, 12.5 steps/s, 800 rows/s, 25% of communication overlapped, "
        "rank 1 slowest by 4.00 ms, in backward"
    )
    assert told == [None, None, line.format(30), None]
    assert status.last() == line.format(99)


class Full(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError("no space left on device")


class Odd:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.parametrize("stream", [None, Full(), Odd()], ids=["none", "full", "without isatty"])
def test_what_cannot_be_written_to_stops_nobody(stream: Any) -> None:
    destination = Destination(stream)
    for _ in range(2):
        destination.write("words")
    assert not destination.is_terminal


def test_a_status_comes_back_after_other_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = Terminal()
    destination = Destination(screen)
    output = OutputThread(StatusLine(destination, lambda: progress(3), lambda: 31))
    wait_until(lambda: screen.getvalue().count("step 3") == 1)
    output.add(RankStream(tmp_path / "pipe", Source(0, destination), log=None, is_shown=True))
    (tmp_path / "pipe").write_text("words\n")
    wait_until(lambda: screen.getvalue().count("step 3") == 2)
    output.finish()
    assert screen.getvalue().splitlines()[-1].endswith("step 3 · 12.5 steps/s · 800 r…")


def fail() -> RunProgress:
    raise ValueError("no such row")


@pytest.mark.parametrize("make", [Terminal, io.StringIO], ids=["terminal", "elsewhere"])
def test_an_error_of_the_status_is_told_once_and_lines_go_on(
    make: Callable[[], io.StringIO], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("paceline.tools.run.console.ELSEWHERE", 0.0)
    screen = make()
    destination = Destination(screen)
    output = OutputThread(StatusLine(destination, fail, lambda: 80))
    told = "paceline: the line about the run's progress is off (ValueError: no such row)\n"
    wait_until(lambda: told in screen.getvalue())
    output.add(RankStream(tmp_path / "pipe", Source(0, destination), log=None, is_shown=True))
    (tmp_path / "pipe").write_text("words\n")
    wait_until(lambda: "words\n" in screen.getvalue())
    output.finish()
    assert screen.getvalue().count(told) == 1


def test_an_error_of_the_last_line_is_told_and_is_the_last_line() -> None:
    screen = io.StringIO()
    output = OutputThread(StatusLine(Destination(screen), lambda: None, lambda: 80, read_whole=fail))
    output.finish()
    assert screen.getvalue().endswith("is off (ValueError: no such row)\n")
