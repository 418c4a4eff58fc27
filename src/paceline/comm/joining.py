"""What torch's join context manager knows its members by, and how they answer it."""

from torch.distributed.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]
