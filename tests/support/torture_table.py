"""Runs the torture suite with torch's wrapper and with paceline's, and makes the table of it in the docs.

python tests/support/torture_table.py [--write] [--only WORD]
"""

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torture.case import Case
from torture.judge import Finding, Verdict, judge
from torture.run import Wrapper, oracle, train
from torture.suite import CASES

from paceline.testing import RanksError, run_ranks

ROOT = Path(__file__).parents[2]
# Where every case is, and where they are counted.
TABLE, SUMMARY = ROOT / "docs" / "torture.md", ROOT / "README.md"
BEGIN, END = "<!-- torture: begin -->", "<!-- torture: end -->"
HEADER = ("case", "torch, default flags", "torch, best flags", "paceline, no flag")
WORLD = 2
# A step takes milliseconds, so a rank that needs so long waits for another.
HANG_SECONDS = 10.0
FLAGS = [("find_unused_parameters",), ("static_graph",), ("find_unused_parameters", "static_graph")]
ORDER = list(Verdict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="put the table into the docs and its sums into the README"
    )
    parser.add_argument("--only", default="", help="only the cases whose name has this word")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write needs every case: leave out --only")
    # What the ranks would say about torch's limits is what the table is for.
    os.environ |= {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    table = []
    for line in lines([case for case in CASES.values() if options.only in case.name]):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        table.append(line)
    if options.write:
        TABLE.write_text(with_table(TABLE.read_text(), table))
        SUMMARY.write_text(with_table(SUMMARY.read_text(), summary(rows(TABLE.read_text()))))


def lines(cases: Sequence[Case]) -> Iterator[str]:
    yield from head(HEADER)
    for case in cases:
        default = finding(case, Wrapper("torch"))
        flags, best = best_of_torch(case, default)
        ours = worst([finding(case, wrapper) for wrapper in paceline_wrappers()])
        flagged = f" ({', '.join(f'`{flag}`' for flag in flags)})" if flags else ""
        yield line_of([case.name, default.verdict, f"{best.verdict}{flagged}", ours.verdict])


def paceline_wrappers() -> list[Wrapper]:
    return [Wrapper("paceline", {"gradient_as_bucket_view": view}) for view in (False, True)]


def best_of_torch(case: Case, default: Finding) -> tuple[tuple[str, ...], Finding]:
    """The flags that take torch furthest, and how far; no flags where none helps."""
    best: tuple[tuple[str, ...], Finding] = ((), default)
    for flags in flag_sets(case):
        if best[1].verdict is Verdict.RIGHT:
            break
        found = finding(case, Wrapper("torch", {flag.split("=")[0]: "=" not in flag for flag in flags}))
        best = min(best, (flags, found), key=lambda pair: ORDER.index(pair[1].verdict))
    return best


def flag_sets(case: Case) -> list[tuple[str, ...]]:
    return [("broadcast_buffers=False",), *FLAGS] if case.has_buffers else FLAGS


def finding(case: Case, wrapper: Wrapper) -> Finding:
    found = _finding(case, wrapper)
    if found.verdict is not Verdict.RIGHT:
        sys.stderr.write(f"{case.name}: {wrapper}: {found.verdict}: {found.reason}\n")
    return found


def _finding(case: Case, wrapper: Wrapper) -> Finding:
    try:
        # Fresh ranks, because what one case breaks must not break the next.
        ranks = run_ranks(train, WORLD, args=(case.name, wrapper), timeout=HANG_SECONDS)
    except RanksError as error:
        first = error.exceptions[0]
        verdict = Verdict.HANG if isinstance(first, TimeoutError) else Verdict.ERROR
        return Finding(verdict, f"{type(first).__name__}: {first}".splitlines()[0])
    return judge(case, oracle(case, WORLD), ranks)


def worst(findings: Sequence[Finding]) -> Finding:
    return max(findings, key=lambda finding: ORDER.index(finding.verdict))


def summary(cases: Sequence[Sequence[str]]) -> Iterator[str]:
    """How many cases each side gets right, and those that no flag of torch's helps."""
    yield from head(["", *ORDER])
    for column, side in enumerate(HEADER[1:], start=1):
        verdicts = Counter(case[column].partition(" (")[0] for case in cases)
        yield line_of([side, *(str(verdicts[verdict]) for verdict in ORDER)])
    yield ""
    yield from head(["where no flag of torch's helps", "torch", "paceline"])
    for name, _, best, ours in cases:
        if not best.startswith(Verdict.RIGHT):
            yield line_of([name, best, ours])


def head(cells: Sequence[str]) -> Iterator[str]:
    yield line_of(cells)
    yield "|" + "---|" * len(cells)


def line_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def with_table(text: str, table: Iterable[str]) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        raise ValueError(f"the page must have the lines {BEGIN} and {END}")
    return "\n".join([f"{before}{BEGIN}", *table, f"{END}{after}"])


def rows(text: str) -> list[list[str]]:
    """The cells of the table in a page's text, header left out."""
    table = re.search(f"{re.escape(BEGIN)}(.*?){re.escape(END)}", text, re.DOTALL)
    body = table[1].strip().splitlines()[2:] if table else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


if __name__ == "__main__":
    main()
