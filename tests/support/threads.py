"""Run a function in several threads of one test."""

import threading
from collections.abc import Callable


def in_threads(act: Callable[[int], None], count: int) -> None:
    """Call ``act`` with 0, 1 and so on, each in a thread; raises the first error of them."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            act(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
