"""What a communication hook gets to see of a bucket, under the names that torch gives them."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from paceline.tensors.dtensor import Trained, whole_parameter


class BucketOfGradients(Protocol):
    """What has to be known of a bucket here, whether its gradients are dense or sparse."""

    @property
    def gradients(self) -> Tensor:
        """All gradients, as one tensor."""

    @property
    def views(self) -> list[Tensor]:
        """Each gradient by itself."""

    @property
    def parameters(self) -> Sequence[Trained]:
        """The parameters, in the order of the gradients."""


class GradBucket:
    """A full bucket, on its way to a communication hook.

    Args:
        bucket: the bucket.
        number: its place in the plan.
        is_last: whether no bucket of this step comes after it.
    """

    def __init__(self, bucket: BucketOfGradients, number: int, *, is_last: bool) -> None:
        self._bucket = bucket
        self._number = number
        self._is_last = is_last
        self._buffer = bucket.gradients

    def index(self) -> int:
        """The bucket's place in the plan."""
        return self._number

    def buffer(self) -> Tensor:
        """All gradients of the bucket, as one flat tensor."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Each gradient, as a view of the buffer."""
        if self._buffer.is_sparse:
            return [self._buffer]
        own = self._bucket.gradients
        if self._buffer is own:
            return [*self._bucket.views]
        moved = self._buffer.storage_offset() - own.storage_offset()
        return [
            self._buffer.as_strided(view.shape, view.stride(), moved + view.storage_offset())
            for view in self._bucket.views
        ]

    def parameters(self) -> list[Parameter]:
        """The parameters, in the order of the gradients."""
        return [whole_parameter(each) for each in self._bucket.parameters]

    def is_last(self) -> bool:
        """Whether no bucket of this step comes after it."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the buffer's place."""
        self._buffer = buffer
