"""Types of torch.distributed that other packages need."""

from torch import distributed
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable", "is_grad_bucket_type"]


def is_grad_bucket_type(annotation: object) -> bool:
    """Whether an annotation names torch's own bucket type."""
    return annotation is distributed.GradBucket  # type: ignore[attr-defined]
