"""Run one call a replica at the same time, and tell which replica failed."""

import contextvars
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from paceline.data_parallel.surroundings import Surroundings

R = TypeVar("R")


def run_together(calls: Sequence[Callable[[], R]], place: Callable[[int], str]) -> list[R]:
    """Run every call in a thread of its own, and return the results in order when all threads have ended.

    The first call's thread is the caller's, which would only wait otherwise. What holds around the caller
    holds in the other threads too. The first error, by order of the calls, is raised again with its type kept
    and its place told: ``Caught KeyError in replica 1 …``.

    Args:
        calls: what to run.
        place: what to say of where the call with that number ran.
    """
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except BaseException as error:
            errors[index] = error

    _in_threads(run, len(calls))
    if errors:
        _raise_first(errors, place)
    return [results[index] for index in range(len(calls))]


def _in_threads(run: Callable[[int], None], count: int) -> None:
    surroundings = Surroundings.of_caller()

    def work(index: int) -> None:
        with surroundings.entered():
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
        surroundings.restore()


def _raise_first(errors: dict[int, BaseException], place: Callable[[int], str]) -> NoReturn:
    index = min(errors)
    error = errors[index]
    # An error's traceback leads to the frames that hold it: without this they would form a cycle.
    errors.clear()
    retold = None
    try:
        retold = _retell(error, place(index))
        if retold is None:
            raise error
        raise retold from error
    finally:
        del error, retold


def _retell(error: BaseException, place: str) -> BaseException | None:
    """An error of the same type that says where it was caught, or None if the type cannot be built so."""
    if not isinstance(error, Exception):  # Ctrl-C and the like are nobody's fault
        return None
    kind = type(error)
    original = "".join(traceback.format_exception(error))
    message = _Unquoted(f"Caught {kind.__name__} {place}.\nOriginal {original}")
    try:
        retold = kind(*_arguments(error, message))
    except Exception:
        error.add_note(f"Caught {place}.")
        return None
    vars(retold).update(vars(error))
    if place not in str(retold):  # a type may show something else than its message
        retold.add_note(f"Caught {place}.")
    return retold


def _arguments(error: Exception, message: str) -> tuple[object, ...]:
    if isinstance(error, OSError) and error.errno is not None:
        return (error.errno, message, error.filename)
    return (message,)


class _Unquoted(str):
    """A message that stays readable where it is shown by its repr, as KeyError does."""

    __slots__ = ()
    __repr__ = str.__str__
