"""One step's buckets on their way: launched, landed, with the waybill in the last or beside it."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.errors import HookError, StalledError, StepError
from paceline.hooks.exchange import Bucket, Exchange
from paceline.reducer import verdict
from paceline.reducer.fleet import Fleet
from paceline.reducer.times import Times
from paceline.reducer.waybill import Outcome, Report, Summary


class Flight:
    """Owns what one step has in flight.

    Args:
        fleet: the buckets.
        exchange: how they are averaged.
        group: among whom.
        step: the step's number, for errors.
        times: where launches and landings are stamped.

    Attributes:
        pending: launched buckets, by number.
    """

    def __init__(
        self,
        fleet: Fleet,
        exchange: Exchange,
        group: Group,
        step: int,
        times: Times,
    ) -> None:
        self._fleet = fleet
        self._exchange = exchange
        self._group = group
        self._step = step
        self._times = times
        self._outcome = Outcome.FINE
        self._hook_is_broken = False
        self._owes_waybill = False
        self.pending: dict[int, Pending] = {}

    def launch(self, number: int, report: Callable[[], Report] = Report) -> None:
        """Send a full bucket; the report is asked for if it is the one that carries the waybill."""
        self._times.launched()
        bucket = self._fleet.buckets[number]
        is_carrier = number == self._fleet.plan.carrier
        if is_carrier and self._exchange.carries_waybill:
            self._write_waybill(report)
        if bucket.slots or self._exchange.carries_waybill:
            self._hook_is_broken = True  # unless it returns
            self.pending[number] = self._exchange.launch(bucket, number, is_last=is_carrier)
            self._hook_is_broken = False

    def launch_nothing(self, outcome: Outcome) -> None:
        """Send zeros for every bucket that has not left, with word of why.

        Collectives of a hook that raises cannot be matched: then the other ranks wait for their timeout.
        """
        if self._hook_is_broken:
            return
        self._outcome = outcome
        for number, bucket in enumerate(self._fleet.buckets):
            if number not in self.pending:
                bucket.zero()
                self.launch(number)
        self._owes_waybill = not self._exchange.carries_waybill

    def land_all(self, *, hand_out: bool) -> HookError | None:
        """Wait for every bucket; a hook's mistake is returned, so that the other ranks can be told of it."""
        mistake = None
        for number, pending in self.pending.items():
            bucket = self._fleet.buckets[number]
            try:
                self._land(bucket, number, pending)
                if hand_out:
                    bucket.hand_out()
            except HookError as error:
                mistake = mistake or error
                self._outcome = Outcome.RAISED_IN_BACKWARD
        return mistake

    def read_waybill(self, report: Callable[[], Report]) -> Summary:
        """What all ranks said of the step; the report is asked for if the waybill goes beside the buckets."""
        if not self._exchange.carries_waybill:
            # Not before the hooks are done: theirs may be chains of collectives, which must not be cut into.
            self._exchange_waybill(report)
        self._times.landed()
        return self._fleet.waybill.read(self._fleet.tail)

    def average(self, bucket: Bucket, number: int) -> None:
        """Send one more bucket and wait for it."""
        self._land(bucket, number, self._exchange.launch(bucket, number, is_last=True))

    def settle(self) -> None:
        """Wait for what is left of a step that was lost: its storage is needed again."""
        for number, pending in self.pending.items():
            # A hook's mistake was told when it was made.
            with (
                contextlib.nullcontext() if self._exchange.carries_waybill else contextlib.suppress(Exception)
            ):
                self._land(self._fleet.buckets[number], number, pending)
        if self._owes_waybill:
            self._exchange_waybill(Report)

    def _write_waybill(self, report: Callable[[], Report]) -> None:
        fine = self._outcome is Outcome.FINE
        written = report() if fine else Report(outcome=self._outcome)
        self._fleet.waybill.write(self._fleet.tail, self._group.rank, written)

    def _exchange_waybill(self, report: Callable[[], Report]) -> None:
        self._write_waybill(report)
        carrier = self._fleet.plan.carrier
        with self._naming(self._fleet.buckets[carrier], carrier) as unusual:
            self._group.all_reduce(self._fleet.tail).wait(unusual)

    def _land(self, bucket: Bucket, number: int, pending: Pending) -> None:
        with self._naming(bucket, number) as unusual:
            self._exchange.land(bucket, number, pending, unusual)

    @contextlib.contextmanager
    def _naming(self, bucket: Bucket, number: int) -> Iterator[Callable[[], None]]:
        """Say which reduction failed, and who is missing."""
        try:
            yield partial(self._group.roll_call.post, self._step, number)
        except StepError:
            raise
        except RuntimeError as error:
            raise StalledError(verdict.stalled(bucket, number, self._step, self._group, error)) from error
