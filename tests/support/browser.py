"""Opens pages from the disk in Debian's chromium, without a window."""

import shutil
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
SECONDS = 60


def open_browser(profile: Path) -> Chrome:
    """A browser with its own profile; the caller quits it."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(SECONDS)
    return driver


def resize(driver: Chrome, width: int, height: int) -> None:
    """Set the size of the page's window."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def set_scheme(driver: Chrome, scheme: str) -> None:
    """Set the colour scheme that the system prefers: light or dark."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def show(driver: Chrome, page: Path) -> float:
    """Open a page and wait until it is drawn; returns the milliseconds that it took, by its own clock."""
    driver.get(page.as_uri())
    drawn = WebDriverWait(driver, SECONDS, poll_frequency=0.02).until(
        lambda each: each.execute_script("return document.documentElement.dataset.drawn")
    )
    return float(drawn)
