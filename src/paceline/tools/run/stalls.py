"""Whether a run stands still, read from the status pages of its ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.watch.rank_page import Moment, PageContent, read_pages

# A rank that has told of a stall may have been killed since.
_FRESH_SECONDS = 5.0


@dataclass(frozen=True)
class Stall:
    """A rank that others wait for: for how many seconds, and what they say of it.

    The rank is -1 if every rank has come, and the network is slow.
    """

    rank: int
    seconds: float
    text: str = ""


# Looks for the rank that others have waited for longest; None if the run goes on as usual.
FindStall = Callable[[], Stall | None]


def find_stall(folder: Path) -> Stall | None:
    """The rank that others have waited for longest, by the pages in a folder; None if nobody waits long."""
    now = time.time()
    stalled = [page for page in read_pages(folder) if _is_stalled(page, now)]
    if not stalled:
        return None
    first = max(stalled, key=lambda page: _age(page, page.told.since, now))
    return Stall(first.told.rank, _age(first, first.told.since, now), first.told.text)


def _is_stalled(page: PageContent, now: float) -> bool:
    return page.told.moment is Moment.STALLED and _age(page, page.heartbeat, now) < _FRESH_SECONDS


def _age(page: PageContent, at: int, now: float) -> float:
    return now - (at + page.epoch) / 1e9
