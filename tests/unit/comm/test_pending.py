"""Waiting for works that are written in Python, each with its own idea of a wait."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from paceline.comm import pending
from paceline.comm.pending import WorkPending
from paceline.errors import CollectiveError, LateRankError


class ImpatientPending(WorkPending):
    _first_look = _next_look = timedelta(milliseconds=5)


def no_end() -> timedelta:
    return timedelta(days=1)


class EventWork:
    """Waits as ``threading`` does; it is over when it has been looked at three times."""

    def __init__(self, *, raises: bool) -> None:
        self._over = threading.Event()
        self._raises = raises
        self.looks = 0

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        over = self._over.wait(None if timeout is None else timeout.total_seconds())
        if self._raises and not over:
            raise TimeoutError("not over yet")
        return over

    def look(self) -> None:
        self.looks += 1
        if self.looks == 3:
            self._over.set()


@pytest.mark.parametrize("raises", [False, True])
def test_a_wait_goes_on_until_the_work_is_over(raises: bool) -> None:
    work, result = EventWork(raises=raises), torch.zeros(1)
    assert ImpatientPending(work, result, no_end).wait(work.look) is result
    assert work.looks == 3


class OnlyFuture(EventWork):
    """Can be asked for a future instead, which is never done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise RuntimeError(f"cannot wait for {timeout}")

    def get_future(self) -> "torch.futures.Future[Any]":
        return torch.futures.Future()


@pytest.mark.parametrize("kind", [EventWork, OnlyFuture])
@pytest.mark.parametrize("raises", [False, True])
def test_a_work_without_an_end_is_given_up_after_the_groups_timeout(
    kind: Callable[..., Any], raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "SLOW_AFTER", timedelta(milliseconds=5))
    waits = ImpatientPending(kind(raises=raises), torch.zeros(1), lambda: timedelta(milliseconds=3))
    with pytest.raises(LateRankError, match=r"within the process group's timeout of 0\.003 s"):
        waits.wait(lambda: None)


class Unwell:
    """Says that it is over, and that it did not end well."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        return False


class UnwellWithoutTimeout:
    def wait(self) -> bool:
        return False


@pytest.mark.parametrize("kind", [Unwell, UnwellWithoutTimeout])
def test_a_work_that_did_not_end_well_has_no_result(kind: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=f"{kind.__name__} returned False"):
        WorkPending(kind(), torch.zeros(1), no_end).wait(lambda: None)


@pytest.mark.parametrize("kind", [Unwell, UnwellWithoutTimeout])
def test_a_group_that_tells_its_manager_may_drop_the_failure(kind: Callable[[], Any]) -> None:
    result = torch.zeros(1)
    assert WorkPending(kind(), result, no_end, drops_failures=True).wait(lambda: None) is result


def test_no_work_at_all_is_refused() -> None:
    with pytest.raises(CollectiveError, match="returned None"):
        WorkPending(None, torch.zeros(1), no_end)
