"""Who holds a gradient besides its parameter.

A parameter's averaged ``.grad`` is a part of its bucket's storage, lent until the bucket needs it for the
next step. Whoever keeps such a gradient finds it unchanged: before a bucket writes to its storage it asks
here. If somebody still holds a part of the storage, the bucket takes new storage and leaves the old one be.

Two counts tell. References to the Python object: variables and containers, and one more if anything holds
the tensor in C++ (a ``.grad``, an autograd graph). Uses of the storage: arrays, slices, detached tensors, and
references to the object that stands for it in Python.
"""

from collections.abc import Sequence
from sys import getrefcount

import torch
from torch import Tensor

from paceline.tensors.dtensor import Trained
from paceline.torch_private import cdata_of, storage_use_count, version_of


def _uses(storage: torch.UntypedStorage) -> int:
    return storage_use_count(cdata_of(storage)) + getrefcount(storage)


def _storage_uses(tensor: Tensor) -> int:
    """How often the storage of a tensor is used, by the tensor itself as well."""
    return _uses(tensor.untyped_storage())


# What is counted for a tensor that is in one list and nowhere else.
_REFERENCES = next(map(getrefcount, [object()]))
_USES = _storage_uses(torch.empty(0))


class Lent:
    """The views of one storage.

    Args:
        views: new ones, so that nobody has any yet; held by this list alone.
    """

    def __init__(self, views: list[Tensor]) -> None:
        self._views = views
        self._addresses = [*map(Tensor.data_ptr, views)]
        self._storage = views[0].untyped_storage() if views else torch.UntypedStorage()
        self._uses = _uses(self._storage)

    def as_gradients(self, parameters: Sequence[Trained], *, anyone_may_hold: bool) -> set[int] | None:
        """Positions of views that still are their parameters' gradients; None if others hold the storage.

        Autograd adds to such a gradient, so whoever holds it sees it change anyhow.

        Args:
            parameters: each view's parameter.
            anyone_may_hold: whether it does not matter who holds views.
        """
        # Otherwise the storage was resized, or a view was given other data.
        if [*map(Tensor.data_ptr, self._views)] != self._addresses:
            return None
        if anyone_may_hold:
            return set()
        are_used = _uses(self._storage) > self._uses
        counts = [*map(getrefcount, self._views)]
        if not are_used and max(counts, default=0) <= _REFERENCES:
            return set()
        lent = {at for at, view in enumerate(self._views) if parameters[at].grad is view}
        if are_used:
            return lent if len(lent) == len(self._views) else None
        held = {at for at, count in enumerate(counts) if count > _REFERENCES}
        return lent if held <= lent else None

    def is_whole(self, position: int) -> bool:
        """Whether a view is where it was."""
        return self._views[position].data_ptr() == self._addresses[position]


def held(grads: list[Tensor]) -> list[int]:
    """Positions in the list of those gradients that somebody else holds.

    Args:
        grads: gradients that were taken off their parameters, and are in this list alone.
    """
    counts = [*map(getrefcount, grads)]
    # One that nothing was ever added to is fresh from autograd; of that there are no slices or arrays.
    versions = [*map(version_of, grads)]
    if max(counts) <= _REFERENCES and not any(versions):  # the usual case
        return []
    return [
        at for at, grad in enumerate(grads) if counts[at] > _REFERENCES or (versions[at] and _is_used(grad))
    ]


def _is_used(grad: Tensor) -> bool:
    return grad.layout is torch.strided and _storage_uses(grad) > _USES
