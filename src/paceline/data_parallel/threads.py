"""Run one call per replica, each in a thread of its own, and say which replica failed."""

import contextlib
import contextvars
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch

from paceline.tensors import devices as dev

R = TypeVar("R")


def run_in_threads(calls: Sequence[Callable[[], R]], describe: Callable[[int], str]) -> list[R]:
    """Run every call in a thread of its own, and return the results in order when all threads have ended.

    The first call runs in the caller's thread, which would only wait otherwise. The caller's thread context
    holds in the other threads too. The first error, by order of the calls, is raised again: its type is kept,
    and the message says where it was caught: ``Caught KeyError in replica 1 …``.

    Args:
        calls: the calls.
        describe: where the call of that index ran, for the message of an error.
    """
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            errors[index] = error

    _run_all(run, len(calls))
    if errors:
        _raise_first(errors, describe)
    return [results[index] for index in range(len(calls))]


def _run_all(run: Callable[[int], None], count: int) -> None:
    context = ThreadContext.of_caller()

    def work(index: int) -> None:
        with context.entered():
            run(index)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work, index), name=f"replica {index}")
        for index in range(1, count)
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        run(0)
    finally:
        for thread in started:
            thread.join()
        context.restore()


@dataclass(frozen=True)
class ThreadContext:
    """What torch keeps per thread: grad mode, inference mode, autocast, default device, number of threads."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device
    num_threads: int

    @classmethod
    def of_caller(cls) -> "ThreadContext":
        """Read the calling thread's."""
        types = {"cpu", dev.accelerator_type() or "cpu"}
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
            num_threads=torch.get_num_threads(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make it hold in the calling thread, which must be a new one."""
        # OpenMP and MKL keep this number for each thread, and a new thread starts with the machine's.
        torch.set_num_threads(self.num_threads)
        with contextlib.ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            yield

    def restore(self) -> None:
        """Undo what the first call did to the caller's grad mode and autocast outside any context manager."""
        torch.set_grad_enabled(self.grad)
        for device_type, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)

    def _contexts(self) -> Iterator[AbstractContextManager[object]]:
        # Only what differs from a new thread's own context: each of them costs time in every replica.
        if self.inference:
            yield torch.inference_mode()
        yield torch.set_grad_enabled(self.grad)
        for device_type, enabled, dtype in self.autocast:
            if enabled:
                yield torch.autocast(device_type, dtype=dtype, cache_enabled=self.autocast_cache)
        if self.default_device != dev.CPU:
            yield self.default_device


def _raise_first(errors: dict[int, BaseException], describe: Callable[[int], str]) -> NoReturn:
    index = min(errors)
    error = errors[index]
    # An error's traceback leads to the frames that hold it: without this they would form a cycle.
    errors.clear()
    located = None
    try:
        located = _with_location(error, describe(index))
        if located is None:
            raise error
        raise located from error
    finally:
        del error, located


def _with_location(error: BaseException, location: str) -> BaseException | None:
    """An error of the same type that says where it was caught, or None if the type cannot be built so."""
    if not isinstance(error, Exception):  # KeyboardInterrupt and the like are not the replica's
        return None
    kind = type(error)
    original = "".join(traceback.format_exception(error))
    message = _Unquoted(f"Caught {kind.__name__} {location}.\nOriginal {original}")
    try:
        located = kind(*_arguments(error, message))
    except Exception:
        error.add_note(f"Caught {location}.")
        return None
    vars(located).update(vars(error))
    if location not in str(located):  # a type may show something else than its message
        located.add_note(f"Caught {location}.")
    return located


def _arguments(error: Exception, message: str) -> tuple[object, ...]:
    if isinstance(error, OSError) and error.errno is not None:
        return (error.errno, message, error.filename)
    return (message,)


class _Unquoted(str):
    """A message that stays readable where its repr is shown, as KeyError does."""

    __slots__ = ()
    __repr__ = str.__str__
