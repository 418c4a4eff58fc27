"""Counts what the user does on this rank between two steps; ``pairing.py`` compares all ranks' counts."""

from paceline.data.batches_taken import BatchCounter
from paceline.data.recent_samples import end_step
from paceline.ddp.reducer.pairing import StepCounts
from paceline.recording.recorder import Recorder


class UserCounts:
    """What the user has done since the last step.

    Args:
        recorder: counts the steps of optimizers.

    Attributes:
        has_forward: whether there was a synced forward, in grad mode.
        forwards: the number of those in training mode.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._batches = BatchCounter()
        self.begin()

    def begin(self) -> None:
        """Count anew: all ranks are at the same point."""
        self.has_forward = False
        self.forwards = 0
        self._optimizer_steps = self._recorder.optimizer_steps
        self._batches.begin()
        end_step()

    def add_forward(self, *, training: bool = True) -> None:
        """A forward was called whose backward will be synced."""
        self.has_forward = True
        self.forwards += training

    def now(self) -> StepCounts:
        """What is to be compared with other ranks."""
        return StepCounts(
            through_forward=self.has_forward,
            forwards=self.forwards,
            optimizer_steps=self._recorder.optimizer_steps - self._optimizer_steps,
            batches=self._batches.now(),
        )
