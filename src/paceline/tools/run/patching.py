"""paceline's wrappers in the place of torch's, for a program that nobody edits."""

import sys

import torch.nn.parallel
import torch.nn.parallel.data_parallel
import torch.nn.parallel.distributed

from paceline.data_parallel.wrapper import DataParallel, data_parallel
from paceline.ddp.wrapper import DistributedDataParallel


def put_in_place() -> None:
    """Give every module that has torch's wrappers ours."""
    torchs = torch.nn.parallel
    replace_everywhere(torchs.DistributedDataParallel, DistributedDataParallel)
    replace_everywhere(torchs.DataParallel, DataParallel)
    # torch.nn.parallel's attribute of that name is a module while it is loaded, and the function afterwards.
    function = sys.modules["torch.nn.parallel.data_parallel"].data_parallel
    replace_everywhere(function, data_parallel)


def replace_everywhere(old: object, new: object) -> None:
    """Rebind ``old``'s name in every module that has it, but for paceline's own, which may mean torch's."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] != "paceline"]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)
