import pytest

from paceline.testing.hosts import why_not


@pytest.fixture(scope="session", autouse=True)
def _can_have_hosts() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
