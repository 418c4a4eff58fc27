"""What was found with one version of torch and of Python, in docs/versions.json and in docs/versions.md."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paceline.torch_private import TRIED, release

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
BLOCK = re.compile(r"(<!-- results: begin -->\n).*?(<!-- results: end -->)", re.DOTALL)
HEADER = ("torch", "Python", "imports", "tests passed", "failed", "torture: right", "conformance: passed")


@dataclass(frozen=True)
class Row:
    """The results of one version of torch with one version of Python; None for what was not reached.

    Attributes:
        torch: the installed version, or what was asked for if it could not be installed.
        python: the version of Python.
        imports: whether ``import paceline`` works.
        tests: how many tests passed, failed and were skipped.
        torture: how many cases of the torture suite are right, and of how many.
        conformance: how many of torch's own tests pass with paceline's wrapper, of how many that pass with
            torch's, and how many of these are among the exceptions.
        problems: what failed: tests, cases, and steps that did not come to their end.
    """

    torch: str
    python: str
    imports: bool = False
    tests: Mapping[str, int] | None = None
    torture: Mapping[str, int] | None = None
    conformance: Mapping[str, int] | None = None
    problems: Sequence[str] = field(default_factory=tuple)

    @property
    def key(self) -> str:
        """The releases; a new result of the same ones replaces the old one."""
        return f"torch {release(self.torch)}, Python {release(self.python)}"

    @property
    def order(self) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", self.key)]


def supported_pythons() -> list[str]:
    """The releases of Python that pyproject.toml lists, from the oldest to the newest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [text.rpartition(" :: ")[2] for text in project["classifiers"] if ":: Python ::" in text]
    return sorted(listed, key=lambda text: [int(number) for number in text.split(".")])


def load(path: Path = ROWS) -> list[Row]:
    rows = json.loads(path.read_text()) if path.exists() else []
    return [Row(**row) for row in rows]


def save(row: Row, path: Path = ROWS) -> list[Row]:
    """Put a row in the place of an older one of the same releases; the others stay."""
    rows = sorted(
        {**{each.key: each for each in load(path)}, row.key: row}.values(), key=lambda row: row.order
    )
    path.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")
    return rows


def rendered(text: str, rows: Sequence[Row]) -> str:
    """The page's text with the results as they should be."""
    return BLOCK.sub(lambda block: "\n".join([block[1], *_results(rows), block[2]]), text)


def _results(rows: Sequence[Row]) -> Iterator[str]:
    oldest_python = supported_pythons()[0]
    yield "Each torch with the oldest Python:"
    yield ""
    yield from _table([row for row in rows if release(row.python) == oldest_python])
    yield ""
    yield "Each Python with the newest torch that was tried:"
    yield ""
    yield from _table([row for row in rows if release(row.torch) == TRIED[-1]])
    yield ""
    for row in rows:
        if row.problems:
            yield f"Failed with torch {row.torch} and Python {row.python}:"
            yield ""
            yield from (f"- {problem}" for problem in row.problems)
            yield ""


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {' | '.join(HEADER)} |"
    yield "|" + "---|" * len(HEADER)
    for row in rows:
        yield f"| {' | '.join(_cells(row))} |"


def _cells(row: Row) -> list[str]:
    tests = ("not run", "not run") if row.tests is None else (row.tests["passed"], row.tests["failed"])
    torture = "not run" if row.torture is None else f"{row.torture['right']} of {row.torture['of']}"
    conformance = "not run"
    if row.conformance is not None:
        counts = row.conformance
        conformance = f"{counts['passed']} of {counts['of']} ({counts['exceptions']} cannot apply)"
    cells = (row.torch, row.python, "yes" if row.imports else "**no**", *tests, torture, conformance)
    return [f"{cell:,}" if isinstance(cell, int) else cell for cell in cells]
