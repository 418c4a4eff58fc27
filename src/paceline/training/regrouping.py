"""What the ranks of a healed run do when one of them was lost: they meet, and go on from one state.

Note [Whose state]. A step ends on all ranks or on none, but a rank that is lost while others read its last
words may let one of them end the step and another not. So ranks tell each other how many steps they have
done, and all take over the state of the one that has done most. A rank whose optimizer had begun when the
step was lost has no whole state, and takes another's.
"""

import ctypes
import io
import warnings
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group, default_process_group
from paceline.comm.membership import Membership
from paceline.comm.roster import Roster
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import CollectiveError, MeetingError, PacelineError, PeerError, StalledError
from paceline.training.checkpoints import Checkpoints
from paceline.training.state import TrainingState
from paceline.watch.watcher import is_of_missing_rank, leave_groups

# What a rank says of its state instead of the number of its steps.
NEW, BROKEN = -1, -2
_BYTES_AT_ONCE = 64 << 20


class Regrouping:
    """Meets the other ranks, and makes all of them go on from one state.

    Args:
        membership: this process as a member of the run.
        ddp: the wrapper.
        state: the state of the training.
        checkpoints: has the state if no rank has it.
    """

    def __init__(
        self,
        membership: Membership,
        ddp: DistributedDataParallel,
        state: TrainingState,
        checkpoints: Checkpoints | None,
    ) -> None:
        self.membership = membership
        self._ddp = ddp
        self._state = state
        self._checkpoints = checkpoints
        self._steps = NEW

    def is_because_of_lost_rank(self, error: Exception) -> bool:
        """Whether an error is due to a rank that is lost; waits for the launcher to say so."""
        return (_is_of_others(error) or is_of_missing_rank(error)) and self.membership.is_rank_lost()

    def go_on(self, steps: int) -> Roster:
        """Meet the others of a new generation, until all of one go on together.

        Args:
            steps: how many steps this rank has done; NEW or BROKEN if it has no whole state.
        """
        self._steps = steps
        while True:
            roster = self.membership.meet()
            try:
                leave_groups()
                self.membership.open_group(roster)
                self._share_state(roster)
                self.membership.opened()
            except (RuntimeError, OSError) as error:
                if isinstance(error, PacelineError) and not _is_of_others(error):
                    raise
                self.membership.ask_again(error)
            else:
                return roster

    def _share_state(self, roster: Roster) -> None:
        """Go on in the new group from the state of the rank that has come furthest."""
        group = Group(default_process_group())
        everyone = group.gather_objects(self._steps)
        furthest = max(everyone)
        source = everyone.index(furthest)
        if furthest < 0:
            furthest, source = self._begin(group, is_broken=BROKEN in everyone), 0
        if group.rank == source:
            self._steps = furthest
        self._ddp._go_on_in(group.process_group, step=furthest)
        self._ddp.recorder.begin_generation(roster.generation)
        if any(theirs != furthest for rank, theirs in enumerate(everyone) if rank != source):
            self._send_state(source, furthest)

    def _send_state(self, source: int, steps: int) -> None:
        """Give the state of one rank to those that have another, or none."""
        group = self._ddp._group
        content = _to_tensor(self._state.state_dict()) if group.rank == source else None
        length = group.gather_objects(0 if content is None else len(content))[source]
        received = torch.empty(length, dtype=torch.uint8) if content is None else content
        group.broadcast([received], source=source, bytes_at_once=_BYTES_AT_ONCE)
        if self._steps != steps:
            self._steps = BROKEN  # while it is neither the one nor the other
            self._state.load_state_dict(_from_tensor(received))
            self._steps = steps

    def _begin(self, group: Group, *, is_broken: bool) -> int:
        """No rank has a state: rank 0 has that of the last checkpoint, or that of the start."""
        failure, steps = None, 0
        if group.rank == 0:
            try:
                if self._checkpoints is not None and self._checkpoints.load():
                    is_broken = False
                steps = self._ddp.shards.step
            except Exception as error:  # the other ranks have to know
                failure = error
        own = ("" if failure is None else repr(failure), is_broken, steps)
        words, is_broken, steps = group.gather_objects(own)[0]
        if failure is not None:
            raise failure
        if words:
            raise MeetingError(f"rank 0 could not read the checkpoint: {words}")
        if is_broken:
            raise MeetingError(
                "no rank has a whole state: one was lost while all others had begun optimizer.step(), and "
                "were not at the end of the block; and there is no checkpoint. Have no collective after "
                "optimizer.step() in `with step:`, or use `paceline run --checkpoint`"
            )
        if group.rank == 0 and self.membership.roster is not None and self.membership.roster.generation:
            warnings.warn(
                f"no rank was left that had the state of the training; it begins again at step {steps}",
                stacklevel=2,
            )
        return int(steps)


def _is_of_others(error: Exception) -> bool:
    return isinstance(error, (StalledError, PeerError, CollectiveError))


def _to_tensor(state: dict[str, Any]) -> Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _from_tensor(content: Tensor) -> Any:
    file = io.BytesIO(ctypes.string_at(content.data_ptr(), len(content)))
    return torch.load(file, map_location="cpu", weights_only=True)
