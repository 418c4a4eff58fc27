"""The results in docs/versions.md, and the program that makes them (tests/versions)."""

import sys
from pathlib import Path

import pytest
import try_versions
import version_rows
from try_versions import Trial, chosen, compared, counted, without_torchs
from version_rows import PAGE, Row, load, rendered, save, supported_pythons

from paceline.torch_private import TRIED, release

FINE = Row(
    torch="2.14.0+cpu",
    python="3.11.7",
    imports=True,
    tests={"passed": 3950, "failed": 0, "skipped": 2},
    torture={"right": 35, "of": 35},
    conformance={"passed": 75, "of": 78, "exceptions": 3},
)
NOT_INSTALLED = Row(torch="2.15", python="3.13.0", problems=["install: exit code 1"])
BLOCK = "before\n<!-- results: begin -->\nold\n<!-- results: end -->\nafter\n"


def test_the_page_has_the_results() -> None:
    assert rendered(PAGE.read_text(), load()) == PAGE.read_text()


def test_each_version_that_is_called_tried_has_a_result() -> None:
    found = {(release(row.torch), release(row.python)): row for row in load()}
    oldest, *others = supported_pythons()
    for key in [*((version, oldest) for version in TRIED), *((TRIED[-1], python) for python in others)]:
        assert found[key].imports
        assert None not in (found[key].tests, found[key].torture, found[key].conformance)


def test_a_row_has_every_count_and_a_failed_one_says_why() -> None:
    text = rendered(BLOCK, [FINE, NOT_INSTALLED])
    assert "| 2.14.0+cpu | 3.11.7 | yes | 3,950 | 0 | 35 of 35 | 75 of 78 (3 cannot apply) |\n" in text
    assert "| 2.15 | 3.13.0 | **no** | not run | not run | not run | not run |\n" in text
    assert "Failed with torch 2.15 and Python 3.13.0:\n\n- install: exit code 1\n" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert rendered(text, [FINE, NOT_INSTALLED]) == text


def test_a_result_replaces_the_row_of_its_release_only(tmp_path: Path) -> None:
    path = tmp_path / "versions.json"
    newer = Row(torch="2.14.1", python="3.11.9", imports=True)
    for row in (NOT_INSTALLED, FINE, Row(torch="2.9.0", python="3.11.7"), newer):
        save(row, path)
    assert [(row.torch, row.python) for row in load(path)] == [
        ("2.9.0", "3.11.7"),
        ("2.14.1", "3.11.9"),
        ("2.15", "3.13.0"),
    ]


def test_what_is_asked_for_is_tried() -> None:
    assert chosen(["2.10", "2.15.1"], []) == [("2.10", sys.executable), ("2.15.1", sys.executable)]
    assert chosen([], ["python3.12"]) == [(TRIED[-1], "python3.12")]
    assert chosen(["2.10"], ["a", "b"]) == [("2.10", "a"), ("2.10", "b")]


def test_otherwise_every_torch_and_every_python_that_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ".".join(sys.version.split()[0].split(".")[:2])
    monkeypatch.setattr(version_rows, "supported_pythons", lambda: [own, "3.90", "3.91"])
    monkeypatch.setattr(try_versions, "supported_pythons", lambda: [own, "3.90", "3.91"])
    versions = {f"python{own}": f"{own}.1", "python3.91": "3.91.0"}
    monkeypatch.setattr(try_versions, "_version_of", versions.get)
    assert chosen([], []) == [*((version, sys.executable) for version in TRIED), (TRIED[-1], "python3.91")]


def test_constraints_leave_torch_its_own_requirements() -> None:
    lines = "# all\nJinja2==3.1.6\nnumpy==2.4.6\npytest==9.2.0\ntorch==2.13.0\ntorchdata==0.11.0\n"
    assert without_torchs(lines) == "# all\nnumpy==2.4.6\npytest==9.2.0\ntorchdata==0.11.0\n"
    assert without_torchs("typing_extensions==4.16.0\n") == ""


def test_results_of_tests_are_counted() -> None:
    junit = """<testsuites><testsuite>
        <testcase classname="tests.a" name="test_one"/>
        <testcase classname="tests.a" name="test_two"><failure/></testcase>
        <testcase classname="tests.b" name="test_three"><error/></testcase>
        <testcase classname="tests.b" name="test_four"><skipped/></testcase>
    </testsuite></testsuites>"""
    counts, failed = counted(junit)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert failed == ["`tests.a.test_two`", "`tests.b.test_three`"]


def test_conformance_counts_what_passes_with_torchs_wrapper() -> None:
    results = [{"test": test, "outcome": "passed"} for test in ("one", "extra")]
    results += [{"test": "two", "outcome": "failed"}, {"test": "three", "outcome": "hung"}]
    counts, failed = compared(["one", "two", "three", "four"], results, exceptions=["two"])
    assert counts == {"passed": 1, "of": 4, "exceptions": 1}
    assert failed == ["conformance: `three`", "conformance: `four`"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(try_versions, "BUILD", tmp_path / "build")
    monkeypatch.setattr(try_versions, "ROOT", tmp_path)
    monkeypatch.setattr(try_versions, "PAGE", tmp_path / "versions.md")
    (tmp_path / "constraints.txt").write_text("")
    (tmp_path / "versions.md").write_text(BLOCK)
    return tmp_path


def test_a_version_that_cannot_be_installed_is_a_row_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The environment's Python cannot find this project: pip ends at once, without a package index.
    monkeypatch.setattr(sys, "argv", ["try_versions.py", "--versions", "2.16.0"])
    monkeypatch.setattr(try_versions, "save", lambda row: save(row, folder / "versions.json"))
    assert try_versions.main() == 1
    (row,) = load(folder / "versions.json")
    assert (row.torch, row.imports, row.tests) == ("2.16.0", False, None)
    assert row.problems[0].startswith("install: exit code 1 (printed: build/2.16.0-")
    assert not (folder / "build" / f"2.16.0-{row.python}" / "venv").exists()


def test_a_command_that_does_not_end_is_ended(folder: Path) -> None:
    (folder / "build").mkdir()
    trial = Trial("2.16.0", sys.executable)
    trial._folder.mkdir()
    with pytest.raises(try_versions.StepError, match="not done in 1 s"):
        trial._call("sleep", "sleep", "60", seconds=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--versions", "newest"], "looks like 2.15 or 2.15.0 (version: newest)"),
        (["--pythons", "python0.1"], "cannot be started (python: python0.1)"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_is_installed(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["try_versions.py", *arguments])
    with pytest.raises(SystemExit):
        try_versions.main()
    assert words in capsys.readouterr().err
