"""Stands in for torch.nn.parallel.replicate."""

from paceline.data_parallel.replicate import replicate

__all__ = ["replicate"]
