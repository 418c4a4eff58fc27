"""How large the page of a long run is, and how long a browser takes to draw it.

python benchmarks/report.py              # 8 ranks, 10,000 steps
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from paceline.tools.report.analysis import analyse_recording
from paceline.tools.report.html_page import html_page

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

from browser import open_browser, resize, show
from recordings import Run, Slow, write

MOST_BYTES, MOST_SECONDS = 20e6, 3.0
TIMES = 5


def opening(written: Path, profile: Path, times: int) -> list[float]:
    """Seconds until the page is drawn, by its own clock, which starts when it is opened."""
    driver = open_browser(profile)
    try:
        resize(driver, 1366, 768)
        return [show(driver, written) / 1e3 for _ in range(times)]
    finally:
        driver.quit()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--buckets", type=int, default=6)
    given = parser.parse_args()
    run = Run(
        ranks=given.ranks,
        steps=given.steps,
        buckets=given.buckets,
        parameters=300,
        jitter=0.1,
        slow=[Slow(given.ranks - 1, 5, since=given.steps // 2)],
    )
    with tempfile.TemporaryDirectory() as room:
        folder, written = write(run, Path(room) / "recording"), Path(room) / "report.html"
        start = time.perf_counter()
        written.write_text(html_page(analyse_recording(folder)))
        made, nbytes = time.perf_counter() - start, written.stat().st_size
        seconds = opening(written, Path(room) / "profile", TIMES)
    middle = statistics.median(seconds)
    print(f"{given.ranks} ranks, {given.steps:,} steps, {given.buckets} buckets")
    print(f"page: {nbytes / 1e6:.1f} MB (target: under {MOST_BYTES / 1e6:.0f}), written in {made:.1f} s")
    shown = ", ".join(f"{each:.2f}" for each in seconds)
    print(f"drawn after {middle:.2f} s, the median of {shown} (target: under {MOST_SECONDS:.0f})")


if __name__ == "__main__":
    main()
