import os
import threading

import pytest

from paceline.comm.peer_notes import PeerNotes
from paceline.comm.store_questions import NoAnswerError, ask_store


def test_an_answer_is_returned_and_an_error_raised() -> None:
    assert ask_store(lambda: 7, 10.0) == 7
    with pytest.raises(KeyError):
        ask_store(lambda: {}["x"], 10.0)
    with pytest.raises(TimeoutError, match="of the store"):
        ask_store(lambda: (_ for _ in ()).throw(TimeoutError("of the store")), 10.0)


def test_nobody_waits_for_a_store_that_does_not_answer() -> None:
    answers = threading.Event()
    with pytest.raises(NoAnswerError):
        ask_store(answers.wait, 0.05)
    late: list[int] = []
    with pytest.raises(NoAnswerError):
        ask_store(lambda: late.append(1), 0.05)  # behind the first one
    answers.set()
    assert ask_store(lambda: 7, 10.0) == 7
    assert late == []


def test_a_forked_child_asks_by_itself() -> None:
    assert ask_store(lambda: 7, 10.0) == 7
    child = os.fork()
    if child == 0:
        os._exit(0 if ask_store(lambda: 7, 10.0) == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0


class SilentStore:
    """Does not answer; counts questions."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = threading.Event()

    def check(self, _: list[str]) -> bool:
        self.asked += 1
        return self.answers.wait(60)


def test_notes_ask_a_silent_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.comm.peer_notes._ANSWER_SECONDS", 0.05)
    store = SilentStore()
    notes = PeerNotes(store, "0", rank=0, size=3)
    try:
        assert notes.stopped(1) == {}
        assert notes.wait_for_reason(1, 2) is None
        assert store.asked == 1
    finally:
        store.answers.set()
