"""torch's logging data: what the reducer did, under torch's keys."""

from typing import Any

from paceline.ddp.reducer.reducer import Reducer

_FIRST_SAMPLED = 10
_AVERAGED = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


class Stats:
    """Samples run-time figures: of the first ten iterations each, then of every ``sample_rate``-th.

    Args:
        reducer: whose figures.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self.sample_rate = 100
        self._iteration = 0
        self._samples = 0
        self._sums = dict.fromkeys(_AVERAGED, 0)
        self.sampled: dict[str, Any] = {}
        self.joins_uneven_inputs = False

    def begin_forward(self) -> None:
        """A synced forward begins: what is known now is of the iteration before."""
        if self._iteration and (self._iteration <= _FIRST_SAMPLED or self._iteration % self.sample_rate == 0):
            self._sample()
        self._iteration += 1

    def _sample(self) -> None:
        reducer = self._reducer
        durations = reducer.recorder.durations()
        self._samples += 1
        for key in _AVERAGED:
            self._sums[key] += durations[key]
        self.sampled = {
            "iteration": self._iteration,
            **durations,
            **{f"avg_{key}": total // self._samples for key, total in self._sums.items()},
            **reducer.recorder.stamps(),
            **self._layout(),
        }

    def _layout(self) -> dict[str, Any]:
        reducer = self._reducer
        rebuilt = reducer.uses_rebuilt_plan
        # torch counts trainable parameters only.
        number = {slot: index for index, slot in enumerate(reducer.context.parameters.trainable)}
        figures: dict[str, Any] = {
            "num_buckets_reduced": reducer.launched,
            "has_rebuilt_buckets": int(rebuilt),
            "prev_iteration_grad_ready_order_indices": ", ".join(
                str(number[slot]) for slot in reducer.context.readiness.order if slot in number
            ),
        }
        if rebuilt:
            buckets = (
                " ".join(str(number[slot]) for slot in members if slot in number)
                for members in reducer.context.bucket_set.plan.buckets
            )
            figures["rebuilt_bucket_sizes"] = ", ".join(map(str, _sizes(reducer)))
            figures["rebuilt_per_bucket_param_indices"] = ", ".join(buckets)
        unused = reducer.context.readiness.unused(reducer.planner.order)
        slots = reducer.context.parameters.slots
        figures["unused_parameter_size"] = sum(slots[slot].nbytes for slot in unused)
        return figures


def _sizes(reducer: Reducer) -> list[int]:
    buckets = reducer.context.bucket_set.buckets
    return [sum(slot.nbytes for slot in bucket.slots) for bucket in buckets if bucket.slots]
