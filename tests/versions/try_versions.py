"""Tries paceline with other versions of torch and Python, one after the other, each in a venv of its own.

    make versions                              every torch that was tried, and every Python with the newest
    make versions VERSIONS="2.10 2.15.0"       these versions of torch, with this Python
    make versions PYTHONS="python3.12 /a/path" these Pythons, with the newest torch that was tried

It installs torch from the package index, runs the core of the tests, the torture suite and torch's own tests,
and removes the venv. Each result replaces that version's row of docs/versions.json; docs/versions.md is made
of it. What the commands print is kept in build/versions. The exit code is 1 if anything failed.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from version_rows import PAGE, ROOT, Row, rendered, save, supported_pythons

from paceline.torch_private import TRIED

SUITE = ROOT / "tests/conformance/torch_suite"
sys.path.append(str(SUITE))  # at the end, because it has other modules by names of the tests' own

import lists  # noqa: E402 - see above

BUILD = ROOT / "build" / "versions"
CORE = (
    "tests/unit",
    "tests/ranks",
    "tests/conformance",
    "tests/tools/run",
    "tests/project/test_torch_private.py",
)
PACKAGES = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "torchdata")
INSTALL_SECONDS, RUN_SECONDS = 30 * 60, 40 * 60


class StepError(Exception):
    """A step that did not come to its end."""


def main() -> int:
    options = _options()
    # A shell that starts this in the background has it ignore interrupts, and so would the tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    BUILD.mkdir(parents=True, exist_ok=True)
    has_failed = False
    for version, python in chosen(options.versions, options.pythons):
        row = Trial(version, python).run()
        PAGE.write_text(rendered(PAGE.read_text(), save(row)))
        has_failed |= bool(row.problems)
    return int(has_failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", nargs="+", default=[], help="of torch, such as 2.15 or 2.15.0")
    parser.add_argument("--pythons", nargs="+", default=[], help="programs, by name or path")
    options = parser.parse_args()
    for python in options.pythons:
        if _version_of(python) is None:
            parser.error(f"this Python cannot be started (python: {python})")
    for version in options.versions:
        if not re.fullmatch(r"\d+\.\d+(\.\w+)?", version):
            parser.error(f"a version of torch looks like 2.15 or 2.15.0 (version: {version})")
    return options


def chosen(versions: Sequence[str], pythons: Sequence[str]) -> list[tuple[str, str]]:
    """Which version of torch to try with which Python."""
    if versions or pythons:
        return [
            (version, python) for version in versions or TRIED[-1:] for python in pythons or [sys.executable]
        ]
    own = [(version, sys.executable) for version in TRIED]
    others = [f"python{release}" for release in supported_pythons()]
    return own + [(TRIED[-1], python) for python in others if _is_other(python)]


def _is_other(python: str) -> bool:
    version = _version_of(python)
    if version is None:
        print(f"{python} cannot be started: its row stays as it is (PYTHONS= takes a path)")
    return version is not None and version.split(".")[:2] != sys.version.split()[0].split(".")[:2]


def _version_of(python: str) -> str | None:
    """The version of a Python; None if it cannot be started."""
    command = [python, "-c", "import platform; print(platform.python_version())"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Trial:
    """One version of torch with one Python.

    Args:
        version: of torch; "2.15" is the newest of that release.
        python: the program.
    """

    def __init__(self, version: str, python: str) -> None:
        self._version = version
        self._python = python
        self._row = Row(torch=version, python=_version_of(python) or python)
        self._folder = BUILD / f"{version}-{self._row.python}"

    def run(self) -> Row:
        """Install, try and remove; a step that fails is a problem of the row."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        try:
            if self._step("install", self._install) and self._step("import", self._import):
                self._step("tests", self._tests)
                self._step("torture", self._torture)
                self._step("conformance", self._conformance)
        finally:
            shutil.rmtree(self._folder / "venv", ignore_errors=True)
        return self._row

    def _step(self, name: str, act: Callable[[], None]) -> bool:
        print(f"torch {self._version}, Python {self._row.python}: {name}", flush=True)
        try:
            act()
        except StepError as error:
            self._add_problems([f"{name}: {error}"])
            return False
        return True

    def _add_problems(self, problems: Sequence[str]) -> None:
        print(*(f"  {problem}" for problem in problems), sep="\n", flush=True)
        self._row = replace(self._row, problems=(*self._row.problems, *problems))

    def _install(self) -> None:
        self._call("venv", self._python, "-m", "venv", str(self._folder / "venv"), seconds=INSTALL_SECONDS)
        constraints = self._folder / "constraints.txt"
        constraints.write_text(without_torchs((ROOT / "constraints.txt").read_text()))
        wanted = f"{self._version}.*" if self._version.count(".") == 1 else self._version
        # Without pip's cache, which would keep gigabytes per version.
        options = ("--no-cache-dir", "--disable-pip-version-check", "--constraint", str(constraints))
        packages = (f"torch=={wanted}", "--editable", f"{ROOT}[demo]", *PACKAGES)
        self._python_call("install", "-m", "pip", "install", *options, *packages, seconds=INSTALL_SECONDS)

    def _import(self) -> None:
        code = "import torch; print(torch.__version__); import paceline; print('imported')"
        lines = self._python_call("import", "-c", code).read_text().splitlines()
        self._row = replace(self._row, torch=next(line for line in lines if line[0].isdigit()), imports=True)

    def _tests(self) -> None:
        results = self._folder / "tests.xml"
        options = ("-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", f"--junitxml={results}")
        ignored = "--ignore=tests/conformance/test_torch_suite.py"
        self._python_call("tests", "-m", "pytest", *options, ignored, *CORE, may_fail=True)
        counts, failed = counted(_read(results))
        self._row = replace(self._row, tests=counts)
        self._add_problems(failed)

    def _torture(self) -> None:
        results = self._folder / "torture.json"
        self._python_call("torture", "tests/support/torture_table.py", "--ours", str(results))
        cases: dict[str, str] = json.loads(_read(results))
        wrong = [f"torture: {name}: {verdict}" for name, verdict in cases.items() if verdict != "right"]
        self._row = replace(self._row, torture={"right": len(cases) - len(wrong), "of": len(cases)})
        self._add_problems(wrong)

    def _conformance(self) -> None:
        for wrapper in ("torch", "paceline"):
            options = ["--wrapper", wrapper, "--lists", str(self._folder)]
            options += (
                ["--write-lists"] if wrapper == "torch" else ["--out", str(self._folder / "suite.json")]
            )
            self._python_call(f"conformance-{wrapper}", str(SUITE / "run.py"), *options, may_fail=True)
        _read(self._folder / lists.PASSES_WITH_TORCH)
        counts, failed = compared(
            lists.read(self._folder / lists.PASSES_WITH_TORCH),
            json.loads(_read(self._folder / "suite.json")),
            lists.read(lists.EXCEPTIONS),
        )
        self._row = replace(self._row, conformance=counts)
        self._add_problems(failed)

    def _python_call(
        self, name: str, *arguments: str, seconds: int = RUN_SECONDS, may_fail: bool = False
    ) -> Path:
        return self._call(
            name, str(self._folder / "venv/bin/python"), *arguments, seconds=seconds, may_fail=may_fail
        )

    def _call(self, name: str, *command: str, seconds: int, may_fail: bool = False) -> Path:
        """Run a command until its end; returns the file of what it printed."""
        log = self._folder / f"{name}.log"
        # What starts this program may have set these for its own Python.
        environment = {
            key: each for key, each in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=ROOT, env=environment, start_new_session=True
            )
            try:
                code = process.wait(seconds)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise StepError(f"not done in {seconds} s (printed: {log.relative_to(ROOT)})") from None
        if code != 0 and not may_fail:
            last = (log.read_text().strip().splitlines() or [""])[-1]
            raise StepError(f"exit code {code} (printed: {log.relative_to(ROOT)}): {last[:200]}")
        return log


