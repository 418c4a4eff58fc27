"""When what happened in a step."""

import time


class Times:
    """Stamps of the step at hand, in nanoseconds since the epoch; 0 for what has not happened.

    Attributes:
        forward_start: the wrapper's forward was called.
        backward_start: the first sign of a backward.
        backward_end: the last gradient was there.
        comm_start: the first bucket left.
        comm_end: the last one was back.
    """

    def __init__(self) -> None:
        self.forward_start = self.backward_start = self.backward_end = self.comm_start = self.comm_end = 0

    def forward_began(self) -> None:
        """The wrapper's forward was called."""
        self.forward_start = time.time_ns()

    def backward_began(self) -> None:
        """The first sign of a backward."""
        self.backward_start = time.time_ns()
        self.comm_start = 0

    def launched(self) -> None:
        """A bucket left."""
        self.comm_start = self.comm_start or time.time_ns()

    def backward_ended(self) -> None:
        """The last gradient was there."""
        self.backward_end = time.time_ns()

    def landed(self) -> None:
        """The last bucket was back."""
        self.comm_end = time.time_ns()

    def durations(self) -> dict[str, int]:
        """Nanoseconds of forward, of backward, of communication, and of both at once."""
        compute = self.backward_end - self.backward_start
        return {
            "forward_compute_time": max(self.backward_start - self.forward_start, 0),
            "backward_compute_time": compute,
            "backward_comm_time": self.comm_end - self.comm_start,
            "backward_compute_comm_overlap_time": min(max(self.backward_end - self.comm_start, 0), compute),
        }
