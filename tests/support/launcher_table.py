"""Starts ranks with every launcher that this machine has, and puts the outcomes into docs/launchers.md.

python tests/support/launcher_table.py [--write] [--only WORD]
"""

import argparse
import sys
from pathlib import Path

from launcher_runs import LAUNCHERS, outcomes, reference_sha256
from mpi_wheels import MissingLauncherError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from figures import FIGURES, merge, write_pages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="put the results into docs/figures.json and the page"
    )
    parser.add_argument("--only", default="", help="only the launchers whose name has this word")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write needs every launcher: leave out --only")
    sha256 = reference_sha256()
    rows: dict[str, dict[str, bool] | str] = {}
    for name in [name for name in LAUNCHERS if options.only in name]:
        try:
            with LAUNCHERS[name]() as launch:
                found = outcomes(launch, sha256)
        except MissingLauncherError as reason:
            rows[name] = str(reason)
            sys.stdout.write(f"{name}: not run: {reason}\n")
            continue
        rows[name] = {outcome: not problem for outcome, problem in found.items()}
        problems = "".join(f"\n  {outcome}: {problem}" for outcome, problem in found.items() if problem)
        sys.stdout.write(f"{name}: {problems or 'all is well'}\n")
        sys.stdout.flush()
    if options.write:
        merge(FIGURES, "launchers", {"command": "make launchers", "launchers": rows})
        write_pages()


if __name__ == "__main__":
    main()
