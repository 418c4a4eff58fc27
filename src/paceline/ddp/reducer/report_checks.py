"""Whether all ranks report the same step: raises, on every rank alike, if they do not."""

import warnings
import zlib
from collections.abc import Sequence

from paceline.comm.group import Group
from paceline.ddp.reducer.pairing import Pairing, StepCounts
from paceline.ddp.reducer.step_report import HOOK_NUMBERS, StepOutcome, StepSummary
from paceline.errors import MismatchError, MispairedError, PeerError, WeightsError


def check_reports(summary: StepSummary, group: Group, step: int) -> None:
    """Raise if a rank has lost the step, or if it was weighed on some ranks only."""
    for rank, outcome in summary.lost.items():
        raise PeerError(
            f"rank {group.global_ranks[rank]} {_what_was_lost(group, step, rank, outcome)}; the step is lost "
            f"on every rank, and its gradients are dropped (here: rank {group.global_rank})"
        )
    without = [
        rank
        for rank, weight in enumerate(summary.weights)
        if weight is None and rank not in {*summary.without_inputs, *summary.skipped}
    ]
    if without and summary.total_weight is not None:
        raise WeightsError(
            f"step {step} was weighed on some ranks only, and its gradients are dropped "
            f"(ranks without a weight: {group.name_ranks(without)})"
        )


def number_of_hook(signature: str) -> int:
    """A hook's number in the report, which has room for a small one; 0 for none."""
    return 1 + zlib.crc32(signature.encode()) % (HOOK_NUMBERS - 1) if signature else 0


def check_hooks(everyones: Sequence[int], signature: str, group: Group) -> None:
    """Raise on every rank if ranks average by different hooks; all have averaged without the plain average.

    Args:
        everyones: the number of each rank's hook; 0 where it is not known.
        signature: of this rank's.
        group: the ranks.
    """
    if len({*everyones} - {0}) <= 1:
        return
    signatures = group.gather_objects(signature)
    other = next(rank for rank, theirs in enumerate(signatures) if theirs != signatures[0])
    names = group.name_ranks([0, other])
    raise MismatchError(
        "ranks must average by the same hook; the step is lost on every rank "
        f"(rank {names[0]}: {signatures[0]}, rank {names[1]}: {signatures[other]})"
    )


def check_counts(
    everyones: Sequence[StepCounts | None], pairing: Pairing, summary: StepSummary, group: Group, step: int
) -> None:
    """Raise if ranks are in different steps of the user's loop; warn if in doubt.

    Args:
        everyones: what each rank's user has done since the last step; None where it is not known.
        pairing: compares them.
        summary: of the reports.
        group: the ranks.
        step: the step's number.
    """
    try:
        if not pairing.are_equal([own for own in everyones if own is not None]):
            _compare(everyones, pairing, summary, group, step)
    finally:
        without = summary.without_inputs
        pairing.without_inputs = frozenset(group.name_ranks(without) if without else ())


def _compare(
    everyones: Sequence[StepCounts | None], pairing: Pairing, summary: StepSummary, group: Group, step: int
) -> None:
    without = {*summary.without_inputs, *summary.skipped}
    counts = {
        group.global_ranks[rank]: own
        for rank, own in enumerate(everyones)
        if own is not None and rank not in without
    }
    if (refusal := pairing.refusal(counts)) is not None:
        raise MispairedError(
            f"{refusal} (step: {step}); the step is lost on every rank, and its gradients are dropped "
            f"(here: rank {group.global_rank})"
        )
    for difference in pairing.differences(counts):
        warnings.warn(
            f"ranks seem to be in different steps of the training loop (step: {step}): {difference}. Where a "
            "rank leaves out a batch, call skip() instead of forward and backward",
            stacklevel=2,
        )


def _what_was_lost(group: Group, step: int, rank: int, outcome: StepOutcome) -> str:
    reason = group.peer_notes.wait_for_reason(step, rank) or "an exception"
    if outcome is StepOutcome.ABANDONED:
        return f"{reason} in step {step}"
    where = "forward" if outcome is StepOutcome.RAISED_IN_FORWARD else "backward"
    return f"raised {reason} in {where} of step {step}"
