"""A model of the user's own, by the name of the function that makes it."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.errors import OptionError
from paceline.tools.bench.training import Training, natural_loss, seed_all

CONTRACT = "(module, inputs) or (module, inputs, loss)"


@dataclass(frozen=True)
class Own:
    """The function in a module, or in a file. It is looked for on the ranks: nobody else runs user's code."""

    place: str
    function: str

    @classmethod
    def parse(cls, text: str) -> "Own":
        """Read ``module:fn`` or ``path/to/file.py:fn``."""
        place, _, function = text.rpartition(":")
        if not place or not function.isidentifier():
            raise OptionError(f"a model is given as module:fn or path/to/file.py:fn (given: {text})")
        own = cls(place, function)
        if own.is_file and not Path(place).is_file():
            raise OptionError(f"there is no such file (file: {place}, here: {Path.cwd()})")
        return own

    @property
    def is_file(self) -> bool:
        """Whether the place is a file, and no name of a module."""
        return self.place.endswith(".py") or "/" in self.place

    @property
    def what(self) -> str:
        """Its name, as it was given."""
        return f"{self.place}:{self.function}"

    def make(self, rank: int) -> Training:
        """Call the function with the same seeds each time; other ranks have others, so other inputs."""
        function = _function(self)
        seed_all(rank)
        return _training(function(), self.what)


def _function(own: Own) -> Callable[[], Any]:
    module = _load_file(Path(own.place).resolve()) if own.is_file else _import(own.place)
    function: Any = getattr(module, own.function, None)
    if not callable(function):
        there = sorted(name for name, value in vars(module).items() if inspect.isfunction(value))
        raise OptionError(
            f"there is no such function (given: {own.what}, functions there: {', '.join(there) or 'none'})"
        )
    return function  # type: ignore[no-any-return]  # it is the user's


def _import(name: str) -> ModuleType:
    """Import by name, from the current folder too, as ``python -m`` does."""
    _put_first(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # What the module itself misses is an error of its own.
        if error.name is None or f"{name}.".startswith(f"{error.name}."):
            raise OptionError(f"there is no such module (module: {name}, here: {Path.cwd()})") from None
        raise


def _load_file(path: Path) -> ModuleType:
    """Run the file once, with its own folder first on the path, as python does."""
    if (loaded := sys.modules.get(path.stem)) is not None and loaded.__file__ == str(path):
        return loaded
    _put_first(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"a file with a model must be Python's, with its ending (file: {path})")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _put_first(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _training(made: Any, what: str) -> Training:
    """What the function has returned, checked."""
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        given = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise OptionError(f"{what} must return {CONTRACT} (returned: {given})")
    module, inputs, *rest = made
    if not isinstance(module, nn.Module):
        raise OptionError(f"{what} must return {CONTRACT} (type of the first: {type(module).__name__})")
    _check_parameters(module)
    loss = rest[0] if rest else None
    if loss is not None and not callable(loss):
        raise OptionError(f"the loss must be callable with the output (type: {type(loss).__name__})")
    args, kwargs = _arguments(inputs)
    return Training(module, args, kwargs, loss or natural_loss)


def _check_parameters(module: nn.Module) -> None:
    kind = type(module).__name__
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise OptionError(f"the model has no parameter to train (model: {kind})")
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise OptionError(f"call the model once, so that it gets its shapes (without one: {name})")
        if parameter.device.type != "cpu":
            raise OptionError(f"models are measured on the CPU (parameter: {name}, on: {parameter.device})")


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    match inputs:
        case Tensor():
            return (inputs,), {}
        case tuple():
            return inputs, {}
        case Mapping():
            return (), inputs
    raise OptionError(
        "inputs must be a tensor, a tuple of positional arguments or a dict of keyword arguments "
        f"(type: {type(inputs).__name__})"
    )
