"""Questions to a store that may never answer.

If the network is down, torch's TCPStore waits for its server without a limit, whatever its timeout is. So a
thread asks, and nobody waits for that thread for longer than some seconds.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

Question = tuple[Callable[[], Any], "Future[Any]"]


class NoAnswerError(Exception):
    """The store did not answer in time."""


class _Asker:
    """A thread that asks one question after the other; it ends with the process."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[Question] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], Any], seconds: float) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-notes", daemon=True)
            self._thread.start()
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(seconds)
        except TimeoutError:
            if answer.done():  # the question itself raised it
                raise
            answer.cancel()
            raise NoAnswerError from None

    def _run(self) -> None:
        while True:
            question, answer = self._questions.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)
            del question, answer  # they hold the store


_asker = _Asker()


def _begin_anew() -> None:
    """A forked child has no such thread."""
    global _asker
    _asker = _Asker()


os.register_at_fork(after_in_child=_begin_anew)


def ask_store(question: Callable[[], Any], seconds: float) -> Any:
    """What a question to a store returns, or raises.

    Raises:
        NoAnswerError: it takes longer than so many seconds.
    """
    return _asker.ask(question, seconds)
