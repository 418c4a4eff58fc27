"""What ranks found out, as they write it down."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SUFFIX = ".diagnosis"
# What a rank is about that has not met the others.
MEETING = "meeting"


@dataclass
class Report:
    """What is known, by rank; what nobody has told is None or not there.

    Attributes:
        facts: each rank's host and versions.
        places: where each rank listened.
        reached: why each rank could not reach each other one.
        looks: each rank's looks at its clock.
        dtypes: by backend, types of element and why it refuses them.
        measured: the speed of pairs that each rank saw.
        problems: what stopped a rank, and in the midst of what.
    """

    facts: list[Any] = field(default_factory=list)
    places: list[Any] = field(default_factory=list)
    reached: list[Any] = field(default_factory=list)
    looks: list[Any] = field(default_factory=list)
    dtypes: list[Any] = field(default_factory=list)
    measured: list[Any] = field(default_factory=list)
    problems: list[Any] = field(default_factory=list)

    def save(self, folder: Path, rank: int) -> None:
        """Write it where the process looks that has started the rank."""
        (folder / f"{rank}{SUFFIX}").write_text(json.dumps(asdict(self)))


def read(folder: Path) -> Report:
    """What the ranks of this host know together."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob(f"*/*{SUFFIX}"))]
    return merged([Report(**report) for report in reports])


def merged(reports: Sequence[Report]) -> Report:
    """For each rank what any of the reports has of it."""
    return Report(**{each.name: _merged([getattr(r, each.name) for r in reports]) for each in fields(Report)})


def _merged(lists: Sequence[Sequence[Any]]) -> list[Any]:
    length = max(map(len, lists), default=0)
    padded = [[*values, *[None] * (length - len(values))] for values in lists]
    return [
        next((value for value in at_rank if value is not None), None) for at_rank in zip(*padded, strict=True)
    ]
