"""Stands in for torch.nn.parallel.scatter_gather."""

from paceline.data_parallel.scatter_gather import gather, is_namedtuple, scatter, scatter_kwargs
from paceline.tensors.tree import is_namedtuple as _is_namedtuple

__all__ = ["_is_namedtuple", "gather", "is_namedtuple", "scatter", "scatter_kwargs"]
