"""The thread that watches this rank: it writes the status page, and tells when a wait takes long.

It wakes once per second. If the rank has waited for others for long, it looks at their pages and logs who is
missing, in which line and in what state; again at growing intervals; and once more when it is over.
"""

import atexit
import contextlib
import logging
import os
import platform
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import (
    ClosedGroupError,
    CollectiveError,
    LateRankError,
    LostRankError,
    PacelineError,
    StalledError,
    UnmatchedError,
)
from paceline.watch.error_words import describe_error, words_of_failure
from paceline.watch.peers import Peers, forget_in_child, stop_talking
from paceline.watch.rank_page import (
    WAITING,
    Activity,
    Doing,
    Moment,
    PageAddress,
    RankPage,
    Sample,
    Told,
    own_namespace,
    start_time,
)
from paceline.watch.stacks import CodeLine, StackAnswers, encode, own_stack, users_line
from paceline.watch.stall import (
    Patience,
    RankStatus,
    Wait,
    describe_awaited,
    describe_end,
    describe_missing,
    describe_stall,
    missing_ranks,
)

# A wait is never told earlier, in seconds.
LEAST_SECONDS = 5.0
TICK_SECONDS = 1.0
# For how long after a failure other ranks and hosts are asked who has ended.
_BLAME_SECONDS, _BLAME_LOOK_SECONDS = 6.0, 0.1
# For how long a rank that has failed because of another one stays for other hosts.
_HEAR_SECONDS = 2.5
_EXIT_SECONDS = 1.0
# What gloo and NCCL say when the process at the other end is gone, or does not come.
_LOST_CONNECTION = re.compile(r"gloo|nccl|connection|timed out|broken pipe|\bclosed\b", re.IGNORECASE)
_log = logging.getLogger("paceline")


class Named(Protocol):
    """A parameter's slot, as far as it is needed here."""

    @property
    def name(self) -> str:
        """The parameter's name."""


class GroupWatch:
    """One wrapper's part in watching: what it does is written to the page.

    Args:
        page: this process's page; None if nobody watches.
        peers: the group's ranks.
        wrapper: a number of the wrapper that is the same on all ranks.
        rank: this rank's global number.
    """

    def __init__(self, page: RankPage | None, peers: Peers | None, wrapper: int, rank: int) -> None:
        self._page = page
        self._peers = peers
        self._wrapper = wrapper
        self.rank = rank
        self._slots: Sequence[Named] = ()

    def mark(self, activity: Activity, step: int) -> None:
        """Write what this rank does from now on."""
        if self._page is not None:
            self._page.mark(activity, self._wrapper, step)

    @contextlib.contextmanager
    def waiting(self, activity: Activity, step: int, *, then: Activity) -> Iterator[None]:
        """While entered, this rank waits for others; an error because of a missing rank says where it is."""
        self.wait(activity, step)
        after = Activity.OUTSIDE
        try:
            yield
            after = then
        except (RuntimeError, OSError) as error:
            if not is_of_missing_rank(error) or (missing := self.blame(error)) is None:
                raise
            awaited = describe_awaited(Doing(activity, step=step))
            stalled = StalledError(
                f"rank {self.rank} waited in vain for {awaited}; {describe_missing(missing)} "
                f"({words_of_failure(error)})"
            )
            stalled.is_late = isinstance(error, LateRankError)
            raise stalled from None
        finally:
            self.mark(after, step)

    def wait(self, activity: Activity, step: int) -> None:
        """This rank waits for others from now on."""
        _process.waits_in = self
        self.mark(activity, step)

    def wait_for_bucket(self, step: int, bucket: int, slots: Sequence[Named]) -> None:
        """This rank waits for a bucket from now on; the slots are what is in it."""
        if self._page is not None:
            self._slots = slots
            _process.waits_in = self
            self._page.mark(Activity.BUCKET, self._wrapper, step, bucket)

    def names(self, doing: Doing) -> list[str]:
        """The parameters that are waited for."""
        return [slot.name for slot in self._slots] if doing.activity is Activity.BUCKET else []

    def missing(self, doing: Doing, stack: Sequence[CodeLine] = ()) -> list[RankStatus]:
        """The ranks that this one waits for, with what they do."""
        return [] if self._peers is None else missing_ranks(doing, self._peers.statuses(stack))

    def are_buffers_awaited(self) -> bool:
        """Whether another rank waits for module buffers of this wrapper."""
        if self._peers is None:
            return False
        self.ask(4 * TICK_SECONDS)
        return any(
            each.activity is Activity.BUFFERS and each.wrapper == self._wrapper
            for each in self._peers.statuses()
        )

    def ask(self, seconds: float) -> None:
        """Have other hosts' words fetched for some time."""
        if self._peers is not None and (self._peers.is_spread or not self._peers.is_known):
            self._peers.ask(seconds)

    def blame(self, error: Exception) -> list[RankStatus] | None:
        """Because of which ranks a collective has failed; None if nobody watches.

        Unless ranks are only late, one has ended. It is looked for some seconds, because it may be on another
        host, which has to say so, or be silent for long enough.
        """
        if self._page is None or _process.is_silent or self._peers is None:
            return None
        doing = self._page.doing()
        until = time.monotonic() + (0.0 if _is_late(error) else _BLAME_SECONDS)
        self.ask(_BLAME_SECONDS)
        while True:
            others = self._peers.statuses()
            missing = missing_ranks(doing, others)
            if any(each.is_gone for each in missing) or time.monotonic() > until:
                break
            blamed = {each.because_of for each in others}
            found = [each for each in missing if each.rank in blamed]  # by a rank that has looked too
            # That rank may have heard of its host already, and this one not yet.
            if found and all(each.activity is not None for each in found):
                missing = found
                break
            time.sleep(_BLAME_LOOK_SECONDS)
        culprit = missing[0].rank if missing else -1
        self._page.tell(Told(Moment.FAILED, culprit, doing.since, describe_missing(missing)))
        self.ask(_BLAME_SECONDS)  # other hosts need to know it too
        return missing

    @property
    def is_spread(self) -> bool:
        """Whether there are ranks on other hosts."""
        return self._peers is not None and self._peers.is_spread


