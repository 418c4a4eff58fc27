"""``--model module:fn``: the user's model, given by the function that builds it."""

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
from paceline.tools.bench.models import Training, default_loss, seed_all

CONTRACT = "(module, inputs) or (module, inputs, loss)"


@dataclass(frozen=True)
class UserModel:
    """A function in a module or in a file. Only ranks import it; the command runs none of the user's code."""

    place: str
    function: str

    @classmethod
    def parse(cls, text: str) -> "UserModel":
        """Read ``module:fn`` or ``path/to/file.py:fn``."""
        place, _, function = text.rpartition(":")
        if not place or not function.isidentifier():
            raise OptionError(f"a model is given as module:fn or path/to/file.py:fn (given: {text})")
        model = cls(place, function)
        if model.is_file and not Path(place).is_file():
            raise OptionError(f"there is no such file (file: {place}, current folder: {Path.cwd()})")
        return model

    @property
    def is_file(self) -> bool:
        """Whether the place is a file, and not the name of a module."""
        return self.place.endswith(".py") or "/" in self.place

    @property
    def what(self) -> str:
        """Its name in tables: as it was given."""
        return f"{self.place}:{self.function}"

    def make(self, rank: int) -> Training:
        """Call the function with the rank as seed: the same each time, and other inputs on each rank."""
        function = _function(self)
        seed_all(rank)
        return _training(function(), self.what)


def _function(model: UserModel) -> Callable[[], Any]:
    module = _load_file(Path(model.place).resolve()) if model.is_file else _import(model.place)
    function: Any = getattr(module, model.function, None)
    if not callable(function):
        there = sorted(name for name, value in vars(module).items() if inspect.isfunction(value))
        raise OptionError(
            f"there is no such function (given: {model.what}, functions there: {', '.join(there) or 'none'})"
        )
    return function  # type: ignore[no-any-return]  # it is the user's


def _import(name: str) -> ModuleType:
    """Import by name, from the current folder too, as ``python -m`` does."""
    _put_first(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An import inside the user's module may fail too: that error is shown as it is.
        if error.name is None or f"{name}.".startswith(f"{error.name}."):
            raise OptionError(
                f"there is no such module (module: {name}, current folder: {Path.cwd()})"
            ) from None
        raise


def _load_file(path: Path) -> ModuleType:
    """Run the file once, with its own folder first on the path, as python does."""
    if (loaded := sys.modules.get(path.stem)) is not None and loaded.__file__ == str(path):
        return loaded
    _put_first(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"the file must be a Python file, with the suffix .py (file: {path})")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _put_first(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _training(made: Any, what: str) -> Training:
    """Check what the function returned."""
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
    return Training(module, args, kwargs, loss or default_loss)


def _check_parameters(module: nn.Module) -> None:
    kind = type(module).__name__
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise OptionError(f"the model has no parameter to train (model: {kind})")
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise OptionError(
                f"call the model once before you return it: it has no shapes yet (parameter: {name})"
            )
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
