"""``paceline run --patch``: puts paceline's wrappers in place of torch's as soon as a program imports torch.

on_pythonpath/sitecustomize.py runs it by its path. It uses the standard library only until torch is imported:
a program that never imports torch pays little, and variables that it sets before that have their effect.
"""

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# The file in an attempt's folder that says that a wrapper was made.
NOTE = "wrapped"


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
            _import_paceline()


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


def python_path(given: str) -> str:
    """``given``, a value of PYTHONPATH, and before it the folder that has Python patch torch."""
    ours = str(Path(__file__).with_name("on_pythonpath"))
    others = [path for path in given.split(os.pathsep) if path != ours] if given else []
    return os.pathsep.join([ours, *others])


def install() -> None:
    """Patch torch when it is imported; if it has been imported already, now."""
    sys.meta_path.insert(0, TorchFinder())
    if "paceline" in sys.modules:
        patch_torch()
    elif "torch" in sys.modules:
        _import_paceline()


def _import_paceline() -> None:
    """Import paceline, whose loader then patches torch."""
    try:
        importlib.import_module("paceline")
    except ImportError as error:  # this may be another Python than that of the ranks
        print(
            f"paceline: --patch has no effect in this process: {error} (python: {sys.executable})",
            file=sys.stderr,
        )


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
    for wrapper in (DistributedDataParallel, DataParallel):
        _note_when_made(wrapper)


def replace_everywhere(old: object, new: object) -> None:
    """Rebind the names of ``old`` in all modules, except in paceline's own, which may need torch's."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] != "paceline"]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)


def _note_when_made(wrapper: type[Any]) -> None:
    """Leave a note for the launcher when a wrapper of this class is made."""

    # Not in __init__: its warnings name the line that is a fixed number of calls above.
    @functools.wraps(wrapper.__init__)  # whose signature remains that of the class
    def new(cls: type[Any], *args: object, **kwargs: object) -> Any:  # noqa: ARG001 - __init__ gets them too
        with suppress(OSError, KeyError):  # not in a run, or its folder has gone
            Path(os.environ["PACELINE_RUN_FOLDER"], NOTE).touch()
        return super(wrapper, cls).__new__(cls)

    wrapper.__new__ = new  # type: ignore[assignment]
