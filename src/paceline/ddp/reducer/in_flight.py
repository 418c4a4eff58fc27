"""One step's buckets in flight: launched, waited for, with the step report behind the last or beside them.

Note [Reports on the host]. Behind the gradients of an accelerator the report could be read only when the
device has done all of backward, so the host would wait for the device in each step, and could never queue the
next step meanwhile. There ranks add up their reports in host memory instead, as soon as each has issued its
backward. It costs a collective on the host, and none on the device.

Note [Giving up]. After the group's timeout a rank raises, though others may come later. They must lose the
step too, or parameters would differ from then on. So the rank changes its report, which says then that it has
raised. If it can no longer be changed, all ranks have come just now, and nobody has a reason to give up.

Note [Interrupted waits]. A signal handler, such as that of Ctrl-C, may raise while a rank waits. The others
have this rank's gradients already, and would end the step without it. So it gives up in the same way. If that
is too late, or on a process group where nothing can be changed, it ends the step first, and raises then.
"""

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from paceline.comm.group import Group
from paceline.comm.pending import OnSlow, Pending, is_of_collective
from paceline.ddp.buckets.bucket_set import Bucket, BucketSet
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.reducer.report_checks import check_reports
from paceline.ddp.reducer.step_report import LOST, RankReport, ReportLayout, StepOutcome, StepSummary
from paceline.errors import (
    BrokenHookError,
    CollectiveError,
    HookError,
    LateRankError,
    PeerError,
    StalledError,
    StepError,
)
from paceline.recording.recorder import Recorder
from paceline.watch.error_words import describe_error, words_of_failure
from paceline.watch.rank_page import Activity
from paceline.watch.stall import describe_missing, shorten_names
from paceline.watch.watcher import is_of_missing_rank

# How long a rank that has an exception to raise waits for the others, in seconds.
_GIVE_UP_SECONDS = 5.0
# How long a rank that was interrupted waits for the step's end, if it cannot give the step up.
_INTERRUPTED_SECONDS = 1.0


class _UnheardError(StepError):
    """The other ranks have not come to where this one gave up."""


