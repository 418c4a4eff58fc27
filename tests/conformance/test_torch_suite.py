"""PyTorch's own distributed tests with paceline's wrapper: see torch_suite/run.py."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "torch_suite" / "run.py"
END_SECONDS = 20


def ids(name: str) -> list[str]:
    lines = (PROGRAM.parent / name).read_text().splitlines()
    return [entry for line in lines if (entry := line.partition("#")[0].strip())]


TESTS = [test for test in ids("passes_with_torch.txt") if test not in ids("exceptions.txt")]


class Run:
    """The program, running these tests while the results of the first ones are looked at."""

    def __init__(self, tests: list[str], *options: str) -> None:
        self._results: dict[str, dict[str, Any]] = {}
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "--wrapper", "paceline", "--json", *options, *tests],
            stdout=subprocess.PIPE,
            text=True,
        )

    def result(self, test: str) -> dict[str, Any]:
        """The result of ``test``; the program's deadline for each test bounds the wait."""
        while test not in self._results:
            line = self._process.stdout.readline()
            assert line, f"the program ended without a result (exit code: {self._process.wait(END_SECONDS)})"
            result = json.loads(line)
            self._results[result["test"]] = result
        return self._results[test]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(END_SECONDS)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """All that was selected in one run, which keeps every core busy."""
    selected = [item.callspec.params["test"] for item in request.session.items if is_of_suite(item)]
    run = Run(selected)
    yield run
    run.close()


def is_of_suite(item: pytest.Item) -> bool:
    return item.path == Path(__file__) and "run" in item.fixturenames


@pytest.mark.parametrize("test", TESTS)
def test_passes_with_paceline(run: Run, test: str) -> None:
    result = run.result(test)
    if result["outcome"] != "passed":
        pytest.fail(f"{result['outcome']}: {result['message']}\n{result['detail']}", pytrace=False)
    assert min(result["built"]["paceline"]) > 0
    assert max(result["built"]["torch"]) == 0


def test_the_program_fails_if_pacelines_wrapper_was_not_used(tmp_path: Path) -> None:
    test, found = "test_DistributedDataParallelCPU", tmp_path / "found.json"
    command = [sys.executable, str(PROGRAM), "--keep-torch", "--out", str(found), test]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert f"not under test: {test}" in done.stdout
    (result,) = json.loads(found.read_text())
    assert result["outcome"] == "not under test"
    assert max(result["built"]["paceline"]) == 0
    assert min(result["built"]["torch"]) > 0
