"""Checks that all ranks have wrapped the same model; if not, every rank raises and names the difference."""

import hashlib
from collections.abc import Sequence

import torch

from paceline.comm.group import Group
from paceline.errors import MismatchError

Views = Sequence[tuple[str, str]]


def check_same(group: Group, parameters: Views, options: Views, device: torch.device) -> None:
    """Raise on every rank if some rank's (name, description) pairs differ from those of rank 0.

    Equal models cost one small collective. Only if they differ do ranks send each other the full lists.
    """
    digest = hashlib.sha256(repr((parameters, options)).encode()).digest()
    if len(set(group.gather_bytes(digest, device))) == 1:
        return
    everyone = group.gather_objects((list(parameters), list(options)), device)
    for rank, (theirs, their_options) in enumerate(everyone):
        _compare(everyone[0][0], theirs, rank)
        _compare(everyone[0][1], their_options, rank)


def _compare(first: Views, theirs: Views, rank: int) -> None:
    for (name, view), (their_name, their_view) in zip(first, theirs, strict=False):
        if (name, view) != (their_name, their_view):
            raise MismatchError(
                f"ranks must wrap the same model: {name!r} in rank 0 is not {their_name!r} in rank {rank} "
                f"(rank 0: {view}, rank {rank}: {their_view})"
            )
    if len(first) != len(theirs):
        longer, holder = (first, 0) if len(first) > len(theirs) else (theirs, rank)
        extra = longer[min(len(first), len(theirs))][0]
        raise MismatchError(
            f"ranks must wrap the same model: rank 0 has {len(first)} parameters, rank {rank} has "
            f"{len(theirs)} parameters (the first that only rank {holder} has: {extra!r})"
        )
