"""Run PyTorch's own distributed tests on CPU ranks, with torch's wrapper or with paceline's.

    python tests/conformance/torch_suite/run.py --wrapper torch --write-lists
    python tests/conformance/torch_suite/run.py --wrapper paceline

The first learns which tests pass here with torch's own wrapper, and writes them down. The second runs the
tests that build a wrapper with paceline's in its place, in strict mode. It fails if one does not pass that
passes with torch's and is not in the list of exceptions.

Each test runs on fresh ranks, with a deadline. A test that passed without building the wrapper says nothing
about it, and counts as not under test.
"""

# ruff: noqa: T201 - a program prints

import argparse
import fnmatch
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

import lists
import on_rank
import suite
import torch
import wrappers
from results import Outcome, Result, first_line, outcome_of_end, outcome_of_error

from paceline.testing import RanksError, forkserver, run_ranks

DEADLINE_SECONDS = 90.0

PASSES_HEADER = f"""
Tests of torch.testing._internal.distributed.distributed_test that build the wrapper and pass on CPU ranks
with torch's own wrapper (torch {torch.__version__}, world size {suite.WORLD}, gloo). paceline's must pass
them too. Written by
python tests/conformance/torch_suite/run.py --wrapper torch --write-lists
"""
FAILS_HEADER = """
Tests of the same suite that build the wrapper but do not pass on CPU ranks with torch's own, and how they
ended. Some ask for what only a GPU has; some show where torch's wrapper cannot work without one. They are
run with paceline's wrapper too, and may fail there. Written with passes_with_torch.txt.
"""


def main() -> int:
    """Run the tests that were asked for; the exit code says whether all went as it must."""
    options = _options()
    _set_surroundings(options.wrapper)
    results = []
    for result in run_all(options.tests or _tests(options), options.wrapper, options):
        results.append(result)
        _show(result, as_json=options.json)
    if options.out:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if options.write_lists:
        write_lists(results, options.lists)
    return 0 if options.json else report(results, options.lists)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tests", nargs="*", help="ids; all that apply if none is given")
    parser.add_argument("--wrapper", choices=wrappers.NAMES, default="paceline")
    parser.add_argument("--only", default="*", help="a pattern for ids, such as '*join*'")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many tests at a time")
    parser.add_argument("--deadline", type=float, default=DEADLINE_SECONDS, help="seconds a test")
    parser.add_argument("--out", type=Path, help="a JSON file for the results, with tracebacks")
    parser.add_argument("--json", action="store_true", help="print a line of JSON a result, and no report")
    parser.add_argument(
        "--write-lists", action="store_true", help="write the lists of torch's passes and fails"
    )
    parser.add_argument(
        "--lists", type=Path, default=lists.DIRECTORY, help="the folder of the lists, to write or to read"
    )
    parser.add_argument(
        "--keep-torch", action="store_true", help="put nothing in torch's place, to see that the count tells"
    )
    options = parser.parse_args()
    if options.write_lists and (options.wrapper != "torch" or options.tests or options.only != "*"):
        parser.error("the lists are written from all of the suite with torch's wrapper")
    return options


def _set_surroundings(wrapper: str) -> None:
    """What this process hands on to its fork server, and from there to the ranks."""
    forkserver.PRELOADED = (*forkserver.PRELOADED, on_rank.__name__)
    if wrapper == "paceline":
        # Tests of torch's limits expect torch's errors.
        os.environ["PACELINE_STRICT"] = "1"


def _tests(options: argparse.Namespace) -> list[str]:
    if options.wrapper == "torch":
        names = suite.test_names()
    else:
        files = (lists.PASSES_WITH_TORCH, lists.FAILS_WITH_TORCH)
        names = [name for file in files for name in lists.read(options.lists / file)]
    return fnmatch.filter(names, options.only)


def run_all(tests: Sequence[str], wrapper: str, options: argparse.Namespace) -> Iterator[Result]:
    """Run the tests, some at a time; results come as they are ready."""
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(run_one, test, wrapper, options) for test in tests]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            forkserver.current().close()  # Its ranks end with it, so that nothing is waited for.
            raise


def run_one(test: str, wrapper: str, options: argparse.Namespace) -> Result:
    """Run one test on fresh ranks."""
    # Inside the fork server's directory, which goes with it if this process is killed.
    with tempfile.TemporaryDirectory(dir=forkserver.current().directory) as name:
        directory, start = Path(name), time.monotonic()
        end = _ranks_end(test, "torch" if options.keep_torch else wrapper, directory, options.deadline)
        seconds = round(time.monotonic() - start, 2)
        built = {each: wrappers.times_built(directory, each, world=suite.WORLD) for each in wrappers.NAMES}
    if isinstance(end, RanksError):
        detail = "".join(traceback.format_exception(end))
        return Result(test, wrapper, outcome_of_error(end), built, seconds, first_line(end), detail)
    return Result(
        test, wrapper, outcome_of_end(end, wrapper, built), built, seconds, next(filter(None, end), "")
    )


def _ranks_end(test: str, wrapper: str, directory: Path, deadline: float) -> list[str | None] | RanksError:
    """The ranks' reasons to skip the test, or their error."""
    args = (test, wrapper, directory)
    try:
        return run_ranks(on_rank.run_test, suite.WORLD, args=args, timeout=deadline, backend=None)
    except RanksError as error:
        return error


def _show(result: Result, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(result)), flush=True)
    else:
        print(f"{result.outcome:14} {result.seconds:6.1f} s  {result.test}  {result.message}", flush=True)


def write_lists(results: Sequence[Result], directory: Path) -> None:
    """Write down what passes with torch's wrapper, and what builds it and does not pass."""
    passes = {result.test: "" for result in results if result.outcome is Outcome.PASSED}
    fails = {
        result.test: f"{result.outcome}: {result.message}"
        for result in results
        if result.has_built_any and result.outcome in (Outcome.FAILED, Outcome.DIED, Outcome.HUNG)
    }
    lists.write(directory / lists.PASSES_WITH_TORCH, PASSES_HEADER, passes)
    lists.write(directory / lists.FAILS_WITH_TORCH, FAILS_HEADER, fails)


def report(results: Sequence[Result], directory: Path) -> int:
    """Print totals and what went wrong; returns 1 if a test that must pass did not."""
    print()
    for outcome, number in Counter(result.outcome for result in results).most_common():
        print(f"{number:5}  {outcome}")
    must_pass = set(lists.read(directory / lists.PASSES_WITH_TORCH)) - set(lists.read(lists.EXCEPTIONS))
    must_pass &= {result.test for result in results}
    passed = {result.test for result in results if result.outcome is Outcome.PASSED}
    wrong = [result for result in results if result.test in must_pass - passed]
    extra = sorted(passed & set(lists.read(directory / lists.FAILS_WITH_TORCH)))
    print(f"\n{len(passed & must_pass)} of {len(must_pass)} that pass with torch's wrapper pass")
    for result in sorted(wrong, key=lambda result: result.test):
        print(f"  {result.outcome}: {result.test}\n      {result.message}")
    if extra:
        print(f"\n{len(extra)} pass that fail with torch's wrapper:", *extra, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
