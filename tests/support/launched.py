"""Ranks that a launcher has started, for libraries that look at its variables."""

import os


def as_torchrun_tells(rank: int) -> None:
    """Be a rank that was started by torchrun."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ |= {name: str(value) for name, value in told.items()} | {"TORCHELASTIC_RUN_ID": "test"}
