"""What went wrong in a step, in words that name rank, step, bucket and parameters."""

from paceline.comm.group import Group
from paceline.ddp.exchange.exchange import Bucket
from paceline.ddp.reducer.step_report import Outcome, Summary
from paceline.errors import PeerError, WeightsError

_SHOWN = 4


def check(summary: Summary, step: int, group: Group) -> None:
    """Raise, on every rank alike, if the ranks' words on a step do not add up to a step."""
    for rank, outcome in summary.raised.items():
        where = "forward" if outcome is Outcome.RAISED_IN_FORWARD else "backward"
        reason = group.peer_notes.reason(step, rank) or "an exception"
        raise PeerError(
            f"rank {rank} raised {reason} in {where} of step {step}; the step is lost on every rank, and its "
            f"gradients are dropped (here: rank {group.rank})"
        )
    without = [
        rank
        for rank, weight in enumerate(summary.weights)
        if weight is None and rank not in summary.exhausted
    ]
    if without and summary.total_weight is not None:
        raise WeightsError(
            f"step {step} was weighed on some ranks only, and its gradients are dropped "
            f"(ranks without a weight: {without})"
        )


def stalled(bucket: Bucket, number: int, step: int, group: Group, error: Exception) -> str:
    """Which reduction did not end, and whom it waited for."""
    names = [slot.name for slot in bucket.slots]
    if len(names) > _SHOWN:
        names = [*names[:2], "…", names[-1]]
    missing = group.peer_notes.missing(step, number)
    who = f"ranks that have not come to it: {missing}" if missing else "every rank has come to it"
    return (
        f"bucket {number} ({', '.join(names)}) of step {step} was not reduced on rank {group.rank}; {who}; "
        f"such a rank ran no backward in this step, is still in it, or has died ({error})"
    )