class InFlight:
    """Owns what one step has launched.

    Args:
        bucket_set: the buckets.
        layout: of the step report.
        exchange: how buckets are averaged.
        group: the ranks.
        step: the step's number, for errors.
        recorder: records launches and ends.

    Attributes:
        launched: buckets in flight, by number.
        outcome: how this rank's step goes.
        mistake: a hook's first mistake; the other ranks are told of it.
        interrupt: what a signal handler raised while the step could no longer be given up.
        broken: why this rank or another can no longer follow the others' collectives.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        layout: ReportLayout,
        exchange: Exchange,
        group: Group,
        step: int,
        recorder: Recorder,
    ) -> None:
        self._bucket_set = bucket_set
        self._layout = layout
        self._exchange = exchange
        self._group = group
        self._step = step
        self._recorder = recorder
        self._deadline = math.inf
        self._report: Pending | None = None
        self.launched: dict[int, Pending] = {}
        self.outcome = StepOutcome.FINE
        self.mistake: HookError | None = None
        self.interrupt: BaseException | None = None
        self.broken: str | None = None

    def begin(self, weight: float | None, ranks: int) -> None:
        """Tell the exchange that a step begins."""
        with self._breaking_off(self._bucket_set.buckets[0], 0):
            self._exchange.begin(weight, ranks)

    def launch(self, number: int, report: RankReport | None = None) -> None:
        """Launch a bucket, with this rank's report if it is the report's bucket."""
        self._recorder.launched(number)
        bucket, plan = self._bucket_set.buckets[number], self._bucket_set.plan
        in_bucket = self._bucket_set.report_in_bucket
        if number == plan.report_bucket and in_bucket:
            self._write_report(report)
        if bucket.slots or in_bucket:
            is_last = number == plan.last_with_slots
            with self._breaking_off(bucket, number):
                self.launched[number] = self._exchange.launch(bucket, number, is_last=is_last)

    @property
    def has_room(self) -> bool:
        """Whether another bucket may be launched now."""
        return not self._exchange.one_at_a_time or all(each.done() for each in self.launched.values())

    def wait_for_room(self) -> None:
        """Wait until another bucket may be launched."""
        if not self.has_room:
            number, pending = next(reversed(self.launched.items()))
            with self._naming(self._bucket_set.buckets[number], number) as on_slow, _errors_come_later():
                pending.wait(on_slow)

    def finished(self) -> Iterator[Bucket]:
        """Wait for every bucket in launch order; gives each as soon as it holds its result.

        A hook's mistake is kept in ``mistake``, because the other ranks have to be told first.
        """
        for number, pending in self.launched.items():
            bucket = self._bucket_set.buckets[number]
            wait = partial(self._exchange.wait, bucket, number, pending)
            try:
                try:
                    with self._naming(bucket, number) as on_slow:
                        wait(on_slow)
                except BaseException as error:
                    self._raise_or_wait(error, bucket, number, wait)
            except BrokenHookError:
                raise
            except HookError as error:
                self._group.peer_notes.note_reason(self._step, repr(error))
                self.mistake = self.mistake or error
                self.outcome = StepOutcome.RAISED_IN_BACKWARD
            else:
                self._recorder.reduced(number)
                yield bucket

    def read_report(self, report: RankReport | None) -> StepSummary:
        """What all ranks said of the step; ``report`` is this rank's, if it travels beside the buckets."""
        if not self._bucket_set.report_in_bucket:
            # Not before the hooks are done: theirs may be chains of collectives, which must not be cut into.
            self._exchange_report(report)
        self._recorder.all_reduced()
        return self._layout.read(self._bucket_set.report)

    def average(self, bucket: Bucket, number: int) -> None:
        """Launch one more bucket and wait for it; a hook's mistake is kept in ``mistake``."""
        try:
            with self._breaking_off(bucket, number):
                pending = self._exchange.launch(bucket, number, is_last=True)
            wait = partial(self._exchange.wait, bucket, number, pending)
            self._wait(bucket, number, wait, after_report=pending)
        except BrokenHookError:
            raise
        except HookError as error:  # raised when all ranks are through
            self.mistake = self.mistake or error

    def confirm(self) -> None:
        """Raise on every rank if a hook made a mistake on some rank after the report had been read."""
        if self._exchange.carries_report:
            return
        if self._group.may_change:  # see Note [Ranks that change]
            if self.mistake is not None:
                raise self.mistake
            return
        if self.mistake is not None:
            self._group.peer_notes.note_reason(self._step, repr(self.mistake))
        failed = torch.zeros(self._group.size, device=self._bucket_set.report.device)
        failed[self._group.rank] = self.mistake is not None
        pending = self._sum_reports(failed)
        self._wait_for_report(pending.wait, after_report=pending)
        if self.mistake is not None:
            raise self.mistake
        lost = {rank: StepOutcome.RAISED_IN_BACKWARD for rank, count in enumerate(failed.tolist()) if count}
        check_reports(StepSummary(used=[], lost=lost), self._group, self._step)

    @property
    def has_begun(self) -> bool:
        """Whether other ranks may have heard of the step."""
        return bool(self.launched) or self.broken is not None

    def launch_zeros(self, outcome: StepOutcome) -> None:
        """Launch zeros for every bucket that is not launched, and report why.

        A hook may need several collectives, and has to hear the other ranks for each. They are waited for,
        but not for long: this rank has an exception to raise. What is left then is for the next forward.
        """
        self.outcome = outcome
        if self._exchange.carries_report:
            self._launch_rest()
            if not self._bucket_set.report_in_bucket:
                self._launch_report(None)
            return
        self._deadline = time.monotonic() + _GIVE_UP_SECONDS
        try:
            with contextlib.suppress(_UnheardError):
                self.wait_for_remaining()
        finally:
            self._deadline = math.inf

    def wait_for_remaining(self) -> None:
        """Wait for what is left of a step that was lost: its storage is needed again."""
        if self.broken is not None and not self._group.may_change:
            self._refuse_to_go_on()
        is_all_launched = (
            self._bucket_set.report_in_bucket and self._bucket_set.plan.report_bucket in self.launched
        )
        if self.outcome in LOST and not is_all_launched:
            self._launch_rest()
        for number, pending in self.launched.items():
            bucket = self._bucket_set.buckets[number]
            # The other ranks were told of a hook's mistake when it was made.
            with contextlib.suppress(HookError), self._naming(bucket, number) as on_slow:
                pending.wait(on_slow)
        if self.outcome in LOST and not self._bucket_set.report_in_bucket:
            self._exchange_report(None)

    def _launch_rest(self) -> None:
        for number, bucket in enumerate(self._bucket_set.buckets):
            if number not in self.launched:
                bucket.zero()
                self.wait_for_room()
                self.launch(number)

    def _write_report(self, report: RankReport | None) -> None:
        if report is None or self.outcome is not StepOutcome.FINE:
            report = RankReport(outcome=self.outcome)
        self._layout.write(self._bucket_set.report, self._group.rank, report)

    def _exchange_report(self, report: RankReport | None) -> None:
        self._wait_for_report(self._launch_report(report).wait)

    def _launch_report(self, report: RankReport | None) -> Pending:
        if self._report is None:
            self._write_report(report)
            self._report = self._sum_reports(self._bucket_set.report)
        return self._report

    def _sum_reports(self, tensor: torch.Tensor) -> Pending:
        group = self._group
        return (
            group.all_reduce_on_host(tensor) if self._bucket_set.report_on_host else group.all_reduce(tensor)
        )

    def _wait_for_report(
        self, wait: Callable[[OnSlow], object], *, after_report: Pending | None = None
    ) -> None:
        number = self._bucket_set.plan.report_bucket
        self._wait(self._bucket_set.buckets[number], number, wait, after_report=after_report)

    def _wait(
        self,
        bucket: Bucket,
        number: int,
        wait: Callable[[OnSlow], object],
        *,
        after_report: Pending | None = None,
    ) -> None:
        """Wait for a reduction, which is ``after_report`` if the ranks have read the report already."""
        try:
            with self._naming(bucket, number) as on_slow:
                wait(on_slow)
        except BaseException as error:
            self._raise_or_wait(error, bucket, number, wait, after_report=after_report)

    def _raise_or_wait(
        self,
        error: BaseException,
        bucket: Bucket,
        number: int,
        wait: Callable[[OnSlow], object],
        *,
        after_report: Pending | None = None,
    ) -> None:
        """After a wait has raised: have all ranks lose the step, and raise; wait again if all have come."""
        if isinstance(error, StalledError):
            is_over = not error.is_late or self._give_up(repr(error), after_report)
        else:
            is_over = isinstance(error, StepError) or not self._may_end_despite(error, number, after_report)
        if is_over:
            raise error
        with self._naming(bucket, number) as on_slow, self._breaking_off(bucket, number):
            wait(on_slow)

    def _may_end_despite(self, error: BaseException, number: int, after_report: Pending | None) -> bool:
        """Whether to end the step, as all others do, before an exception is raised: [Interrupted waits]."""
        if isinstance(error, SystemExit):  # the others will see that this rank has ended
            return False
        if self.interrupt is not None or not self._exchange.carries_report:
            self._break_off(number, error)
            return False
        words = describe_error(error, inspect.currentframe())
        if after_report is None and self._group.shared is not None and self._give_up(words, None):
            return False
        self.interrupt = error
        self._deadline = time.monotonic() + _INTERRUPTED_SECONDS
        return True

    def _give_up(self, reason: str, after_report: Pending | None) -> bool:
        """Have every rank lose the step; False if all ranks have come to it."""
        if after_report is not None:
            return self._group.give_up(after_report)
        self._group.peer_notes.note_reason(self._step, reason)
        outcome, self.outcome = self.outcome, StepOutcome.RAISED_IN_BACKWARD
        in_bucket = self._bucket_set.report_in_bucket
        report = self.launched.get(self._bucket_set.plan.report_bucket) if in_bucket else self._report
        # Otherwise the report has yet to be launched, and will say it.
        if report is not None and not self._group.change(report, partial(self._write_report, None)):
            self.outcome = outcome
            return False
        return True

    @contextlib.contextmanager
    def _naming(self, bucket: Bucket, number: int) -> Iterator[Callable[[], None]]:
        """Say which reduction failed, and who is missing."""
        self._group.watch.wait_for_bucket(self._step, number, bucket.slots)
        try:
            yield partial(self._on_slow, number)
        except BrokenHookError as error:
            self._break_off(number, error)
            raise
        except StepError:
            raise
        except (RuntimeError, OSError) as error:
            if not is_of_collective(error):
                raise
            tells = isinstance(error, CollectiveError) and not isinstance(error, LateRankError)
            raise self._stalled(bucket, number, error, tells=tells) from None
        finally:
            self._group.watch.mark(Activity.BACKWARD, self._step)

    def _stalled(self, bucket: Bucket, number: int, error: Exception, *, tells: bool) -> StalledError:
        """The error for a reduction that has failed, or did not end, because of another rank.

        It replaces the collective's error, which names ranks that may only wait themselves.

        Args:
            bucket: what was to be reduced.
            number: its number.
            error: the collective's error.
            tells: whether to leave a note for ranks of other hosts, which cannot see what happens here.
        """
        seen = self._group.watch.blame(error)
        if seen is None:
            why = f"{self._notes_of_missing(number)} ({error})"
        else:
            why = f"{describe_missing(seen)} ({words_of_failure(error)})"
        if tells:
            self._group.peer_notes.note_missing(self._step, why)
            self._group.peer_notes.note_stopped(self._step, f"bucket {number}")
        names = shorten_names([slot.name for slot in bucket.slots])
        stalled = StalledError(
            f"bucket {number} ({', '.join(names)}) of step {self._step} was not reduced on rank "
            f"{self._group.global_rank}; {why}"
        )
        stalled.is_late = isinstance(error, LateRankError)
        return stalled

    def _notes_of_missing(self, number: int) -> str:
        notes = self._group.peer_notes
        if not notes.can_be_left:
            return "some rank has not come to it, and the group has no store that could tell which"
        missing = self._group.name_ranks(notes.missing(self._step, number))
        if not missing:
            return "every rank has come to it"
        such = "such a rank ran no backward in this step, is still in it, or has died"
        return f"ranks that have not come to it: {missing}; {such}"

    def _name(self, rank: int) -> int:
        """A rank as users know it."""
        return self._group.global_ranks[rank]

    def _on_slow(self, number: int) -> None:
        """A wait takes long: say so to the others, and see whether another rank has given up."""
        if time.monotonic() > self._deadline:
            if self.interrupt is not None:
                raise self.interrupt
            raise _UnheardError(f"no word from the other ranks (step: {self._step}, bucket: {number})")
        self._group.check_current()
        notes = self._group.peer_notes
        notes.note_waiting(self._step, number)
        lost = "the step is lost on every rank, and its gradients are dropped"
        for rank in notes.stopped(self._step):
            if (missing := notes.said_missing(self._step, rank)) is not None:
                self.broken = f"step {self._step}: {missing}"
                notes.note_stopped(self._step, f"waiting for bucket {number}")
                raise StalledError(f"{self.broken}; {lost} (here: rank {self._group.global_rank})")
            why = notes.reason(self._step, rank)
            if why is None:  # that rank only heard of another's exception, as this one is about to
                continue
            self.broken = f"rank {self._name(rank)} raised {why} of step {self._step}"
            notes.note_stopped(self._step, f"waiting for bucket {number}")
            raise PeerError(
                f"{self.broken}; {lost} (here: rank {self._group.global_rank}, waiting for bucket {number})"
            )

    @contextlib.contextmanager
    def _breaking_off(self, bucket: Bucket, number: int) -> Iterator[None]:
        """If a hook raises, its next collectives are not launched: tell the other ranks."""
        try:
            yield
        except BaseException as error:
            # What was launched before may have failed meanwhile.
            if isinstance(error, CollectiveError) and is_of_missing_rank(error):
                stalled = self._stalled(bucket, number, error, tells=True)
                self.broken = str(stalled)
                raise stalled from None
            self._break_off(number, error)
            raise

    def _break_off(self, number: int, error: BaseException) -> None:
        where = "reduction of" if self._exchange.carries_report else "hook for"
        words = describe_error(error, inspect.currentframe())
        self.broken = f"{words} in the {where} bucket {number}"
        self._group.peer_notes.note_reason(self._step, self.broken)
        self._group.peer_notes.note_stopped(self._step, f"bucket {number}")

    def _refuse_to_go_on(self) -> None:
        """Raise unless every rank stopped at the same point, so that nobody waits for anyone."""
        points = self._group.peer_notes.wait_until_all_stopped(self._step)
        if len(points) < self._group.size or len({*points.values()}) > 1:
            raise StepError(
                f"the ranks' collectives no longer match: {self.broken}. Make a new process group, and give "
                "it to _update_process_group, and to the hook if there is one "
                f"(step: {self._step}, rank: {self._group.global_rank})"
            )


@contextlib.contextmanager
def _errors_come_later() -> Iterator[None]:
    try:
        yield
    except (PeerError, StalledError, _UnheardError):
        raise
    except Exception:  # noqa: S110  # a hook's future raises it again when its bucket is waited for
        pass