def _read(results: Path) -> str:
    if not results.exists():
        raise StepError(f"no results (printed: {results.parent.relative_to(ROOT)})")
    return results.read_text()


def without_torchs(constraints: str) -> str:
    """The constraints without torch and what torch itself requires, which differ between versions."""
    names = [re.split(r"[^\w-]", each)[0] for each in importlib.metadata.requires("torch") or []]
    own = {_normal(name) for name in ("torch", *names)}
    return "".join(
        line for line in constraints.splitlines(keepends=True) if _normal(line.partition("==")[0]) not in own
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def counted(junit: str) -> tuple[dict[str, int], list[str]]:
    """How many tests passed, failed and were skipped, and those that failed."""
    passed, failed, skipped = 0, [], 0
    for case in ElementTree.fromstring(junit).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"`{case.get('classname')}.{case.get('name')}`")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "failed": len(failed), "skipped": skipped}, failed


def compared(
    passes_with_torch: Sequence[str], results: Sequence[Mapping[str, Any]], exceptions: Sequence[str]
) -> tuple[dict[str, int], list[str]]:
    """How many of the tests that pass with torch's wrapper pass with ours, and which of them do not."""
    passed = {result["test"] for result in results if result["outcome"] == "passed"}
    missing = [test for test in passes_with_torch if test not in passed]
    failed = [f"conformance: `{test}`" for test in missing if test not in exceptions]
    counts = {
        "passed": len(passes_with_torch) - len(missing),
        "of": len(passes_with_torch),
        "exceptions": len(missing) - len(failed),
    }
    return counts, failed


if __name__ == "__main__":
    sys.exit(main())
