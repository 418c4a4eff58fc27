"""Checkpoints of a run, written beside the training: a thread writes, and ranks wait only for the copy."""

import os
import threading
import warnings
from pathlib import Path

from paceline.errors import OptionError
from paceline.training.saving import load, write_state
from paceline.training.state import TrainingState, in_bytes

# Where checkpoints are, and after how many steps one is written.
FOLDER_VARIABLE = "PACELINE_CHECKPOINT"
EVERY_VARIABLE = "PACELINE_CHECKPOINT_EVERY"
_FILE = "training.pt"


class Checkpoints:
    """The file with the last state of a run.

    Args:
        folder: where it is; made if it is missing.
        every: after how many steps it is written.
        state: what is saved.
    """

    def __init__(self, folder: Path, every: int, state: TrainingState) -> None:
        self._file = folder / _FILE
        self._every = every
        self._state = state
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def load(self) -> bool:
        """Go on from the last checkpoint; False if there is none."""
        if not self._file.exists():
            return False
        try:
            load(self._file, self._state)
        except Exception as error:
            raise OptionError(
                f"the checkpoint cannot be loaded ({self._file}): {type(error).__name__}: {error}"
            ) from error
        return True

    def after_step(self, steps: int) -> None:
        """Begin to write one if it is time, and the last one is written."""
        if steps % self._every == 0 and (self._thread is None or not self._thread.is_alive()):
            self._begin()

    def write_last(self) -> None:
        """Write the state at the end of the run, and wait for it."""
        self.wait()
        self._begin()
        self.wait()

    def wait(self) -> None:
        """Wait until what was begun is written."""
        if self._thread is not None:
            self._thread.join()
            self._tell_failure()

    def _begin(self) -> None:
        self._tell_failure()
        values = self._state.copy()
        self._thread = threading.Thread(
            target=self._write, args=(values,), name="paceline-checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, values: dict[str, object]) -> None:
        try:
            write_state(self._file, in_bytes(values))
        except Exception as error:  # training goes on, and the main thread tells
            self._failure = error

    def _tell_failure(self) -> None:
        if self._failure is not None:
            warnings.warn(
                f"a checkpoint was not written ({self._file}): {self._failure!r}; the one before it stays",
                stacklevel=4,
            )
            self._failure = None


def from_environment(state: TrainingState) -> Checkpoints | None:
    """The checkpoints that ``paceline run --checkpoint`` asks for."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return None if folder is None else Checkpoints(Path(folder), int(os.environ[EVERY_VARIABLE]), state)
