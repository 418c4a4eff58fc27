"""A rank's place in a run whose ranks may be replaced: it meets the others, and opens the group with them.

See Note [Generations] in roster.py.

Note [Who ends a wait]. Members wait here without a limit of their own. The launcher has the store: it knows
who lives, ends ranks that do not come, and the ranks end with it.
"""

import functools
import os
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import distributed

from paceline.comm.meeting_store import connect
from paceline.comm.roster import (
    LOST_AFTER_VARIABLE,
    MEMBER_VARIABLE,
    ROSTER_KEY,
    Roster,
    again_key,
    done_key,
    here_key,
    opened_key,
    stepped_key,
)
from paceline.errors import LostRankError, MeetingError, ReplacedError
from paceline.torch_private import name_groups_anew, set_timeout

_distributed: Any = distributed  # its type hints leave out the stores
_POLL_SECONDS = 0.01
_CONNECT_SECONDS = 20.0
# How long members may take to connect to each other when all of them have come: this is how late they notice
# that one is lost just then. It takes milliseconds, and after each failure they have twice as long.
_OPEN_SECONDS = 2.0
_MOST_FAILURES = 5
# The least default for collectives. A stall is told after five usual steps, and the launcher acts after that.
_LEAST_TIMEOUT = 300.0
# How much longer than the launcher a rank waits for its word on an error.
_GRACE_SECONDS = 5.0


