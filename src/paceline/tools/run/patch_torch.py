"""``paceline run --patch``: puts paceline's wrappers in place of torch's as soon as a program imports torch.

It is run by its path and uses the standard library only until torch is imported: a program that never imports
torch pays nothing, and variables that it sets before it imports torch have their effect.
"""

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from types import ModuleType
from typing import Any


class PatchingLoader(Loader):
    """Loads a module as ``loader`` would, and then patches torch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        # Readers of source and data files use more of a module's loader than the methods below.
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module, not yet executed."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load torch and then paceline; once paceline is loaded, patch torch."""
        self._loader.exec_module(module)
        if module.__name__ == "paceline":
            patch_torch()
        elif "paceline" not in sys.modules:
            # If it is paceline that imports torch, the patch follows when paceline has been loaded.
            importlib.import_module("paceline")


class TorchFinder(MetaPathFinder):
    """Finds torch and paceline before other finders do, and gives them a loader that patches torch."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - a finder's arguments
        target: ModuleType | None = None,  # noqa: ARG002 - as above
    ) -> ModuleSpec | None:
        """The module's own spec, with our loader."""
        if fullname not in ("torch", "paceline") or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = PatchingLoader(spec.loader)
        return spec


class PatchWhenUnpickled:
    """When unpickled, runs this file in the process that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return runpy.run_path, (__file__,)


def install() -> None:
    """Patch torch when it is imported, here and in processes that multiprocessing spawns."""
    sys.meta_path.insert(0, TorchFinder())
    spawn.get_preparation_data = _with_patch(spawn.get_preparation_data)  # type: ignore[assignment]


def _with_patch(original: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """What multiprocessing sends to a process that it spawns, with the patch. Tried with Python 3.11."""

    def get_preparation_data(name: str) -> dict[str, Any]:
        # Nobody reads this entry. It takes effect when it is unpickled, before the program is imported there.
        return original(name) | {"paceline": PatchWhenUnpickled()}

    return get_preparation_data


def patch_torch() -> None:
    """Replace torch's wrappers by paceline's in every module that has them."""
    import torch.nn.parallel
    import torch.nn.parallel.data_parallel
    import torch.nn.parallel.distributed

    from paceline.data_parallel.wrapper import DataParallel, data_parallel
    from paceline.ddp.wrapper import DistributedDataParallel

    replace_everywhere(torch.nn.parallel.DistributedDataParallel, DistributedDataParallel)
    replace_everywhere(torch.nn.parallel.DataParallel, DataParallel)
    # Through sys.modules: torch.nn.parallel has a function with the name of this module.
    replace_everywhere(sys.modules["torch.nn.parallel.data_parallel"].data_parallel, data_parallel)


def replace_everywhere(old: object, new: object) -> None:
    """Rebind the names of ``old`` in all modules, except in paceline's own, which may need torch's."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] != "paceline"]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)


if __name__ == "<run_path>":
    install()
