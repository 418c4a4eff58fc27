"""Our wrapper as torch's: for ``isinstance``, for torch.compile, and for names that torch asks of the class.

torch.compile reads ``_active_ddp_module`` of torch's wrapper to cut its graphs at the bounds of buckets.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from paceline.tracing import untraced

_TorchWrapper: Any = nn.parallel.DistributedDataParallel
# The thread of each wrapper whose forward is running: ranks may be threads of one process.
_threads: dict[int, int] = {}


def pass_as_torchs(wrapper: type) -> None:
    """Have ``isinstance`` take instances of our class for torch's wrapper, as libraries do."""
    _TorchWrapper.register(wrapper)


def holds_wrapper(module: nn.Module) -> bool:
    """Whether a wrapper, torch's or ours, is among the module's parts."""
    return any(isinstance(part, _TorchWrapper) for part in module.modules())


def active_wrapper() -> Any:
    """The wrapper whose forward is running in this thread; None outside of any."""
    found = _TorchWrapper._active_ddp_module
    here = threading.get_ident()
    return found if _threads.get(id(found), here) == here else None


@contextlib.contextmanager
@untraced
def active(wrapper: object) -> Iterator[None]:
    """Name the wrapper whose forward runs in here, and afterwards the outer one again."""
    outer = active_wrapper()
    _TorchWrapper._active_ddp_module = wrapper
    _threads[id(wrapper)] = threading.get_ident()
    try:
        yield
    finally:
        _TorchWrapper._active_ddp_module = outer
        _threads.pop(id(wrapper), None)


class ActiveWrapper:
    """``_active_ddp_module`` as an attribute of our class: always torch's."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return active_wrapper()


def kept_in(part: str, name: str, doc: str) -> Any:
    """An attribute that torch's users read and set on the wrapper, and that one of its parts keeps.

    A subclass may wrap the module's children and never call our constructor. Then there are no parts, and it
    is an ordinary attribute.
    """

    def read(self: Any) -> Any:
        if part in self.__dict__:
            return getattr(self.__dict__[part], name)
        if name not in self.__dict__:
            raise AttributeError(f"the wrapper's constructor was not called, so it has no {name!r}")
        return self.__dict__[name]

    def write(self: Any, value: Any) -> None:
        if part in self.__dict__:
            setattr(self.__dict__[part], name, value)
        else:
            self.__dict__[name] = value

    return property(read, write, doc=doc)


def ignore_names(module: nn.Module, params_and_buffers_to_ignore: Sequence[str]) -> None:
    """Have a wrapper leave parameters and buffers of these names alone."""
    module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in params_and_buffers_to_ignore:
            tensor._ddp_ignored = True  # type: ignore[attr-defined]


def managed_parameters(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
    """A module's parameters that are not ignored, with their names if asked."""
    for name, parameter in module.named_parameters():
        if not hasattr(parameter, "_ddp_ignored"):
            yield (name, parameter) if named_params else parameter
