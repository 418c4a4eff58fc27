"""Screenshots of the report page for the docs: ``python tests/tools/report/screenshots.py docs``."""

import base64
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from browser import open_browser, resize, set_scheme, show
from recordings import Run, Slow, write
from selenium.webdriver import Chrome

from paceline.tools.report.analysis import analyse_recording
from paceline.tools.report.html_page import html_page

WIDTH, HEIGHT = 1366, 1040
RUN = Run(
    ranks=4,
    steps=900,
    buckets=6,
    parameters=48,
    jitter=0.12,
    slow=[Slow(2, 9, since=520)],
    module="Transformer",
    buffers=0.6,
    transfer=3,
)


def take(driver: Chrome, path: Path, *, height: int = HEIGHT) -> None:
    """A picture of the top of the page."""
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    options = {"format": "png", "clip": clip, "captureBeyondViewport": True, "optimizeForSpeed": False}
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", options)
    path.write_bytes(base64.b64decode(taken["data"]))


def main(folder: Path) -> None:
    """Take pictures of the light and of the dark page."""
    with tempfile.TemporaryDirectory() as room:
        place = Path(room)
        written = place / "report.html"
        written.write_text(html_page(analyse_recording(write(RUN, place / "recording"))))
        driver = open_browser(place / "profile")
        try:
            resize(driver, WIDTH, 768)
            for scheme in ("light", "dark"):
                set_scheme(driver, scheme)
                show(driver, written)
                take(driver, folder / f"report-{scheme}.png")
        finally:
            driver.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
