"""Judges a run with a fault: who was told, when, whether the place was named, and how all ranks ended.

Pure: it sees only lines with times, and how processes ended.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

# What a line must say about a rank: something that is wrong with it.
_TROUBLE = re.compile(
    r"raised|exception|error|missing|lost|left|ended|exit|killed|died|dead|crash|stall|stopped|stuck|hang|late"
    r"|fail|timed out|timeout|differ|diverge|\bnan\b|non-finite|not finite|skip|behind|ahead|closed|signal"
    r"|(?:has|have|did|does|do|is|are) not\b|not heard|unreachable|waits? (?:in|at)|waiting (?:in|at)"
    r"|was last seen|mismatch|no word",
    re.IGNORECASE,
)
_NUMBERS = r"\d+(?:(?:, and |, | and | or )\d+)*"
# "rank 1", "ranks 1 and 2", "ranks: [1, 2]", "ranks that have not come to it: [1]".
_RANKS = re.compile(
    rf"\branks?\b(?:[ :=#]*(?P<plain>{_NUMBERS})\b|[^\[\]()\d;.]{{0,40}}\[(?P<listed>[\d, ]+)\])",
    re.IGNORECASE,
)
# Ranks that are said to wait for somebody, to be there, or to agree with each other, are not blamed.
_NOT_BLAMED = re.compile(
    rf"\branks?[ :]*\[?{_NUMBERS}\]? (?:(?:waits?|waited|is waiting|are waiting) for\b(?! \d)"
    r"|(?:has|have) come\b|agrees?\b|is the majority\b|are the majority\b)",
    re.IGNORECASE,
)
_TRACEBACK = "Traceback (most recent call last):"
# torch puts the rank that writes a line before it.
_SPEAKER = re.compile(r"^(?:\[[^\]]*\] ?)*\[rank ?\d+\]:? ?", re.IGNORECASE)


class Where(StrEnum):
    """What a message has to name beside the rank."""

    LINE = "line"
    TENSOR = "tensor"
    NOTHING = ""


class After(StrEnum):
    """How all processes are in the end."""

    GO_ON = "go on"
    """Every rank has taken all steps, and all have the same parameters."""
    ENDED = "ended"
    """Every process has ended by itself, but for a culprit that its fault keeps from it."""
    DIFFER = "differ"
    """Every rank has taken all steps, and their parameters differ."""
    HANG = "hang"
    """Some process has not ended."""


@dataclass(frozen=True)
class Line:
    """What a rank has said, and when, in seconds of the machine's clock."""

    rank: int
    seconds: float
    text: str


