"""From what the ranks said of a step to everyone's averaged gradients."""

from collections.abc import Sequence

from paceline.ddp.buckets.plan import BucketCaps, make_plan
from paceline.ddp.exchange.exchange import Bucket
from paceline.ddp.reducer.bucket_set import Fleet
from paceline.ddp.reducer.in_flight import Flight
from paceline.ddp.reducer.step_report import Summary
from paceline.errors import BrokenHookError, HookError

_UNCAPPED = BucketCaps((2**63,))


class Settlement:
    """Hands out what had to wait for the waybill, and reduces what its buckets left without.

    Args:
        fleet: the step's buckets, which have come back.
        flight: sends one bucket more.
        summary: what the ranks said.
        gain: the sum over the ranks, divided by what comes back for it.
    """

    def __init__(self, fleet: Fleet, flight: Flight, summary: Summary, *, gain: float) -> None:
        self._fleet = fleet
        self._flight = flight
        self._summary = summary
        total = summary.total_weight
        # Weighed contributions are divided only now, because only now it is known by what.
        self._scale = None if total is None else gain / total if total else 0.0
        self._mistake: HookError | None = None

    def hand_out(self, *, late: bool) -> None:
        """Give parameters their averages: all of them, or those that this rank did not use itself."""
        for bucket in self._fleet.buckets:
            if self._scale is not None:
                bucket.scale(self._scale)
            if late:
                bucket.hand_out()
            bucket.settle(self._summary.used)

    def add(self, number: int, more: Bucket) -> None:
        """Reduce what came too late for a bucket, and add it to what was handed out."""
        self._average(more, number)
        self._fleet.buckets[number].add(more)  # type: ignore[arg-type]  # of the same kind

    def thaw(self, outside: Sequence[int], factor: float, used: bytearray, *, as_views: bool) -> None:
        """Reduce the gradients of slots that the plan has no bucket for, if some rank used them."""
        thawed = [slot for slot in outside if self._summary.used[slot]]
        for members in make_plan(self._fleet.slots, thawed, _UNCAPPED).buckets:
            if members:
                bucket = self._fleet.bucket(members, as_views=as_views)
                bucket.fill(factor, used, complete=False)
                self._average(bucket, len(self._fleet.buckets))
                bucket.hand_out()
                bucket.settle(self._summary.used)

    def confirm(self) -> None:
        """Raise on every rank if a hook made a mistake in here on some rank."""
        if self._summary.late or self._summary.thawed:
            self._flight.confirm(self._mistake)

    def _average(self, bucket: Bucket, number: int) -> None:
        try:
            self._flight.average(bucket, number)
        except BrokenHookError:
            raise
        except HookError as error:  # told when all ranks are through
            self._mistake = self._mistake or error
        if self._scale is not None:
            bucket.scale(self._scale)
