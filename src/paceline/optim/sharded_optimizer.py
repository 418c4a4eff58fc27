"""An optimizer whose state is split over the ranks: each rank owns a share of the parameters and steps it."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.torch_distributed import Joinable
from paceline.ddp.buckets.cut import assign_owners
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import OptionError, ShardError
from paceline.optim.clipping import clip_parts, gather_numbers
from paceline.optim.reduced_parts import ReducedParts
from paceline.optim.share_state import ShareState
from paceline.optim.wrapped_optimizer import WrappedOptimizer, check_wrapper, trainable
from paceline.tensors.dtensor import local_of
from paceline.tensors.param_groups import group_options

_BYTES_AT_ONCE = 25 * 1024 * 1024


class ShardedOptimizer(WrappedOptimizer):
    """Steps a wrapped module, with the optimizer state held once instead of once per rank (ZeRO stage 1).

    Each rank owns a share of the parameters; shares have about the same number of bytes. After backward has
    averaged the gradients, each rank steps its share and broadcasts the new values. For optimizers that treat
    every element by itself (SGD, Adam and most others) the parameters are, bit for bit, those of the plain
    optimizer.

    It is not a communication hook: by default every rank still has all averaged gradients. So reduction
    (average, hook, weights, accumulation) and what is done to gradients before the step (clipping, a scaler)
    work as with a plain optimizer. With ``gradients="parts"`` (ZeRO stage 2) each rank gets the averages of
    its own share only, which is less to write and to send; ``.grad`` of the other parameters then raises an
    error if it is used. Clip by ``clip_grad_norm_`` of the optimizer.

    ``step`` and ``consolidate_state_dict`` communicate, so every rank has to call them. For uneven inputs use
    torch's ``Join([wrapper, optimizer])``: a rank without inputs then still steps its share after each
    synchronized backward. It uses the plain averages and the options that it has: clipping and schedulers on
    the other ranks do not reach it.

    Args:
        wrapper: the wrapped module.
        optimizer_class: the optimizer for each share, such as ``torch.optim.Adam``.
        params: parameters or parameter groups; all that require a gradient by default.
        gradients: what a rank gets of the averages: "whole", or the "parts" that it steps.
        defaults: options of ``optimizer_class``.
    """

    def __init__(
        self,
        wrapper: DistributedDataParallel,
        optimizer_class: type[Optimizer],
        params: Iterable[Any] | None = None,
        *,
        gradients: Literal["whole", "parts"] = "whole",
        **defaults: Any,
    ) -> None:
        check_wrapper(wrapper, "ShardedOptimizer")
        if wrapper._group.may_change:
            raise OptionError("the state cannot be split over the ranks of a process group that may change")
        if gradients not in ("whole", "parts"):
            raise OptionError(f'gradients must be "whole" or "parts" (gradients: {gradients!r})')
        self._wrapper = wrapper
        self._group = wrapper._group
        self._parts = None
        if gradients == "parts":
            self._parts = ReducedParts(wrapper, 'a ShardedOptimizer with gradients="parts"')
        self._rank = self._group.rank if self._parts is None else self._parts.rank
        self._owned_bytes = [0] * (self._group.size if self._parts is None else self._parts.ranks)
        self._owners: dict[Tensor, int] = {}
        self._local_optimizer: Optimizer | None = None
        self._full_state: dict[str, Any] | None = None
        Joinable.__init__(self)
        Optimizer.__init__(self, trainable(wrapper) if params is None else params, defaults)
        self._local_optimizer = optimizer_class(
            [self._own_part(group) for group in self.param_groups], **defaults
        )
        self.defaults = self._local_optimizer.defaults
        self.state = self._local_optimizer.state
        _copy_options(self._local_optimizer, self)
        if self._parts is not None:
            self._parts.reduce()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its parameters go to the ranks that own the fewest bytes."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        sizes = [parameter.numel() * parameter.element_size() for parameter in added]
        for parameter, size, owner in zip(added, sizes, assign_owners(sizes, self._owned_bytes), strict=True):
            self._owners[parameter] = owner
            self._owned_bytes[owner] += size
            if self._parts is not None:
                self._parts.keep_whole(parameter, owner)
                self._parts.set_parts(parameter, [(0, parameter)] if owner == self._rank else [])
        if self._local_optimizer is not None:
            self._local_optimizer.add_param_group(self._own_part(self.param_groups[-1]))
            if self._parts is not None:
                self._parts.reduce()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's share, and broadcast every rank's share."""
        assert self._local_optimizer is not None
        self._check_group()
        self._note_step()
        self._full_state = None
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            _copy_options(self, self._local_optimizer)
            self._local_optimizer.step()
        finally:
            self._wrapper._reducer.turns.finish_launched()
            # Also after an error on this rank: the others are about to receive, and would wait.
            self._broadcast_shares()
        _copy_options(self._local_optimizer, self)
        return loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients so that the norm of all of them is at most ``max_norm``; every rank calls it.

        Returns the norm before, as torch's function of this name does.
        """
        grads = [each.grad for each in self._owners if each.grad is not None]
        if self._parts is None:
            gather: Callable[[Tensor], Tensor] = torch.atleast_1d
        else:
            grads = [
                each.grad
                for each, owner in self._owners.items()
                if owner == self._rank and each.grad is not None
            ]
            gather = partial(gather_numbers, self._group, self._wrapper._reducer.step_number)
        return clip_parts(gather, grads, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the full state on one rank, where ``state_dict`` returns it until the next step.

        Args:
            to: the rank, within the wrapper's group.
        """
        if not 0 <= to < self._group.size:
            raise OptionError(
                f"to must be a rank of the wrapper's group (to: {to}, ranks: {self._group.size})"
            )
        self._check_group()
        numbers = self._numbers()
        mine = {numbers[parameter]: _on_cpu(state) for parameter, state in self.state.items()}
        everyone = self._group.gather_objects_to(mine, to=to)
        self._full_state = None
        if everyone is not None:
            whole = {number: state for theirs in everyone for number, state in theirs.items()}
            self._full_state = {
                "state": {number: whole[number] for number in sorted(whole)},
                "param_groups": [
                    {**group, "params": [numbers[parameter] for parameter in group["params"]]}
                    for group in self.param_groups
                ],
            }

    def state_dict(self) -> dict[str, Any]:
        """The full state, as the plain optimizer would return it; call ``consolidate_state_dict`` first."""
        if self._full_state is None:
            raise ShardError(
                "the state is split over the ranks: first call consolidate_state_dict on every rank, then "
                f"state_dict on the rank that it gathers to (this rank: {self._group.rank})"
            )
        return self._full_state

    @property
    def share(self) -> ShareState:
        """This rank's share of the state, for ``torch.distributed.checkpoint``; nothing has to be gathered.

        ``dcp.save({..., "optimizer": optimizer.share})``; ``dcp.load`` with the same, on any number of ranks.
        """
        assert self._local_optimizer is not None
        self._check_group()
        named = self._wrapper.module.named_parameters()
        names: dict[Tensor, str] = {parameter: name for name, parameter in named}
        self._full_state = None  # a checkpoint may be loaded into the share
        return ShareState(self._local_optimizer, names, self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state, of this class or of the plain optimizer; each rank keeps its share."""
        assert self._local_optimizer is not None
        super().load_state_dict({**state_dict, "state": {}})
        numbers = self._numbers()
        mine = [parameter for group in self._local_optimizer.param_groups for parameter in group["params"]]
        places = {parameter: place for place, parameter in enumerate(mine)}
        state = state_dict["state"]
        self._local_optimizer.load_state_dict(
            {
                "state": {
                    place: state[numbers[parameter]]
                    for parameter, place in places.items()
                    if numbers[parameter] in state
                },
                "param_groups": [
                    {**group_options(group), "params": [places[parameter] for parameter in own["params"]]}
                    for group, own in zip(self.param_groups, self._local_optimizer.param_groups, strict=True)
                ],
            }
        )
        self.state = self._local_optimizer.state
        self._full_state = None

    def _own_part(self, group: dict[str, Any]) -> dict[str, Any]:
        mine = [parameter for parameter in group["params"] if self._owners[parameter] == self._rank]
        return {**group_options(group), "params": mine}

    def _numbers(self) -> dict[Tensor, int]:
        """Every parameter's index in a state dict."""
        everything = (parameter for group in self.param_groups for parameter in group["params"])
        return {parameter: number for number, parameter in enumerate(everything)}

    def _broadcast_shares(self) -> None:
        shares: list[list[Tensor]] = [[] for _ in self._owned_bytes]
        for parameter, owner in self._owners.items():
            shares[owner].append(local_of(parameter).detach())
        for owner, share in enumerate(shares):
            if self._parts is not None and self._group.shared is not None:
                # Each host has all shares.
                self._group.shared.broadcast_on_host(share, owner)
            else:
                self._group.broadcast(share, source=owner, bytes_at_once=_BYTES_AT_ONCE)

    def _check_group(self) -> None:
        if self._wrapper.process_group is not self._group.process_group:
            raise ShardError(
                "the wrapper has moved to another process group, but the state is split over the old one: "
                "consolidate the state before the move, and load it into a new optimizer after it"
            )


def _copy_options(source: Optimizer, target: Optimizer) -> None:
    """Copy learning rates and the like, which schedulers set from outside and some optimizers from inside."""
    for ours, theirs in zip(source.param_groups, target.param_groups, strict=True):
        theirs.update(group_options(ours))


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
