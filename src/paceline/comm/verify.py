"""Ranks agree on what they wrapped, or all of them say where they differ."""

import hashlib
from collections.abc import Sequence

import torch

from paceline.comm.group import Group
from paceline.errors import MismatchError


def check_same(group: Group, views: Sequence[tuple[str, str]], device: torch.device) -> None:
    """Raise on every rank if some rank's (name, description) pairs differ from rank 0's.

    Equal models cost one small collective; only different ones are told in full.
    """
    digest = hashlib.sha256(repr(views).encode()).digest()
    if len(set(group.gather_bytes(digest, device))) == 1:
        return
    everyone = group.gather_objects(list(views))
    for rank, theirs in enumerate(everyone):
        _compare(everyone[0], theirs, rank)


def _compare(first: list[tuple[str, str]], theirs: list[tuple[str, str]], rank: int) -> None:
    for (name, view), (their_name, their_view) in zip(first, theirs, strict=False):
        if (name, view) != (their_name, their_view):
            raise MismatchError(
                f"{name!r} in rank 0 appears not to match {their_name!r} in rank {rank} "
                f"(rank 0: {view}, rank {rank}: {their_view}); every rank must wrap the same model"
            )
    if len(first) != len(theirs):
        longer, holder = (first, 0) if len(first) > len(theirs) else (theirs, rank)
        extra = longer[min(len(first), len(theirs))][0]
        raise MismatchError(
            f"DDP expects same model across all ranks, but rank 0 has {len(first)} params, while rank {rank} "
            f"has inconsistent {len(theirs)} params (the first that only rank {holder} has: {extra!r})"
        )
