"""Where two recorded runs, or the ranks of one, begin to differ: pure, from what the ranks have written."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.errors import RecordingError
from paceline.recording.audit_file import AuditFile, StepHashes, audit_files, read_audit_file

_NAMES_SHOWN = 4


class FirstDifference(NamedTuple):
    """The first step in which two sides differ.

    Attributes:
        step: its number.
        last_equal: the last step before it in which the same tensors were looked at; None if there is none.
        sides: what was compared, such as "rank 0" and "rank 1".
        what: what differs.
        wrapper: the number of the wrapper.
    """

    step: int
    last_equal: int | None
    sides: tuple[str, str]
    what: str
    wrapper: int


def read_run(folder: Path) -> list[AuditFile]:
    """What the ranks of a run have written.

    Raises:
        RecordingError: there is nothing, or it cannot be read.
    """
    paths = audit_files(folder) if folder.is_dir() else []
    if not paths:
        raise RecordingError(
            f"there is no recording of an audit in the folder ({folder}); record one with `paceline run "
            f"--record {folder} script.py`, or with PACELINE_RECORD={folder} in the environment of the ranks"
        )
    return [read_audit_file(path) for path in paths]


def compare_ranks(run: Sequence[AuditFile]) -> FirstDifference | None:
    """The first step in which a rank differs from the first rank of its wrapper."""
    first: dict[int, AuditFile] = {}
    found = []
    for each in run:
        other = first.setdefault(each.wrapper, each)
        if other is not each:
            found.append(_first_difference(other, each, (f"rank {other.rank}", f"rank {each.rank}")))
    return _earliest(found)


def compare_runs(one: Sequence[AuditFile], other: Sequence[AuditFile]) -> FirstDifference | None:
    """The first step in which a rank differs from the same rank of another run."""
    same = {(each.rank, each.wrapper): each for each in other}
    found = [
        _first_difference(
            each,
            same[each.rank, each.wrapper],
            (f"rank {each.rank} of the first run", f"rank {each.rank} of the second"),
        )
        for each in one
        if (each.rank, each.wrapper) in same
    ]
    if not found:
        raise RecordingError("the two runs have no rank in common")
    return _earliest(found)


def _earliest(found: Iterable[FirstDifference | None]) -> FirstDifference | None:
    return min((each for each in found if each is not None), key=lambda each: each.step, default=None)


def _first_difference(one: AuditFile, other: AuditFile, sides: tuple[str, str]) -> FirstDifference | None:
    steps = {each.step: each for each in other.steps}
    equal: dict[int, int] = {}
    for mine in one.steps:
        if (theirs := steps.get(mine.step)) is None:
            continue
        if (what := _what_differs(mine, theirs)) is not None:
            return FirstDifference(mine.step, equal.get(mine.part), sides, what, one.wrapper)
        equal[mine.part] = mine.step
    return None


def _what_differs(mine: StepHashes, theirs: StepHashes) -> str | None:
    if mine.digest == theirs.digest:
        return None
    names = [
        name for name, found in mine.hashes.items() if name in theirs.hashes and found != theirs.hashes[name]
    ]
    if names:
        more = len(names) - _NAMES_SHOWN
        return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    if mine.options != theirs.options:
        return "an option of an optimizer, such as its learning rate"
    if [*mine.hashes] != [*theirs.hashes]:
        return None  # sharded state, or other optimizers: nothing that could be compared
    if not mine.hashes:
        return f"a tensor of part {mine.part}"
    return "a module buffer, changed between two forwards on one side only"
