"""An optimizer whose state is spread over the ranks: each keeps and steps its own share of the parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.torch_distributed import Join, Joinable, JoinHook, disable_join
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import OptionError, ShardError
from paceline.optim.share_state import ShareState, options
from paceline.optim.shares import share_out
from paceline.tensors.dtensor import local_of

_BYTES_AT_ONCE = 25 * 1024 * 1024


class ShardedOptimizer(Optimizer, Joinable):
    """Steps a wrapped module with the state of an optimizer held once, not once a rank (ZeRO stage 1).

    Parameters are shared out by their bytes. Each rank steps its share once backward has averaged the
    gradients, and then sends the new values to the others. For optimizers that treat every element by itself
    (SGD, Adam and most others) the parameters are, bit for bit, those of the plain optimizer.

    It stands beside the wrapper and is no communication hook: whatever reduces the gradients (an average, a
    hook, weights, accumulation) and whatever is done to them before the step (clipping, a scaler)
    works as with a plain optimizer, because every rank still has all gradients.

    ``step`` and ``consolidate_state_dict`` talk to the other ranks, so every rank has to call them. For
    uneven inputs use torch's ``Join([wrapper, optimizer])``: then a rank without inputs still steps its share
    after each synced backward, by the averages as they come and with the options that it has: clipping and
    schedules do not reach it.

    Args:
        wrapper: the wrapped module.
        optimizer_class: what steps each share, such as ``torch.optim.Adam``.
        params: parameters or parameter groups; all that require a gradient by default.
        defaults: options of ``optimizer_class``.
    """

    def __init__(
        self,
        wrapper: DistributedDataParallel,
        optimizer_class: type[Optimizer],
        params: Iterable[Any] | None = None,
        **defaults: Any,
    ) -> None:
        if not isinstance(wrapper, DistributedDataParallel):
            # Parameters are what torch's optimizers, and its ZeroRedundancyOptimizer, take first.
            raise OptionError(
                "a ShardedOptimizer is given paceline's wrapper, and parameters behind the class: "
                f"ShardedOptimizer(ddp, torch.optim.Adam, params, lr=...) (given: {type(wrapper).__name__})"
            )
        self._wrapper = wrapper
        self._group = wrapper._group
        self._loads = [0] * self._group.size
        self._owners: dict[Tensor, int] = {}
        self._own: Optimizer | None = None
        self._gathered: dict[str, Any] | None = None
        Joinable.__init__(self)
        Optimizer.__init__(self, _trainable(wrapper) if params is None else params, defaults)
        self._own = optimizer_class([self._shared(group) for group in self.param_groups], **defaults)
        self.defaults = self._own.defaults
        self.state = self._own.state
        _copy_options(self._own, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; they are shared out so that loads stay even."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        sizes = [parameter.numel() * parameter.element_size() for parameter in added]
        for parameter, size, owner in zip(added, sizes, share_out(sizes, self._loads), strict=True):
            self._owners[parameter] = owner
            self._loads[owner] += size
        if self._own is not None:
            self._own.add_param_group(self._shared(self.param_groups[-1]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's share, and make every rank's parameters equal."""
        assert self._own is not None
        self._check_group()
        if self._wrapper._join_config.enable and not self._join_config.enable:
            raise OptionError("give the optimizer to Join too: ranks without inputs have shares to step")
        Join.notify_join_context(self)
        self._gathered = None
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            _copy_options(self, self._own)
            self._own.step()
        finally:
            # Also when something raises here: the others are about to receive, and would wait.
            self._spread()
        _copy_options(self._own, self)
        return loss

    @property
    def follows_a_synced_step(self) -> bool:
        """Whether the wrapper's last forward is one after which gradients are averaged."""
        return self._wrapper.require_forward_param_sync

    def join_hook(self, **_: Any) -> JoinHook:
        """What torch's join context manager calls on a rank without inputs."""
        return _StepsAlong(self)

    @property
    def join_device(self) -> torch.device:
        """The device for the collectives of torch's join context."""
        return self._wrapper.join_device

    @property
    def join_process_group(self) -> Any:
        """The group for the collectives of torch's join context."""
        return self._group.process_group

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the whole state to one rank, where ``state_dict`` then gives it until the next step.

        Args:
            to: the rank, within the wrapper's group.
        """
        if not 0 <= to < self._group.size:
            raise OptionError(
                f"there is no such rank to gather the state to (to: {to}, ranks: {self._group.size})"
            )
        self._check_group()
        numbers = self._numbers()
        mine = {numbers[parameter]: _on_cpu(state) for parameter, state in self.state.items()}
        everyone = self._group.gather_objects_to(mine, to=to)
        self._gathered = None
        if everyone is not None:
            whole = {number: state for theirs in everyone for number, state in theirs.items()}
            self._gathered = {
                "state": {number: whole[number] for number in sorted(whole)},
                "param_groups": [
                    {**group, "params": [numbers[parameter] for parameter in group["params"]]}
                    for group in self.param_groups
                ],
            }

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain optimizer would give it; to be gathered first."""
        if self._gathered is None:
            raise ShardError(
                "the state is spread over the ranks; call consolidate_state_dict on every rank first, "
                f"and after it state_dict on the rank that it names (this rank: {self._group.rank})"
            )
        return self._gathered

    @property
    def share(self) -> ShareState:
        """This rank's share of the state, for ``torch.distributed.checkpoint``: nothing has to be gathered.

        ``dcp.save({..., "optimizer": optimizer.share})``; ``dcp.load`` with the same, on any number of ranks.
        """
        assert self._own is not None
        self._check_group()
        named = self._wrapper.module.named_parameters()
        names: dict[Tensor, str] = {parameter: name for name, parameter in named}
        self._gathered = None  # it may be loaded into
        return ShareState(self._own, names, self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, of this class or of the plain optimizer; each rank keeps its share."""
        assert self._own is not None
        super().load_state_dict({**state_dict, "state": {}})
        numbers = self._numbers()
        mine = [parameter for group in self._own.param_groups for parameter in group["params"]]
        places = {parameter: place for place, parameter in enumerate(mine)}
        state = state_dict["state"]
        self._own.load_state_dict(
            {
                "state": {
                    place: state[numbers[parameter]]
                    for parameter, place in places.items()
                    if numbers[parameter] in state
                },
                "param_groups": [
                    {**options(group), "params": [places[parameter] for parameter in own["params"]]}
                    for group, own in zip(self.param_groups, self._own.param_groups, strict=True)
                ],
            }
        )
        self.state = self._own.state
        self._gathered = None

    def _shared(self, group: dict[str, Any]) -> dict[str, Any]:
        rank = self._group.rank
        mine = [parameter for parameter in group["params"] if self._owners[parameter] == rank]
        return {**options(group), "params": mine}

    def _numbers(self) -> dict[Tensor, int]:
        """Every parameter's number in a state dict."""
        everything = (parameter for group in self.param_groups for parameter in group["params"])
        return {parameter: number for number, parameter in enumerate(everything)}

    def _spread(self) -> None:
        shares: list[list[Tensor]] = [[] for _ in range(self._group.size)]
        for parameter, owner in self._owners.items():
            shares[owner].append(local_of(parameter).detach())
        for owner, share in enumerate(shares):
            self._group.broadcast(share, source=owner, bytes_at_once=_BYTES_AT_ONCE)

    def _check_group(self) -> None:
        if self._wrapper.process_group is not self._group.process_group:
            raise ShardError(
                "the wrapper has moved to another group, among whose ranks the state is not shared out; "
                "consolidate the state before the move, and load it into a new optimizer after it"
            )


class _StepsAlong(JoinHook):
    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        super().__init__()

    def main_hook(self) -> None:
        if self._optimizer.follows_a_synced_step:
            self._optimizer.step()

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: ARG002, FBT001  # torch's signature
        disable_join(self._optimizer)


def _trainable(wrapper: DistributedDataParallel) -> list[Parameter]:
    """Parameters that require a gradient and are equal on all ranks, which ignored ones need not be."""
    ignored = wrapper.parameters_to_ignore
    named = wrapper.module.named_parameters()
    return [each for name, each in named if each.requires_grad and name not in ignored]


def _copy_options(source: Optimizer, target: Optimizer) -> None:
    """Learning rates and the like: schedulers set them outside, some optimizers inside."""
    for ours, theirs in zip(source.param_groups, target.param_groups, strict=True):
        theirs.update(options(ours))


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
