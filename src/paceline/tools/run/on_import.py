"""Run in a process, has paceline's wrappers take torch's place as soon as torch is imported.

It is run by its path and made of the standard library alone: a program that never imports torch pays nothing,
and one that sets variables before it does so finds them heeded.
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


class After(Loader):
    """Loads a module as ``loader`` would, and then goes on with the wrappers."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        # Readers of source and data ask a module's loader for more than to load it.
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module, still empty."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load the module; then import paceline, or put its wrappers in place."""
        self._loader.exec_module(module)
        if module.__name__ == "paceline":
            patching = importlib.import_module("paceline.tools.run.patching")
            patching.put_in_place()
        elif "paceline" not in sys.modules:
            # Where paceline is what imports torch, its own turn comes when it has been loaded.
            importlib.import_module("paceline")


class Finder(MetaPathFinder):
    """Finds torch and paceline before anyone else does."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - a finder's arguments
        target: ModuleType | None = None,  # noqa: ARG002 - as above
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that goes on afterwards."""
        if fullname not in ("torch", "paceline") or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = After(spec.loader)
        return spec


class Patch:
    """Unpickled, runs this file in the process that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return runpy.run_path, (__file__,)


def with_patch(told: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """What multiprocessing tells a process that it spawns, with the patch; tried with Python 3.11."""

    def get_preparation_data(name: str) -> dict[str, Any]:
        # An entry that nobody looks at: it acts when it is unpickled, before the program is imported there.
        return told(name) | {"paceline": Patch()}

    return get_preparation_data


sys.meta_path.insert(0, Finder())
spawn.get_preparation_data = with_patch(spawn.get_preparation_data)  # type: ignore[assignment]
