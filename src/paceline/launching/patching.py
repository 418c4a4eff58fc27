"""paceline's wrappers in the place of torch's, for a program that nobody edits."""

import runpy
import sys
from multiprocessing import spawn
from typing import Any

import torch.nn.parallel
import torch.nn.parallel.data_parallel
import torch.nn.parallel.distributed

from paceline.data_parallel import DataParallel, data_parallel
from paceline.distributed import DistributedDataParallel
from paceline.launching.worker import PATCH


def put_in_place() -> None:
    """Give every module that has torch's wrappers ours, now and in processes that are spawned."""
    torchs = torch.nn.parallel
    replace_everywhere(torchs.DistributedDataParallel, DistributedDataParallel)
    replace_everywhere(torchs.DataParallel, DataParallel)
    # torch.nn.parallel's attribute of that name is a module while it is loaded, and the function afterwards.
    function = sys.modules["torch.nn.parallel.data_parallel"].data_parallel
    replace_everywhere(function, data_parallel)
    _do_so_where_spawned()


def replace_everywhere(old: object, new: object) -> None:
    """Rebind ``old``'s name in every module that has it, but for paceline's own, which may mean torch's."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] != "paceline"]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)


class _Patch:
    """Unpickled, has the wrappers take torch's place in the process that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return runpy.run_path, (str(PATCH),)


def _do_so_where_spawned() -> None:
    """Send the patch with what multiprocessing tells a process that it spawns; tried with Python 3.11."""
    told = spawn.get_preparation_data
    if told.__module__ == __name__:
        return

    def get_preparation_data(name: str) -> dict[str, Any]:
        # An entry that nobody looks at: it acts when it is unpickled, before the program is imported there.
        return told(name) | {"paceline": _Patch()}

    spawn.get_preparation_data = get_preparation_data
