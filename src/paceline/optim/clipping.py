"""Clipping of gradients of which each rank has its part."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from paceline.comm.group import Group
from paceline.errors import OptionError, StepError
from paceline.watch.rank_page import Activity


def clip_parts(
    gather: Callable[[Tensor], Tensor],
    grads: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale gradients so that the norm of all ranks' parts together is at most ``max_norm``.

    Args:
        gather: gives the numbers of all ranks, one of each.
        grads: this rank's parts.
        max_norm: the largest norm that is left as it is.
        norm_type: which norm.
        error_if_nonfinite: whether to raise if the norm is not finite.

    Returns:
        The norm before.
    """
    if norm_type <= 0:
        raise OptionError(f"norm_type must be positive (norm_type: {norm_type})")
    own = get_total_norm(grads, norm_type) if grads else torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(gather(own), norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise StepError(
            f"the norm of the gradients is not finite, so they cannot be clipped (norm: {norm.item()}); "
            "error_if_nonfinite=False scales them all the same"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor)
    return norm.to(own.dtype)


def gather_numbers(group: Group, step: int, own: Tensor) -> Tensor:
    """The numbers of all ranks that have parts together, one of each; every rank calls this.

    Args:
        group: the ranks.
        step: the number of the next step, for errors.
        own: this rank's number.
    """
    everyone = torch.zeros(group.size, dtype=torch.float64)
    everyone[group.rank] = own
    if group.size > 1:
        with group.watch.waiting(Activity.UPDATE, step, then=Activity.OUTSIDE):
            everyone = group.all_reduce_on_host(everyone).wait(lambda: None)
    # Other hosts have the same parts, and so the same numbers.
    return everyone if group.shared is None else everyone[group.shared.ranks]
