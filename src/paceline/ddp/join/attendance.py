"""Who still has inputs: told by every rank at the start of every forward under join."""

from typing import NamedTuple

import torch

from paceline.comm.group import Group
from paceline.errors import StepError


class Attendance(NamedTuple):
    """What the ranks said of one forward.

    Attributes:
        active: ranks that have inputs.
        synced: whether a backward with synchronisation follows.
    """

    active: list[int]
    synced: bool

    @property
    def authority(self) -> int:
        """The rank whose module buffers count."""
        return self.active[-1]


def attend(group: Group, device: torch.device, *, active: bool, synced: bool) -> Attendance:
    """Tell the other ranks whether this one has inputs and will synchronise, and hear them."""
    said = torch.zeros(group.size + 1, device=device)
    said[group.rank] = float(active)
    said[group.size] = float(active and synced)
    group.all_reduce(said).wait(lambda: None)
    *present, syncing = map(round, said.tolist())
    ranks = [rank for rank, here in enumerate(present) if here]
    if 0 < syncing < len(ranks):
        raise StepError(
            "some ranks synchronise this step and others only accumulate "
            f"(ranks with inputs: {ranks}, synchronising: {syncing}, here: rank {group.rank})"
        )
    return Attendance(ranks, synced=syncing > 0)