@dataclass(frozen=True)
class Frame:
    """A function in which the culprit is: its file's name, its own name, its first and its last line."""

    file: str
    function: str
    first: int
    last: int


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        exit_code: None if it had to be killed.
        done: when it had taken all its steps; None if it had not.
        digest: that of its parameters at that moment.
    """

    exit_code: int | None
    done: float | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Observed:
    """What was seen of a run.

    Attributes:
        began: when the fault began.
        culprits: for each rank that has to be told, the ranks of which it must name at least one,
            and no other.
        held: the ranks that the fault keeps from ending.
        where: what is to be named beside the rank.
        frames: where the culprit was.
        tensors: the names of the module's tensors, or of what else is to be named.
        lines: what all ranks have said.
        ends: how each rank ended.
    """

    began: float
    culprits: Mapping[int, frozenset[int]]
    held: frozenset[int]
    where: Where
    frames: Sequence[Frame]
    tensors: Sequence[str]
    lines: Sequence[Line]
    ends: Sequence[RankEnd]


@dataclass(frozen=True)
class Verdict:
    """What came of a fault.

    Attributes:
        told: seconds until the last rank was told; None if some rank was not told.
        told_ranks: how many ranks were told.
        ranks: how many had to be told.
        named: whether every rank that had to be told was told the place; None if there is none to name.
        misled: whether some rank blamed another rank than the culprit, too.
        after: how all processes are in the end.
    """

    told: float | None
    told_ranks: int
    ranks: int
    named: bool | None
    misled: bool
    after: After


def judge(seen: Observed) -> Verdict:
    """Judge a run."""
    lines = {rank: [*_of_rank(seen, rank)] for rank in seen.culprits}
    told = [_first_telling(lines[rank], rank, culprits) for rank, culprits in seen.culprits.items()]
    moments = [moment for moment in told if moment is not None]
    return Verdict(
        told=max(moments) - seen.began if len(moments) == len(told) else None,
        told_ranks=len(moments),
        ranks=len(told),
        named=_is_place_named(seen, lines),
        misled=any(
            blamed(line.text, rank) - culprits
            for rank, culprits in seen.culprits.items()
            for line in lines[rank]
        ),
        after=after(seen),
    )


def is_sound(verdict: Verdict, *, must_go_on: bool) -> bool:
    """Whether no process hangs, none trains on with other parameters unknown to all, and none ends in vain.

    Args:
        verdict: what came of the fault.
        must_go_on: whether the fault is one that passes, after which all can go on.
    """
    if must_go_on:
        return verdict.after is After.GO_ON
    return verdict.after in (After.GO_ON, After.ENDED) or (
        verdict.after is After.DIFFER and verdict.told is not None
    )


def tells(text: str, listener: int, culprits: frozenset[int]) -> bool:
    """Whether a line says that something is wrong with the culprits, or one of them, and with no other rank.

    The rank that says it may name itself.
    """
    found = blamed(text, listener)
    return bool(found) and found <= culprits


def blamed(text: str, listener: int) -> set[int]:
    """The other ranks with which something is wrong, as a line of a rank has it."""
    text = _NOT_BLAMED.sub("", _SPEAKER.sub("", text))
    if not _TROUBLE.search(text):
        return set()
    # Where a list has the rank itself, it says who takes part.
    return {rank for ranks in _ranks_in(text) if listener not in ranks for rank in ranks}


def after(seen: Observed) -> After:
    """How all processes are in the end."""
    if any(end.exit_code is None for rank, end in enumerate(seen.ends) if rank not in seen.held):
        return After.HANG
    if any(end.exit_code != 0 or end.digest is None for end in seen.ends):
        return After.ENDED
    return After.GO_ON if len({end.digest for end in seen.ends}) == 1 else After.DIFFER


def names_line(text: str, frames: Sequence[Frame]) -> bool:
    """Whether a line has the file of one of the functions, and its name or one of its lines."""
    return any(
        re.search(rf"\b{re.escape(frame.file)}\b", text) is not None
        and (
            re.search(rf"\b{re.escape(frame.function)}\b", text) is not None
            or any(frame.first <= number <= frame.last for number in _lines_of_file(text, frame.file))
        )
        for frame in frames
    )


def without_own_stack(texts: Sequence[str]) -> list[bool]:
    """Which lines are not part of a traceback's stack: that is where the rank itself is, not the culprit."""
    kept, inside = [], False
    for text in (_SPEAKER.sub("", each) for each in texts):
        # The stack ends with the error, which is not indented.
        inside = text.strip() == _TRACEBACK or (inside and (text.startswith(" ") or not text))
        kept.append(not inside)
    return kept


def _of_rank(seen: Observed, rank: int) -> Iterator[Line]:
    """What a rank has said of the fault: from its beginning until the culprit, or the rank, was through.

    At the end of training everybody leaves, and that is no news of the fault.
    """
    done = [seen.ends[each].done for each in (rank, *seen.culprits[rank])]
    until = min((moment for moment in done if moment is not None), default=float("inf"))
    own = [line for line in seen.lines if line.rank == rank]
    for line, kept in zip(own, without_own_stack([line.text for line in own]), strict=True):
        if kept and seen.began <= line.seconds <= until:
            yield line


def _first_telling(lines: Sequence[Line], rank: int, culprits: frozenset[int]) -> float | None:
    return next((line.seconds for line in lines if tells(line.text, rank, culprits)), None)


def _is_place_named(seen: Observed, lines: Mapping[int, Sequence[Line]]) -> bool | None:
    if seen.where is Where.NOTHING:
        return None
    if seen.where is Where.LINE:
        return all(any(names_line(line.text, seen.frames) for line in lines[rank]) for rank in seen.culprits)
    return all(
        any(tells(line.text, rank, culprits) and _has_word(line.text, seen.tensors) for line in lines[rank])
        for rank, culprits in seen.culprits.items()
    )


def _has_word(text: str, words: Sequence[str]) -> bool:
    return any(re.search(rf"\b{re.escape(word)}\b", text) is not None for word in words)


def _ranks_in(text: str) -> list[list[int]]:
    """The ranks of each place at which a text names some."""
    return [
        [*map(int, re.findall(r"\d+", match["plain"] or match["listed"]))] for match in _RANKS.finditer(text)
    ]


def _lines_of_file(text: str, file: str) -> list[int]:
    return [int(number) for number in re.findall(rf'{re.escape(file)}"?(?::|, line )(\d+)', text)]
