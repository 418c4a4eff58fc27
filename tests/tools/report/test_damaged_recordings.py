"""Whatever is in the files of a recording, it can be read, or the error is a RecordingError in one line."""

import json
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import MS, Run, Slow, write

from paceline.errors import RecordingError
from paceline.recording import ring_buffer
from paceline.recording.rows import StepColumn
from paceline.tools.main import main
from paceline.tools.report.analysis import analyse_recording
from paceline.tools.report.html_page import html_page
from paceline.tools.report.perfetto_trace import write_trace
from paceline.tools.run.progress import read_progress


class Files(dict[str, bytes]):
    """What files contain, by name."""

    def __repr__(self) -> str:
        return f"files of {sum(map(len, self.values()))} bytes"  # short enough for a report of a failure


DESCRIPTION, ROWS = "rank1-wrapper0-plan1.json", "rank1-wrapper0-plan1.rows"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A recording of two ranks on two hosts, in small files."""
    run = Run(ranks=2, steps=12, buckets=2, hosts=[0, 1], skews=[0, 7 * MS], slow=[Slow(1, 9)], parameters=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_buffer, "_BYTES_OF_ROWS", 2000)
        patch.setattr(ring_buffer, "_SUMS", 8)
        folder = write(run, tmp_path_factory.mktemp("healthy"))
    return Files({path.name: path.read_bytes() for path in folder.iterdir()})


def read_all(files: dict[str, bytes]) -> bool:
    """Do all that is done with a recording; whether it could be read."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        str(read_progress(folder))
        try:
            analysed = analyse_recording(folder)
        except RecordingError:
            return False
        html_page(analysed)
        write_trace([run for run, _ in analysed], folder / "trace.json")
        return True


# Numbers where something changes: no number, signs, 32 and 64 bits, and more than a float can hold.
numbers = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 2**63, 10**400]),
    st.integers(-(2**64), 2**64),
)
texts = st.one_of(
    st.sampled_from(["", "\x1b[31m", "</script>", "\ud800", "\0", "🦊" * 9]), st.text(max_size=9)
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts, st.floats(), st.sampled_from([1e308, -0.0])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([f"rank{rank}-wrapper0-plan{plan}" for rank in range(2) for plan in range(2)])


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as its container and its key or index."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=names, changes=st.lists(st.tuples(st.integers(0, 10**6), values | st.just(...)), max_size=3))
def test_any_description_is_read_or_refused(
    healthy: Files, name: str, changes: list[tuple[int, Any]]
) -> None:
    described = json.loads(healthy[f"{name}.json"])
    for number, value in changes:
        found = places(described)
        container, key = found[number % len(found)]
        if value is ...:
            del container[key]
        else:
            container[key] = value
        if not places(described):
            break
    read_all(healthy | {f"{name}.json": json.dumps(described).encode("ascii")})


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=names, cells=st.lists(st.tuples(st.integers(0, 10**6), st.integers(-(2**63), 2**63 - 1)), max_size=6)
)
def test_any_numbers_are_read_or_refused(healthy: Files, name: str, cells: list[tuple[int, int]]) -> None:
    content = array("q", healthy[f"{name}.rows"])
    for place, number in cells:
        # Every second change is in the header, which is what sizes and places depend on.
        content[place % 8 if place % 2 else place % len(content)] = number
    read_all(healthy | {f"{name}.rows": content.tobytes()})


damages = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 10**6), st.just(b"")),
    st.tuples(st.just("insert"), st.integers(0, 10**6), st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("replace"), st.integers(0, 10**6), st.binary(min_size=1, max_size=20)),
)


def damaged(content: bytes, kind: str, place: int, more: bytes) -> bytes:
    at = place % (len(content) + 1)
    after = {"cut": len(content), "insert": at, "replace": at + len(more)}[kind]
    return content[:at] + more + content[after:]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=names, suffix=st.sampled_from(["json", "rows"]), damage=damages)
def test_any_bytes_are_read_or_refused(
    healthy: Files, name: str, suffix: str, damage: tuple[str, int, bytes]
) -> None:
    path = f"{name}.{suffix}"
    read_all(healthy | {path: damaged(healthy[path], *damage)})


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(8)), kept=st.integers(1, 8))
def test_files_that_took_each_others_names_are_read_or_refused(
    healthy: Files, order: list[int], kept: int
) -> None:
    files = sorted(healthy)
    read_all({files[place]: healthy[files[other]] for place, other in enumerate(order[:kept])})


def test_what_is_not_damaged_is_read(healthy: Files) -> None:
    assert read_all(healthy)


def with_value(key: str, value: str) -> Callable[[Files], dict[str, bytes]]:
    """Has another value in a description, which is given as JSON."""

    def change(files: Files) -> dict[str, bytes]:
        described = {name: json.dumps(each) for name, each in json.loads(files[DESCRIPTION]).items()}
        described[key] = value
        inside = ",".join(f'"{name}":{each}' for name, each in described.items())
        return files | {DESCRIPTION: f"{{{inside}}}".encode()}

    return change


@pytest.mark.parametrize(
    "change",
    [
        with_value("cap", "Infinity"),
        with_value("epoch", "NaN"),
        with_value("hosts", "1e999"),
        with_value("epoch", "1" + "0" * 5000),
        with_value("rank", "[1]"),
        with_value("world", "true"),
        with_value("cap", "-1"),
        with_value("nbytes", "[1, 2, 3, -4]"),
        with_value("group", "[]"),
        with_value("buckets", "[]"),
        with_value("buckets", '[{"slots": [99], "nbytes": 1}, {"slots": [0], "nbytes": 1}]'),
        with_value("slots", "[" * 100_000 + "]" * 100_000),
        with_value("version", '"\\u001b[2J"'),
        with_value("more", "[" * 100_000),
    ],
)
def test_the_command_ends_with_one_line_that_names_the_file(
    healthy: Files, tmp_path: Path, change: Callable[[Files], dict[str, bytes]]
) -> None:
    for name, content in change(healthy).items():
        (tmp_path / name).write_bytes(content)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)
    assert result.output.startswith("Error: ")
    assert DESCRIPTION in result.output
    assert result.output.count("\n") == 1
    assert "\x1b" not in result.output
    assert read_progress(tmp_path) is None


def test_steps_that_begin_at_one_time_have_no_progress(healthy: Files, tmp_path: Path) -> None:
    files = dict(healthy)
    for name in (ROWS, ROWS.replace("rank1", "rank0")):
        cells = array("q", files[name])
        columns, capacity = cells[2:4]
        for row in range(capacity):
            cells[len(cells) - (row + 1) * columns + StepColumn.BEGIN] = 5
        files[name] = cells.tobytes()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert read_progress(tmp_path) is None
