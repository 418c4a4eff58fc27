from collections.abc import Iterator

import pytest

from paceline.testing import RankPool


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks for one file, with time to import large libraries; the file itself imports none of them."""
    with RankPool(2, timeout=90.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    """The same, of three ranks."""
    with RankPool(3, timeout=60.0) as pool:
        yield pool
