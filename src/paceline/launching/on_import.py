"""Run in a process, has paceline's wrappers take torch's place as soon as torch is imported.

It is run by its path and made of the standard library alone: a program that never imports torch pays nothing,
and one that sets variables before it does so finds them heeded.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


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
            patching = importlib.import_module("paceline.launching.patching")
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


sys.meta_path.insert(0, Finder())
