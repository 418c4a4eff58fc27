"""The least that a wrapper can do: copy gradients into shared memory, reduce them there, and wait.

It shows how much of a wrapper's cost could be saved at all. It has the buckets of paceline's plan and its
all-reduce, and launches a bucket when the last of its gradients is ready, by one hook per bucket. It leaves
out what makes a wrapper correct for every model: it expects the same gradients in the same order in each
step, looks for no errors, lets nobody keep a gradient, and does not broadcast buffers. Its first step only
learns the order.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.comm.pending import Pending
from paceline.ddp.buckets.dense import LARGE_NUMEL
from paceline.ddp.buckets.plan import BucketCaps, make_plan
from paceline.ddp.state.parameters import collect_slots
from paceline.errors import BenchError
from paceline.options import CapOptions
from paceline.torch_private import FIRST_BUCKET_BYTES, foreach_copy_, queue_callback


class Floor:
    """Averages the gradients of a module; its hooks on the parameters keep it alive.

    Args:
        module: a module of dense parameters on the CPU, all of which get a gradient in each step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._params = collect_slots(module, ())
        self._group = Group(dist.group.WORLD)
        self._group.share_memory(nbytes=sum(slot.nbytes for slot in self._params.slots))
        if self._group.shared is None:
            raise BenchError("these ranks share no memory: leave out this side (side: floor)")
        self._order: list[int] = []
        self._in_flight: list[Pending] = []
        self._hooks = [
            self._params.parameters[slot].register_post_accumulate_grad_hook(partial(self._learn, slot))
            for slot in self._params.trainable
        ]

    def _learn(self, slot: int, _: Tensor) -> None:
        self._order.append(slot)
        if len(self._order) == len(self._params.trainable):
            queue_callback(self._follow_order)

    def _follow_order(self) -> None:
        """Make the buckets of rank 0's order, and launch each when its last gradient is ready."""
        for hook in self._hooks:
            hook.remove()
        order: list[int] = self._group.gather_objects(self._order)[0]
        caps = BucketCaps(CapOptions(None, None, FIRST_BUCKET_BYTES).sizes)
        plan = make_plan(self._params.slots, order, caps)
        position = {slot: number for number, slot in enumerate(order)}
        for number, slots in enumerate(plan.buckets):
            bucket = _FloorBucket([self._params.parameters[slot] for slot in slots], self._group)
            hook = partial(self._launch, bucket, is_last=number == len(plan.buckets) - 1)
            last = max(slots, key=position.__getitem__)
            self._params.parameters[last].register_post_accumulate_grad_hook(hook)

    def _launch(self, bucket: "_FloorBucket", _: Tensor, *, is_last: bool) -> None:
        bucket.copy_in()
        self._in_flight.append(self._group.all_reduce(bucket.flat))
        if is_last:
            for pending in self._in_flight:
                pending.wait(lambda: None)
            self._in_flight.clear()


class _FloorBucket:
    """Parameters, and the shared memory in which their gradients are reduced: large ones, then small ones."""

    def __init__(self, parameters: Sequence[Parameter], group: Group) -> None:
        numel, first = sum(parameter.numel() for parameter in parameters), parameters[0]
        self.flat = group.empty(numel, dtype=first.dtype, device=first.device)
        self._factor = 1 / group.size
        self._large = [each for each in parameters if each.numel() >= LARGE_NUMEL]
        self._small = [each for each in parameters if each.numel() < LARGE_NUMEL]
        ordered = [*self._large, *self._small]
        parts = self.flat.split([parameter.numel() for parameter in ordered])
        views = [part.view_as(parameter) for part, parameter in zip(parts, ordered, strict=True)]
        self._large_views, self._small_views = views[: len(self._large)], views[len(self._large) :]
        self._small_run = self.flat[sum(parameter.numel() for parameter in self._large) :]

    @torch.no_grad()
    def copy_in(self) -> None:
        """Copy and scale the gradients; their copies take their places, for nobody looks before the end."""
        for parameter, view in zip(self._large, self._large_views, strict=True):
            assert parameter.grad is not None
            torch.mul(parameter.grad, self._factor, out=view)
            parameter.grad = view
        if self._small:
            foreach_copy_(self._small_views, [parameter.grad for parameter in self._small])
            self._small_run.mul_(self._factor)
            for parameter, view in zip(self._small, self._small_views, strict=True):
                parameter.grad = view
