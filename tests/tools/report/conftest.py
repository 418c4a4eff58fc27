"""A browser that opens pages from the disk."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import open_browser
from selenium.webdriver.chrome.webdriver import WebDriver

_PACKAGES = ("chromium", "chromium-driver")


def _is_installed() -> bool:
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


def _install() -> None:
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *_PACKAGES]):
        subprocess.run(["apt-get", *command], check=False, capture_output=True, timeout=600)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    """Debian's chromium, which is installed if it is missing and the user is root."""
    if not _is_installed() and os.geteuid() == 0 and shutil.which("apt-get"):
        _install()
    if not _is_installed():
        pytest.skip("chromium and chromedriver are not installed, and could not be")
    profile: Path = tmp_path_factory.mktemp("profile")
    driver = open_browser(profile)
    yield driver
    driver.quit()
