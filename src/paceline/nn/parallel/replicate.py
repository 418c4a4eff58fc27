"""Stands in for torch.nn.parallel.replicate."""

from paceline.replicas.replicate import replicate

__all__ = ["replicate"]
