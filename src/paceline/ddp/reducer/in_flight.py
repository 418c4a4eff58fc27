"""One step's buckets on their way: launched, landed, with the waybill in the last or beside it."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.ddp.exchange.exchange import Bucket, Exchange
from paceline.ddp.reducer import verdict
from paceline.ddp.reducer.bucket_set import Fleet
from paceline.ddp.reducer.step_report import RAISED, Outcome, Report, Summary
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

# So many seconds the others are waited for by a rank that has an exception to raise.
_PATIENCE = 5.0


class _UnheardError(StepError):
    """The other ranks have not come to where this one gave up."""


class Flight:
    """Owns what one step has in flight.

    Args:
        fleet: the buckets.
        exchange: how they are averaged.
        group: among whom.
        step: the step's number, for errors.
        recorder: stamps launches and landings.

    Attributes:
        pending: launched buckets, by number.
        broken: why this rank or another can no longer follow the others' collectives.
    """

    def __init__(
        self,
        fleet: Fleet,
        exchange: Exchange,
        group: Group,
        step: int,
        recorder: Recorder,
    ) -> None:
        self._fleet = fleet
        self._exchange = exchange
        self._group = group
        self._step = step
        self._recorder = recorder
        self._outcome = Outcome.FINE
        self.broken: str | None = None
        self._deadline = math.inf
        self._waybill: Pending | None = None
        self.pending: dict[int, Pending] = {}

    def begin(self, weight: float | None, ranks: int) -> None:
        """Tell the exchange of the step."""
        try:
            self._exchange.begin(weight, ranks)
        except BaseException as error:
            self._break_off(0, error)
            raise

    def launch(self, number: int, report: Callable[[], Report] = Report) -> None:
        """Send a full bucket; the report is asked for if it is the one that carries the waybill."""
        self._recorder.launched(number)
        bucket = self._fleet.buckets[number]
        is_carrier = number == self._fleet.plan.carrier
        if is_carrier and self._exchange.carries_waybill:
            self._write_waybill(report)
        if bucket.slots or self._exchange.carries_waybill:
            self.pending[number] = self._launch(bucket, number, is_last=number == self._fleet.plan.last)

    def _launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:
        try:
            return self._exchange.launch(bucket, number, is_last=is_last)
        except BaseException as error:
            self._break_off(number, error)
            raise

    def shadow(self) -> None:
        """Say in the waybill that this rank has nothing left to contribute."""
        self._outcome = Outcome.EXHAUSTED

    @property
    def is_shadow(self) -> bool:
        """Whether this rank has nothing to contribute."""
        return self._outcome is Outcome.EXHAUSTED

    @property
    def has_room(self) -> bool:
        """Whether another bucket may leave now."""
        return not self._exchange.serial or all(pending.done() for pending in self.pending.values())

    def make_room(self) -> None:
        """Wait until another bucket may leave."""
        if not self.has_room:
            number, pending = next(reversed(self.pending.items()))
            with (
                self._naming(self._fleet.buckets[number], number) as unusual,
                _leaving_errors_to_the_landing(),
            ):
                pending.wait(unusual)

    def launch_nothing(self, outcome: Outcome) -> None:
        """Send zeros for every bucket that has not left, with word of why.

        A hook may need several rounds, for each of which it must hear the other ranks. They are waited for,
        but not for long: an exception is on its way here. What is left then is for the next forward.
        """
        self._outcome = outcome
        if self._exchange.carries_waybill:
            self._launch_rest()
            return
        self._deadline = time.monotonic() + _PATIENCE
        try:
            with contextlib.suppress(_UnheardError):
                self.settle()
        finally:
            self._deadline = math.inf

    def _launch_rest(self) -> None:
        for number, bucket in enumerate(self._fleet.buckets):
            if number not in self.pending:
                bucket.zero()
                self.make_room()
                self.launch(number)

    def land_all(self, *, hand_out: bool) -> HookError | None:
        """Wait for every bucket; a hook's mistake is returned, so that the other ranks can be told of it."""
        mistake = None
        for number, pending in self.pending.items():
            bucket = self._fleet.buckets[number]
            try:
                self._land(bucket, number, pending)
                self._recorder.reduced(number)
                if hand_out:
                    bucket.hand_out()
            except BrokenHookError:
                raise
            except HookError as error:
                self._group.roll_call.tell_why(self._step, repr(error))
                mistake = mistake or error
                self._outcome = Outcome.RAISED_IN_BACKWARD
        return mistake

    def read_waybill(self, report: Callable[[], Report]) -> Summary:
        """What all ranks said of the step; the report is asked for if the waybill goes beside the buckets."""
        if not self._exchange.carries_waybill:
            # Not before the hooks are done: theirs may be chains of collectives, which must not be cut into.
            self._exchange_waybill(report)
        self._recorder.all_reduced()
        return self._fleet.waybill.read(self._fleet.tail)

    def average(self, bucket: Bucket, number: int) -> None:
        """Send one more bucket and wait for it."""
        self._land(bucket, number, self._launch(bucket, number, is_last=True))

    def confirm(self, mistake: HookError | None) -> None:
        """Raise on every rank if a hook made a mistake on some rank after the waybill had been read."""
        if self._exchange.carries_waybill:
            return
        if mistake is not None:
            self._group.roll_call.tell_why(self._step, repr(mistake))
        failed = torch.zeros(self._group.size, device=self._fleet.tail.device)
        failed[self._group.rank] = mistake is not None
        carrier = self._fleet.plan.carrier
        with self._naming(self._fleet.buckets[carrier], carrier) as unusual:
            self._group.all_reduce(failed).wait(unusual)
        if mistake is not None:
            raise mistake
        raised = {rank: Outcome.RAISED_IN_BACKWARD for rank, count in enumerate(failed.tolist()) if count}
        verdict.check(Summary(used=[], raised=raised), self._step, self._group)

    def settle(self) -> None:
        """Wait for what is left of a step that was lost: its storage is needed again."""
        if self.broken is not None:
            self._refuse_to_go_on()
        if self._outcome in RAISED:
            self._launch_rest()
        for number, pending in self.pending.items():
            # A hook's mistake was told when it was made.
            with contextlib.suppress(HookError):
                self._land(self._fleet.buckets[number], number, pending)
        if self._outcome in RAISED and not self._exchange.carries_waybill:
            self._exchange_waybill(Report)

    def _write_waybill(self, report: Callable[[], Report]) -> None:
        written = report() if self._outcome is Outcome.FINE else Report(outcome=self._outcome)
        self._fleet.waybill.write(self._fleet.tail, self._group.rank, written)

    def _exchange_waybill(self, report: Callable[[], Report]) -> None:
        if self._waybill is None:
            self._write_waybill(report)
            self._waybill = self._group.all_reduce(self._fleet.tail)
        carrier = self._fleet.plan.carrier
        with self._naming(self._fleet.buckets[carrier], carrier) as unusual:
            self._waybill.wait(unusual)

    def _land(self, bucket: Bucket, number: int, pending: Pending) -> None:
        with self._naming(bucket, number) as unusual:
            self._exchange.land(bucket, number, pending, unusual)

    @contextlib.contextmanager
    def _naming(self, bucket: Bucket, number: int) -> Iterator[Callable[[], None]]:
        """Say which reduction failed, and who is missing."""
        try:
            yield partial(self._look_around, number)
        except BrokenHookError as error:
            self._break_off(number, error)
            raise
        except StepError:
            raise
        except RuntimeError as error:
            if isinstance(error, CollectiveError) and not isinstance(error, LateRankError):
                # Those of other hosts cannot see what has happened on this one.
                self._group.roll_call.tell_why(self._step, repr(error))
                self._group.roll_call.break_off(self._step, f"bucket {number}")
            raise StalledError(verdict.stalled(bucket, number, self._step, self._group, error)) from error

    def _look_around(self, number: int) -> None:
        """A wait takes long: say so, and see whether another rank has left."""
        if time.monotonic() > self._deadline:
            raise _UnheardError(f"no word from the other ranks (step: {self._step}, bucket: {number})")
        roll_call = self._group.roll_call
        roll_call.post(self._step, number)
        for rank in roll_call.broken(self._step):
            why = roll_call.why(self._step, rank)
            if why is None:  # that rank only heard of another's exception, as this one is about to
                continue
            reason = f"rank {rank} raised {why} of step {self._step}"
            self.broken = reason
            roll_call.break_off(self._step, f"waiting for bucket {number}")
            raise PeerError(
                f"{reason}; the step is lost on every rank, and its gradients are dropped "
                f"(here: rank {self._group.rank}, waiting for bucket {number})"
            )

    def _break_off(self, number: int, error: BaseException) -> None:
        self.broken = f"{error!r} in the hook for bucket {number}"
        roll_call = self._group.roll_call
        roll_call.tell_why(self._step, self.broken)
        roll_call.break_off(self._step, f"bucket {number}")

    def _refuse_to_go_on(self) -> None:
        """Raise unless every rank broke off at the same place, so that nobody waits for anyone."""
        places = self._group.roll_call.all_broken(self._step)
        if len(places) < self._group.size or len({*places.values()}) > 1:
            raise StepError(
                f"the ranks' collectives no longer match: {self.broken}, and only the hook knows what it "
                "would have sent. Make a new process group, and give it to the hook and to "
                f"_update_process_group (step: {self._step}, rank: {self._group.rank})"
            )


@contextlib.contextmanager
def _leaving_errors_to_the_landing() -> Iterator[None]:
    try:
        yield
    except (PeerError, StalledError, _UnheardError):
        raise
    except Exception:  # noqa: S110  # a hook's future raises it again when it is landed
        pass
