"""Run one call a replica at the same time, and tell which replica failed."""

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

R = TypeVar("R")


def run_together(calls: Sequence[Callable[[], R]], place: Callable[[int], str]) -> list[R]:
    """Run every call at once and return their results in order; all threads have ended by then.

    The first call runs in the calling thread, which would only wait otherwise. The first error, by order
    of the calls, is raised again with its type kept and its place told: ``Caught KeyError in replica 1 …``.

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

    threads = [
        threading.Thread(target=run, args=(index,), name=f"paceline-{index}")
        for index in range(1, len(calls))
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
    if errors:
        _raise_first(errors, place)
    return [results[index] for index in range(len(calls))]


def _raise_first(errors: dict[int, BaseException], place: Callable[[int], str]) -> None:
    index = min(errors)
    error = errors[index]
    # An error's traceback leads to the frames that hold it: without this they would form a cycle.
    errors.clear()
    try:
        if (retold := _retell(error, place(index))) is None:
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
    message = f"Caught {kind.__name__} {place}.\nOriginal {original}"
    try:
        retold = kind(_Unquoted(message))
    except Exception:
        error.add_note(f"Caught {place}.")
        return None
    vars(retold).update(vars(error))
    return retold


class _Unquoted(str):
    """A message that stays readable where it is shown by its repr, as KeyError does."""

    __slots__ = ()
    __repr__ = str.__str__
