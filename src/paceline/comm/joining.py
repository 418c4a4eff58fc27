"""The base class by which torch's join context manager knows who can join."""

from torch.distributed.algorithms.join import Joinable

__all__ = ["Joinable"]
