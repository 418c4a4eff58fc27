"""What differs between ranks, and which of them is alone: pure, from what all ranks have told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

_NAMES_SHOWN = 4


class What(Enum):
    """What kind of thing differs."""

    TENSOR = "tensor"
    OPTION = "option"
    BUFFER = "buffer"


@dataclass(frozen=True)
class RankView:
    """What one rank has seen of its replica in one step.

    Attributes:
        step: the step's number.
        layout: what the rank's replica consists of, as a digest.
        tensors: the hash of each tensor of this step's part.
        options: the optimizers' options.
        changed: module buffers that have changed when they should not.
    """

    step: int
    layout: bytes
    tensors: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()


class Difference(NamedTuple):
    """Something that is not equal on all ranks.

    Attributes:
        what: its kind.
        name: its name.
        ranks_by_value: each value, and the ranks that have it; the value of most ranks first.
        majority: the ranks that have the value of more than half of all ranks; empty if there is none.
    """

    what: What
    name: str
    ranks_by_value: list[tuple[Any, list[int]]]
    majority: list[int]

    @property
    def alone(self) -> list[int]:
        """The ranks that differ from the majority; empty without one."""
        return [rank for _, ranks in self.ranks_by_value[1:] for rank in ranks] if self.majority else []


def find_differences(views: Sequence[RankView]) -> list[Difference]:
    """What differs among what every rank has; tensors only where all ranks have the same layout."""
    found = []
    if len({view.layout for view in views}) == 1:
        found += _compare(What.TENSOR, [view.tensors for view in views])
    found += _compare(What.OPTION, [view.options for view in views])
    changed = sorted(frozenset().union(*(view.changed for view in views)))
    found += _compare(What.BUFFER, [{name: name in view.changed for name in changed} for view in views])
    return found


def _compare(what: What, values: Sequence[dict[str, Any]]) -> list[Difference]:
    first, *others = values
    return [
        _difference(what, name, [each[name] for each in values])
        for name, value in first.items()
        if all(name in each for each in others) and any(each[name] != value for each in others)
    ]


def _difference(what: What, name: str, values: Sequence[Any]) -> Difference:
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    by_value = sorted(ranks.items(), key=lambda each: (-len(each[1]), each[1]))
    most = by_value[0][1]
    return Difference(what, name, by_value, most if 2 * len(most) > len(values) else [])


def describe_differences(
    differences: Sequence[Difference], *, since: Callable[[What], str], global_ranks: Sequence[int]
) -> list[str]:
    """A sentence for each kind of difference between the same ranks, with the names that it is about.

    Args:
        differences: at least one.
        since: says when a difference of that kind may have begun.
        global_ranks: the rank in the default group of each rank of this group.
    """
    alike: dict[tuple[Any, ...], list[Difference]] = {}
    for each in differences:
        ranks = tuple(tuple(ranks) for _, ranks in each.ranks_by_value)
        alike.setdefault((each.what, ranks, each.name if each.what is What.OPTION else ""), []).append(each)
    return [_sentence(members, since(key[0]), global_ranks) for key, members in alike.items()]


def _sentence(members: Sequence[Difference], since: str, global_ranks: Sequence[int]) -> str:
    first = members[0]
    ranks = [([global_ranks[rank] for rank in ranks], value) for value, ranks in first.ranks_by_value]
    if first.what is What.OPTION:
        values = "; ".join(f"{value!r} on {_ranks(each)}" for each, value in ranks)
        return f"{first.name} is {values} ({since})"
    if first.what is What.BUFFER:
        (changed,) = [each for each, value in ranks if value]
        (unchanged,) = [each for each, value in ranks if not value]
        return (
            f"{_names(members)} changed between two forwards on {_ranks(changed)}, and not on "
            f"{_ranks(unchanged)} ({since})"
        )
    if first.majority:
        differing = sorted(rank for each, _ in ranks[1:] for rank in each)
        agreeing = "agree" if len(ranks[0][0]) > 1 else "is the majority"
        return (
            f"{_names(members)} differs on {_ranks(differing)}{' alone' if len(differing) == 1 else ''}; "
            f"{_ranks(ranks[0][0])} {agreeing} ({since})"
        )
    values = ", ".join(f"hash {value & (2**64 - 1):016x} on {_ranks(each)}" for each, value in ranks)
    which = f" of {first.name}" if len(members) > 1 else ""
    return f"{_names(members)} differs, and no value is that of most ranks ({values}{which}; {since})"


def _names(members: Sequence[Difference]) -> str:
    names = [each.name for each in members]
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