class Membership:
    """This process as a member of the run.

    Args:
        member: its name.
        lost_after: after how many seconds the launcher takes a rank for lost that others wait for.

    Attributes:
        lost_after: the same.
        roster: that of the generation whose group is open; None before the first one.
    """

    def __init__(self, member: str, *, lost_after: float) -> None:
        self.member = member
        self.roster: Roster | None = None
        self.lost_after = lost_after
        self._connection: Any = None
        self._backend = ""
        self._timeout: timedelta | None = None
        self._failures = 0
        self._has_stepped = False

    @property
    def is_alone(self) -> bool:
        """Whether it has opened its own group, and has not met the others yet."""
        return bool(self._backend) and self.roster is None

    def open_alone(self, backend: str, timeout: timedelta | None) -> None:
        """Open a default group of this process alone, until it meets the others.

        Args:
            backend: the backend of this group and of those that follow.
            timeout: how long collectives wait for others; if None, four times as long as the launcher, and
                300 s at least.
        """
        self._backend, self._timeout = backend, timeout
        distributed.init_process_group(
            backend, store=_distributed.HashStore(), rank=0, world_size=1, timeout=timeout
        )

    def meet(self) -> Roster:
        """Wait until all members of a new generation have come.

        Raises:
            ReplacedError: the others go on without this one.
        """
        while True:
            roster = self._wait_for_newer()
            self._set(here_key(roster.generation, self.member))
            keys = [here_key(roster.generation, member) for member in roster.members]
            while self._newer(roster) is None:
                if self._store.check(keys):
                    return roster
                time.sleep(_POLL_SECONDS)

    def open_group(self, roster: Roster) -> None:
        """Open the default group of a generation, in place of the one before."""
        self.roster = roster
        if distributed.is_initialized():
            distributed.destroy_process_group()
        else:  # the last one could not be opened
            name_groups_anew()
        prefix = f"paceline/heal/{roster.generation}/group"
        distributed.init_process_group(
            self._backend,
            # A connection of its own, on which a wait may be broken off.
            store=_distributed.PrefixStore(prefix, self._store.clone()),
            rank=roster.members.index(self.member),
            world_size=len(roster.members),
            timeout=timedelta(seconds=_OPEN_SECONDS * 2**self._failures),
        )
        set_timeout(distributed.group.WORLD, self._timeout or self._default_timeout)

    def opened(self) -> None:
        """All members have gone on in the new group."""
        assert self.roster is not None
        self._failures = 0
        self._set(opened_key(self.roster.generation))

    @property
    def _default_timeout(self) -> timedelta:
        """The launcher ends a rank that others wait for, but a host that is cut off closes no connection."""
        return timedelta(seconds=max(_LEAST_TIMEOUT, 4 * self.lost_after))

    def check_current(self) -> None:
        """Raise if the others have gone on in a new generation, while this rank waits in an old group."""
        if self.roster is not None and (newer := self._newer(self.roster)) is not None:
            raise LostRankError(
                f"ranks of this group are lost, and generation {newer.generation} has begun "
                f"(here: {self.roster.generation})"
            )

    def ask_again(self, error: Exception) -> None:
        """The new group has failed: have the launcher begin the next generation, if it has not.

        Raises:
            MeetingError: that has happened too often.
        """
        assert self.roster is not None
        self._failures += 1
        if self._failures > _MOST_FAILURES:
            raise MeetingError(
                f"ranks could not go on in a new process group {_MOST_FAILURES} times in a row "
                f"(member: {self.member}, generation: {self.roster.generation}): {error}"
            ) from error
        self._set(again_key(self.roster.generation))

    def is_rank_lost(self) -> bool:
        """Whether the launcher begins a new generation; waits until it has had time to see a reason."""
        left = self.lost_after + _GRACE_SECONDS
        while self._newer(self.roster) is None:
            if left <= 0:
                return False
            # Not by the clock: a launcher that is stopped answers late, and needs its time afterwards.
            time.sleep(_POLL_SECONDS)
            left -= _POLL_SECONDS
        return True

    def stepped(self) -> None:
        """This member has done a step."""
        if not self._has_stepped:
            self._has_stepped = True
            self._set(stepped_key(self.member))

    def end(self) -> bool:
        """All steps are done: wait for the other members; False if there is a new generation instead."""
        roster = self.roster
        assert roster is not None
        self._set(done_key(roster.generation, self.member))
        keys = [done_key(roster.generation, member) for member in roster.members]
        while True:
            now = self._read()
            if now is None or now.generation > roster.generation:
                return False
            if now.is_over:
                return True
            if self._store.check(keys):
                self._end_from(now)
            time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """End the training for all members, because the loop over the steps was left."""
        with suppress(RuntimeError, OSError):  # the launcher has ended
            now = self._read()
            if now is not None and self.roster is not None and now.generation == self.roster.generation:
                self._end_from(now)

    def _end_from(self, roster: Roster) -> None:
        over = replace(roster, is_over=True)
        self._store.compare_set(ROSTER_KEY, roster.to_json(), over.to_json())

    def _wait_for_newer(self) -> Roster:
        while True:
            if (now := self._read()) is not None and now.is_over:
                raise MeetingError(
                    "the training of this run is over: the loop over its steps has ended, or was left, on a "
                    f"rank (member: {self.member}); with `paceline run --heal` a script has one Run, and one "
                    "loop over it"
                )
            roster = self._newer(self.roster)
            if roster is not None and self.member in roster.members:
                return roster
            if roster is not None and self.roster is not None:  # a new member may be in the next one
                raise ReplacedError(
                    "this process was given up, and the others have gone on without it "
                    f"(member: {self.member}, generation: {roster.generation})"
                )
            time.sleep(_POLL_SECONDS)

    def _newer(self, than: Roster | None) -> Roster | None:
        roster = self._read()
        is_newer = roster is not None and (than is None or roster.generation > than.generation)
        return roster if is_newer else None

    def _read(self) -> Roster | None:
        if not self._store.check([ROSTER_KEY]):
            return None
        return Roster.from_json(self._store.get(ROSTER_KEY))

    def _set(self, key: str) -> None:
        self._store.set(key, "1")

    @property
    def _store(self) -> Any:
        if self._connection is None:
            self._connection = connect(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                until=time.monotonic() + _CONNECT_SECONDS,
                answer_seconds=_CONNECT_SECONDS,
            )
        return self._connection


@functools.cache
def own_membership() -> Membership | None:
    """This process's membership; None if the run is not healed."""
    member = os.environ.get(MEMBER_VARIABLE)
    return None if member is None else Membership(member, lost_after=float(os.environ[LOST_AFTER_VARIABLE]))
