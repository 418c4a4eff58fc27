"""What happened to the ranks and the samples of a run: healings, and whether every sample counted once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from paceline.recording.healings import Healing, read_healings
from paceline.recording.ledger import ledger_files, read_ledger
from paceline.recording.ledger_check import LedgerCheck, check_ledger
from paceline.recording.reader import PlanRecording
from paceline.tools.formatting import milliseconds, plural, rank_list

_MOST_NAMED = 8


@dataclass(frozen=True)
class RunHistory:
    """What happened to a run; the same for all of its wrappers.

    Attributes:
        healed: the healings in one sentence; empty if there are none.
        samples: whether every sample counted once, in one sentence; empty if there is no ledger.
        healings: the healings.
        healing_words: each of them in words.
        ledger: what the ledger says; None if there is none.
    """

    healed: str = ""
    samples: str = ""
    healings: Sequence[Healing] = ()
    healing_words: Sequence[str] = ()
    ledger: LedgerCheck | None = None


def read_history(folder: Path, recordings: Sequence[PlanRecording]) -> RunHistory:
    """What happened to the run that recorded this in a folder.

    Raises:
        RecordingError: the healings or the ledger cannot be read.
    """
    healings = read_healings(folder)
    ledger = check_ledger(read_ledger(folder)) if ledger_files(folder) else None
    first = min(recordings, key=lambda each: each.plan)
    words = healing_words(healings, int(first.description["world"]))
    return RunHistory(
        healed=_sentence(words),
        samples="" if ledger is None else str(ledger),
        healings=healings,
        healing_words=words,
        ledger=ledger,
    )


def healing_words(healings: Sequence[Healing], world: int) -> list[str]:
    """Each healing in words; ``world`` is how many ranks there were at first."""
    worlds = [world, *(healing.world for healing in healings)]
    changes = [f", then {plural(now, 'rank')}" if now != before else "" for before, now in pairwise(worlds)]
    return [_words(healing) + change for healing, change in zip(healings, changes, strict=True)]


def _words(healing: Healing) -> str:
    who = f"{rank_list(rank for rank, _ in healing.lost)} at " if healing.lost else ""
    reasons = ", ".join(dict.fromkeys(why for _, why in healing.lost))
    why = f" ({reasons})" if reasons else ""
    return f"{who}step {healing.step:,}{why}, {_duration(healing.seconds)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else milliseconds(seconds * 1e3)


def _sentence(words: Sequence[str]) -> str:
    if not words:
        return ""
    times = "once" if len(words) == 1 else f"{len(words):,} times"
    more = [f"and {len(words) - _MOST_NAMED:,} more"] if len(words) > _MOST_NAMED else []
    return f"healed {times}: {'; '.join([*words[:_MOST_NAMED], *more])}"
