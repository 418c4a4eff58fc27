"""Runs the torture suite with torch's wrapper and with paceline's, and puts the results into the docs.

python tests/support/torture_table.py [--write | --ours FILE] [--only WORD]
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torture.case import Case
from torture.judge import Finding, Verdict, judge
from torture.run import Wrapper, oracle, train
from torture.suite import CASES

from paceline.testing import RanksError, run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from figures import FIGURES, merge, write_pages

SIDES = ("torch, default flags", "torch, best flags", "paceline, no flag")
WORLD = 2
# A step takes milliseconds, so a rank that needs this long waits for another one.
HANG_SECONDS = 10.0
FLAGS = [("find_unused_parameters",), ("static_graph",), ("find_unused_parameters", "static_graph")]
ORDER = list(Verdict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="put the results into docs/figures.json and the pages"
    )
    parser.add_argument("--only", default="", help="only the cases whose name has this word")
    parser.add_argument("--ours", type=Path, help="only paceline's wrapper; put the results into a JSON file")
    options = parser.parse_args()
    if options.write and (options.only or options.ours):
        parser.error("--write needs every case and side: leave out --only and --ours")
    # What the ranks would say about torch's limits is what the table is for.
    os.environ |= {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    selected = [case for case in CASES.values() if options.only in case.name]
    if options.ours:
        options.ours.write_text(json.dumps({case.name: end_of_ours(case) for case in selected}, indent=1))
        return
    cases = {}
    for case in selected:
        cases[case.name] = ends(case)
        sys.stdout.write(f"{case.name}: {'; '.join(cases[case.name])}\n")
        sys.stdout.flush()
    if options.write:
        merge(
            FIGURES, "torture", {"command": "make torture", "sides": SIDES, "verdicts": ORDER, "cases": cases}
        )
        write_pages()


def ends(case: Case) -> list[str]:
    """How the case ends on each side."""
    default = finding(case, Wrapper("torch"))
    flags, best = best_of_torch(case, default)
    flagged = f" ({', '.join(f'`{flag}`' for flag in flags)})" if flags else ""
    return [default.verdict, f"{best.verdict}{flagged}", end_of_ours(case)]


def end_of_ours(case: Case) -> str:
    return worst([finding(case, wrapper) for wrapper in paceline_wrappers()]).verdict


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


if __name__ == "__main__":
    main()