# What a group has that is not watched.
UNWATCHED = GroupWatch(None, None, 0, 0)


class _ProcessWatch:
    """This process's page and thread, and the groups that it watches."""

    def __init__(self) -> None:
        self.page: RankPage | None = None
        self.waits_in: GroupWatch | None = None
        self.is_silent = False
        self._groups: weakref.WeakSet[GroupWatch] = weakref.WeakSet()
        self._answers: StackAnswers | None = None
        self._thread: threading.Thread | None = None
        self._is_exiting = threading.Event()
        self._patience = Patience(LEAST_SECONDS)
        self._stall: _LongWait | None = None
        self._lock = threading.Lock()

    def watch(
        self,
        rank: int,
        host: str,
        folder: Path | None,
        make_peers: Callable[[PageAddress], Peers],
        wrapper: int,
    ) -> GroupWatch:
        with self._lock:
            # Ranks that are threads of one process cannot be told apart.
            self.is_silent = self.is_silent or any(group.rank != rank for group in self._groups)
            if self.is_silent:
                return UNWATCHED
            if self.page is None or self.page.rank != rank:
                self._start(rank, folder)
            page, answers = self.page, self._answers
            assert page is not None
            assert answers is not None
        address = PageAddress(
            rank=rank,
            host=host,
            node=platform.node(),
            namespace=own_namespace(),
            pid=page.owner,
            started=start_time(page.owner) or 0,
            page=page.path,
            stacks=answers.path,
            signal=answers.signal or 0,
        )
        group = GroupWatch(page, make_peers(address), wrapper, rank)
        self._groups.add(group)
        return group

    def leave_groups(self) -> None:
        with self._lock:
            self._groups.clear()
            self.waits_in = None
            if self.page is not None:
                self.page.tell(Told())

    def _start(self, rank: int, folder: Path | None) -> None:
        self.page = RankPage(rank, folder)
        if self._answers is not None:
            self._answers.stop()
        self._answers = StackAnswers(rank, folder)
        self._patience = Patience(LEAST_SECONDS)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-watcher", daemon=True)
            self._thread.start()
        elif self._thread.native_id is not None:
            self.page.write_header(watcher=self._thread.native_id)

    def _run(self) -> None:
        if self.page is not None:
            self.page.write_header(watcher=threading.get_native_id())
        while True:
            # Nothing that goes wrong here may end the training, nor fill its log.
            with contextlib.suppress(Exception):
                self._tick()
            if self._is_exiting.wait(TICK_SECONDS):
                self._leave()
                return

    def _leave(self) -> None:
        """The interpreter exits."""
        if self.page is not None:
            self._end_stall(self.page)
            if self.page.told.moment is Moment.NOTHING:
                self.page.tell(Told(Moment.EXITED, since=time.monotonic_ns(), text=_what_has_ended_us()))

    def _tick(self) -> None:
        page = self.page
        if page is None:
            return
        now, doing = time.monotonic_ns(), page.doing()
        usual = int(self._patience.usual_step * 1e9)
        page.beat(now, usual_step=usual, thread=_system_thread(doing.thread))
        stack = own_stack([doing.thread, threading.main_thread().ident or 0])
        page.write_stack(now, encode(stack))
        if page.told.moment is Moment.FAILED and _goes_on(doing, page.told):
            page.tell(Told())
        line = users_line(stack)
        page.add_sample(
            Sample(now, doing.activity, doing.step, doing.bucket, "" if line is None else str(line))
        )
        if doing.activity in WAITING:
            self._look(page, doing, stack)
        else:
            self._end_stall(page)
            self._patience.see(doing.step, now / 1e9)

    def _look(self, page: RankPage, doing: Doing, stack: Sequence[CodeLine]) -> None:
        """While this rank waits: tell who is missing, if it is time for that."""
        if self._stall is not None and self._stall.doing.since != doing.since:
            self._end_stall(page)
        group, seconds = self.waits_in, (time.monotonic_ns() - doing.since) / 1e9
        if group is None or self.is_silent:
            return
        least = self._patience.least_seconds(doing)
        # Soon: a connection may be lost before the wait is told. But many ranks wait while models are loaded.
        if seconds > (least / 2 if doing.activity is Activity.WRAPPING else TICK_SECONDS):
            group.ask(4 * TICK_SECONDS)
        if seconds < least:
            return
        stall = self._stall = self._stall or _LongWait(doing)
        if seconds < stall.next_seconds:
            return
        stall.missing = group.missing(doing, stack)
        if seconds >= self._patience.seconds(doing, stall.missing) and page.doing() == doing:
            stall.next_seconds = 2 * seconds
            stall.tell(page, Wait(page.rank, doing, seconds, group.names(doing)))

    def _end_stall(self, page: RankPage) -> None:
        stall, self._stall = self._stall, None
        if stall is None:
            return
        seconds = (page.doing().since - stall.doing.since) / 1e9
        self._patience.learn_end(stall.missing, seconds)
        # Otherwise this rank has failed, and its error says more.
        if page.told is stall.told and stall.told.moment is Moment.STALLED:
            page.tell(Told())
            _log.warning("paceline: %s", describe_end(Wait(page.rank, stall.doing, seconds), stall.told))

    def stop(self) -> None:
        if self.page is not None and self.page.told.moment is Moment.FAILED and self._is_spread():
            # Before connections are lost, ranks of other hosts have to hear which rank is the cause.
            time.sleep(_HEAR_SECONDS)
        self._is_exiting.set()
        if self._thread is not None:
            self._thread.join(_EXIT_SECONDS)
        stop_talking(_EXIT_SECONDS)

    def _is_spread(self) -> bool:
        return any(group.is_spread for group in self._groups)

    def forget_in_child(self) -> None:
        """In a forked child, which is no rank."""
        if self.page is not None:
            self.page.become_private()
        if self._answers is not None:
            self._answers.stop()


