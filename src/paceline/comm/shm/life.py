"""Who is still alive: each rank holds a lock on its own byte of the shared file, which dies with it.

The locks are POSIX record locks. Linux drops them when the process ends, however it ends, a forked child does
not inherit them, and they work between PID namespaces. They are also dropped when the process closes any
descriptor of the file, so there must be but one.
"""

import fcntl
import os

from paceline.comm.shm.segment import Segment

# Locks need no memory behind them: a place where nothing else is.
_LOCKS = 1 << 62


class Life:
    """Tells which of the ranks that share a segment have ended.

    Args:
        segment: what they share.
        rank: this rank's number among them; it counts as alive from now on.
    """

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment = segment
        fcntl.lockf(segment.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKS + rank)

    def has_ended(self, rank: int) -> bool:
        """Whether another rank's process is gone."""
        place = _LOCKS + rank
        try:
            # A shared lock, so that two who ask at once do not see each other.
            fcntl.lockf(self._segment.file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, place, os.SEEK_SET)
        except OSError:
            return False
        fcntl.lockf(self._segment.file, fcntl.LOCK_UN, 1, place, os.SEEK_SET)
        return True
