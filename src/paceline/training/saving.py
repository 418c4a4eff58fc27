"""A training's state in one file, which is always whole."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.errors import PeerError
from paceline.training.state import TrainingState


def save(path: str | os.PathLike[str], state: TrainingState) -> None:
    """Save a training between two steps; every rank calls this.

    Rank 0 writes one file. It appears under its name only when it is complete and on the disk, so whoever is
    killed meanwhile leaves the file before it. The other ranks wait until it is there.
    """
    group = Group(state.ddp.process_group)
    failure: Exception | None = None
    if group.rank == 0:
        try:
            write_state(Path(path), state.state_dict())
        except Exception as error:  # the other ranks have to know
            failure = error
    words = "" if failure is None else repr(failure)
    everyone = group.gather_objects(words, state.ddp.join_device) if group.size > 1 else [words]
    if failure is not None:
        raise failure
    if everyone[0]:
        raise PeerError(f"rank 0 could not save the training: {everyone[0]} (here: rank {group.rank})")


def write_state(target: Path, state: Mapping[str, Any]) -> None:
    """Write a state dict to a file that appears only when it is complete and on the disk."""
    draft = target.with_name(f"{target.name}.draft")
    with draft.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: str | os.PathLike[str], state: TrainingState) -> None:
    """Go on from a file of ``save``, with any number of ranks; every rank calls this.

    No code in the file is run.
    """
    state.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