class _LongWait:
    """A wait that takes long."""

    def __init__(self, doing: Doing) -> None:
        self.doing = doing
        self.missing: list[RankStatus] = []
        self.next_seconds = 0.0
        self.told = Told()

    def tell(self, page: RankPage, wait: Wait) -> None:
        culprit = self.missing[0].rank if self.missing else -1
        self.told = Told(Moment.STALLED, culprit, self.doing.since, describe_missing(self.missing))
        page.tell(self.told)
        _log.warning("paceline: %s", describe_stall(wait, self.missing))


_process = _ProcessWatch()
atexit.register(lambda: _process.stop())


def _in_forked_child() -> None:
    """A forked child is no rank, unless it becomes one by itself."""
    global _process
    _process.forget_in_child()
    _process = _ProcessWatch()
    forget_in_child()


os.register_at_fork(after_in_child=_in_forked_child)


def watch_group(
    *, rank: int, host: str, folder: Path | None, make_peers: Callable[[PageAddress], Peers], wrapper: int
) -> GroupWatch:
    """Watch this rank's part in a group.

    Args:
        rank: the global rank.
        host: a text that is the same for all ranks of one host.
        folder: where ranks record, if they do.
        make_peers: makes the group's peers, given where this rank's page is.
        wrapper: a number of the wrapper that is the same on all ranks.
    """
    return _process.watch(rank, host, folder, make_peers, wrapper)


def change_activity(activity: Activity) -> None:
    """Write another activity of the step that this rank is in."""
    if _process.page is not None:
        _process.page.change(activity)


def _goes_on(doing: Doing, failed: Told) -> bool:
    """Whether a rank that has raised because of another one has begun another step."""
    is_in_step = doing.activity is Activity.FORWARD or doing.activity in WAITING
    return is_in_step and doing.since > failed.since


def is_of_missing_rank(error: Exception) -> bool:
    """Whether a collective has failed because another rank has ended, or has not come."""
    if isinstance(error, (LostRankError, LateRankError)):
        return True
    if isinstance(error, PacelineError):
        return isinstance(error, CollectiveError) and error.what != str(error)
    return _LOST_CONNECTION.search(str(error)) is not None


def _is_late(error: Exception) -> bool:
    """Whether a collective has failed though no rank need have ended."""
    is_timeout = "timed out" in str(error).lower()
    return is_timeout or isinstance(error, (LateRankError, UnmatchedError, ClosedGroupError))


def leave_groups() -> None:
    """This rank goes on in other groups, perhaps under another number: forget what was told of the old."""
    _process.leave_groups()


_ended_by = ""


def note_end(error: BaseException) -> None:
    """Note that an exception ends this rank, if it is one: a launcher has caught it and is about to exit."""
    global _ended_by
    _ended_by = describe_error(error)


def _what_has_ended_us() -> str:
    """The exception that nobody else caught, when the interpreter exits; empty if there was none."""
    error = getattr(sys, "last_value", None)
    return _ended_by if error is None else describe_error(error)


def _system_thread(ident: int) -> int:
    """The system's number of a thread, by Python's; 0 if it is not known."""
    found: list[Any] = [thread.native_id for thread in threading.enumerate() if thread.ident == ident]
    return int(found[0] or 0) if found else 0
