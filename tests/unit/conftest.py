import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Let no collection walk what lives already: for all that was imported it takes half a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_gc() -> Iterator[None]:
    """No collection by itself; one that is asked for sees only what the test made."""
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.enable()
