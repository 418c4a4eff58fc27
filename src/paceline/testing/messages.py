"""What a caller and its ranks exchange: the caller writes a call, and each rank writes its answer.

Everything is pickled by value, tensors too, so that an answer outlives the rank that sent it. Calls and
answers are files, and the sockets beside them carry single bytes that mean "look". So neither side can block
on the other while it hands over something large, and every wait has a deadline.
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
from paceline.torch_private import typed_storage, untyped_storage_of

P = ParamSpec("P")


@dataclass(frozen=True)
class RankFiles:
    """The files in the directory that one caller and its ranks share."""

    directory: Path

    @property
    def setup(self) -> Path:
        """What a rank takes over from its caller before it joins the group."""
        return self.directory / "setup"

    @property
    def store(self) -> Path:
        """The file store through which the ranks open their process group."""
        return self.directory / "store"

    @property
    def call(self) -> Path:
        """The call that the ranks are to answer."""
        return self.directory / "call"

    def answer(self, rank: int) -> Path:
        """The last answer of the rank."""
        return self.directory / f"answer-{rank}"

    def stacks(self, rank: int) -> Path:
        """The stacks of the rank's threads when it crashed or was told to end."""
        return self.directory / f"stacks-{rank}"


# The name multiprocessing gives the caller's main module in a child: the module's own guard
# ``if __name__ == "__main__"`` does not run there, and the caller's process has the same alias.
MAIN_ALIAS = "__mp_main__"


def load(data: bytes) -> Any:
    """Unpickle what the other side wrote."""
    return pickle.loads(data)  # noqa: S301 - only a caller and the ranks it started write these files


def dump(value: object) -> bytes:
    """Pickle what the other side is to read."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = {**copyreg.dispatch_table, TypedStorage: _memory_of}
    pickler.dump(value)
    return file.getvalue()


def _memory_of(storage: TypedStorage) -> tuple[Any, ...]:
    """Pickle a tensor's bytes: torch would write a zip file for each tensor, which takes longer."""
    memory = untyped_storage_of(storage)
    if memory.device.type != "cpu":
        return cast("tuple[Any, ...]", storage.__reduce__())
    return _storage_of, (storage.dtype, ctypes.string_at(memory.data_ptr(), memory.nbytes()))


def _storage_of(dtype: torch.dtype, data: bytes) -> TypedStorage:
    memory = torch.UntypedStorage(len(data))
    ctypes.memmove(memory.data_ptr(), data, len(data))
    return typed_storage(memory, dtype)


@dataclass(frozen=True)
class Call:
    """A function, by the module it can be imported from, and its pickled arguments."""

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
        """Describe ``error``, with its traceback from the first line outside paceline.testing."""
        trace = "".join(traceback.format_exception(type(error), error, _traceback_of_user(error)))
        return cls(type(error).__qualname__, str(error), trace, _pickled_or_none(error))

    def rebuild(self, rank: int) -> Exception:
        """The exception to raise in the caller, of the same type if possible, with the rank's traceback."""
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


RankAnswer: TypeAlias = Returned | Raised | Died


def answer_of(work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> RankAnswer:
    """Do ``work``, on a rank; what it returns or raises becomes the answer."""
    try:
        return Returned(work(*args, **kwargs))
    except BaseException as error:
        return Raised.of(error)


def pack(answer: RankAnswer) -> bytes:
    """Pickle an answer; one that cannot be pickled becomes an error that says so."""
    try:
        return dump(answer)
    except Exception as error:
        assert isinstance(answer, Returned)
        kind = type(answer.value).__qualname__
        return pickle.dumps(Raised.of(RemoteError(f"the result cannot be pickled (type: {kind}): {error}")))


def unpack(data: bytes) -> RankAnswer:
    """Unpickle an answer; one that cannot be unpickled becomes an error that says so."""
    try:
        answer: RankAnswer = load(data)
    except Exception as error:
        return Raised.of(RemoteError(f"the result cannot be unpickled: {type(error).__qualname__}: {error}"))
    return answer


def _traceback_of_user(error: BaseException) -> TracebackType | None:
    ours = str(Path(__file__).parent)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    # An error of paceline.testing itself, such as a module that cannot be found, is shown in full.
    return trace or error.__traceback__


def _pickled_or_none(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:
        return None
