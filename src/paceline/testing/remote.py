"""What travels between a caller and its ranks: a call one way, its outcome the other.

Everything is pickled by value, tensors too, so that an outcome outlives the rank that sent it.
"""

import copyreg
import ctypes
import importlib
import importlib.util
import io
import operator
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ParamSpec, TypeAlias, cast

import torch
from torch.storage import TypedStorage

from paceline.errors import RemoteError

P = ParamSpec("P")

# The name multiprocessing gives the caller's main module in a child: the module's own guard
# ``if __name__ == "__main__"`` does not run there, and the caller's process has the same alias.
MAIN_ALIAS = "__mp_main__"


def load(data: bytes) -> Any:
    """Unpickle what the other side wrote."""
    return pickle.loads(data)  # noqa: S301 - only a caller and the ranks it started write to their mailbox


def dump(value: object) -> bytes:
    """Pickle what the other side is to read."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = {**copyreg.dispatch_table, TypedStorage: _memory_of}
    pickler.dump(value)
    return file.getvalue()


def _memory_of(storage: TypedStorage) -> tuple[Any, ...]:
    """A tensor's elements as they lie in memory: torch would save a file for each tensor, which takes longer.

    TypedStorage and its attributes are torch's own (torch 2.13).
    """
    memory = storage._untyped_storage
    if memory.device.type != "cpu":
        return cast("tuple[Any, ...]", storage.__reduce__())
    return _storage_of, (storage.dtype, ctypes.string_at(memory.data_ptr(), memory.nbytes()))


def _storage_of(dtype: torch.dtype, data: bytes) -> TypedStorage:
    memory = torch.UntypedStorage(len(data))
    ctypes.memmove(memory.data_ptr(), data, len(data))
    return TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


@dataclass(frozen=True)
class Call:
    """A function, by the place it can be imported from, and its pickled arguments."""

    module: str
    file: str | None
    qualname: str
    args: bytes

    @classmethod
    def of(cls, fn: Callable[..., object], args: tuple[object, ...]) -> "Call":
        """Describe ``fn(rank, *args)``; raises TypeError if a rank could not rebuild it."""
        module = _module_of(fn)
        try:
            packed = dump(args)
        except Exception as error:
            raise TypeError(f"args must be picklable, so that the ranks can get them ({error})") from error
        return cls(fn.__module__, getattr(module, "__file__", None), fn.__qualname__, packed)

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"

    def run(self, rank: int) -> object:
        """Import the function and call it, on a rank."""
        # The module comes first: the arguments may be instances of its classes.
        module = _import(self.module, self.file)
        fn = operator.attrgetter(self.qualname)(module)
        return fn(rank, *load(self.args))


def _module_of(fn: Callable[..., object]) -> ModuleType:
    """The module in which ``fn`` can be found by its name."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or not _is_found_in(module, fn):
        raise TypeError(
            "fn must be a function at the top level of a module, so that each rank can import it "
            f"(fn: {getattr(fn, '__qualname__', fn)}): move it there, and pass what it needs through args"
        )
    if module.__name__ == "__main__" and not hasattr(module, "__file__"):
        raise TypeError(
            "fn must be defined in a file, so that each rank can import it "
            f"(fn: {fn.__qualname__}, defined interactively): move it to a module"
        )
    return module


def _is_found_in(module: ModuleType, fn: Callable[..., object]) -> bool:
    try:
        return operator.attrgetter(fn.__qualname__)(module) is fn
    except AttributeError:
        return False


def _import(name: str, file: str | None) -> ModuleType:
    """Import the caller's module ``name``, on a rank."""
    if name == "__main__" and file is not None:
        module = sys.modules["__main__"] = _load_file(MAIN_ALIAS, file)
        return module
    if file is None or _leads_to(name, file):
        return importlib.import_module(name)
    # A test module is often not on sys.path: pytest names it after its path below the root directory.
    _load_packages_above(name, Path(file).parent)
    return _load_file(name, file)


def _leads_to(name: str, file: str) -> bool:
    """Whether importing ``name`` would load ``file``."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == file


def _load_packages_above(name: str, directory: Path) -> None:
    """The packages that ``name`` is in, ``directory`` being the innermost."""
    package = name.rpartition(".")[0]
    if not package or package in sys.modules:
        return
    _load_packages_above(package, directory.parent)
    if (file := directory / "__init__.py").exists():
        _load_file(package, str(file))
    else:
        spec = ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(directory)]
        sys.modules[package] = importlib.util.module_from_spec(spec)


def _load_file(name: str, file: str) -> ModuleType:
    """The module ``name`` loaded from ``file``, once in a rank's life."""
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == file:
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load a module from this kind of file (file: {file})")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Returned:
    """The call returned."""

    value: object


@dataclass(frozen=True)
class Raised:
    """The call raised. The exception is pickled apart: the rest arrives even if it cannot be rebuilt."""

    kind: str
    text: str
    trace: str
    exception: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        """Describe ``error``, with its traceback from the first line that is not ours."""
        trace = "".join(traceback.format_exception(type(error), error, _below_our_code(error)))
        return cls(type(error).__qualname__, str(error), trace, _pickled_or_none(error))

    def rebuild(self, rank: int) -> Exception:
        """The exception to raise in the caller, of its own type if it can be, with the remote traceback."""
        error = self._unpickled()
        error.add_note(f"raised on rank {rank}:\n{self.trace.rstrip()}")
        return error

    def _unpickled(self) -> Exception:
        try:
            error = load(self.exception) if self.exception is not None else None
        except Exception:
            error = None
        # An exception group has no place for what is not an Exception, such as SystemExit.
        return error if isinstance(error, Exception) else RemoteError(f"{self.kind}: {self.text}")


@dataclass(frozen=True)
class Died:
    """The rank's process ended without an answer. A negative exit code is a signal's number."""

    exit_code: int


Outcome: TypeAlias = Returned | Raised | Died


def outcome_of(work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Outcome:
    """Do ``work``, on a rank; whatever it raises becomes the outcome."""
    try:
        return Returned(work(*args, **kwargs))
    except BaseException as error:
        return Raised.of(error)


def pack(outcome: Outcome) -> bytes:
    """Pickle an outcome; one that cannot be pickled becomes an outcome that says so."""
    try:
        return dump(outcome)
    except Exception as error:
        assert isinstance(outcome, Returned)
        kind = type(outcome.value).__qualname__
        return pickle.dumps(Raised.of(RemoteError(f"the result cannot be pickled (type: {kind}): {error}")))


def unpack(data: bytes) -> Outcome:
    """Unpickle an outcome; one that cannot be unpickled becomes an outcome that says so."""
    try:
        outcome: Outcome = load(data)
    except Exception as error:
        return Raised.of(RemoteError(f"the result cannot be unpickled: {type(error).__qualname__}: {error}"))
    return outcome


def _below_our_code(error: BaseException) -> TracebackType | None:
    ours = str(Path(__file__).parent)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    # An error of our own code, such as a module that cannot be found, is shown whole.
    return trace or error.__traceback__


def _pickled_or_none(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:
        return None
