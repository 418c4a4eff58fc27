"""What torch's join context manager knows its members by, and how they answer it."""

from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

__all__ = ["Join", "JoinHook", "Joinable", "leave"]


def leave(joinable: Joinable) -> None:
    """Tell the other ranks nothing more at each forward; torch 2.13 lets its own go on to."""
    joinable._join_config = _JoinConfig.construct_disabled_join_config()
