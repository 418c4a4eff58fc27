"""The names of torch.nn that paceline serves, under the paths that torch gives them."""

from paceline.data_parallel.wrapper import DataParallel

__all__ = ["DataParallel"]
