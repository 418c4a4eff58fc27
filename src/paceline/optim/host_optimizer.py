"""An optimizer for parameters that the ranks of a host have once: each rank steps its part of them."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.torch_distributed import Join, Joinable, JoinHook
from paceline.ddp.buckets.cut import assign_owners
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import OptionError, ShardError, UnsupportedError
from paceline.optim.clipping import clip_parts
from paceline.optim.host_parameters import HostParameters, host_parameters_of
from paceline.optim.part_state import PartKey, cut, joined
from paceline.optim.scaler_check import ScalerCheck
from paceline.tensors.param_groups import group_options
from paceline.torch_private import disable_join

# They treat every element by itself, and change their state in place.
ELEMENTWISE = frozenset(
    {
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
        *(torch.optim.Rprop, torch.optim.ASGD),
    }
)


class HostOptimizer(Optimizer, Joinable):
    """Steps a wrapped module whose parameters and optimizer state each host has once, not once per rank.

    ``HostOptimizer(ddp, torch.optim.AdamW, lr=...)`` moves the module's parameters to memory that all ranks
    of the host share. Each rank steps its own part, and backward leaves it with the average of that part
    only: ``.grad`` of the module's parameters raises an error if it is used. What this rank steps is in
    ``param_groups``, with gradients.

    Optimizers that treat every element by itself (torch's SGD, Adam, AdamW and so on) step parts of large
    parameters. All others get whole parameters: each one is stepped by one rank.

    Nobody but the optimizer may write to the parameters, because that would count once per rank: ``step``
    finds it, and raises. Write inside ``with optimizer.writing():``. For uneven inputs use torch's
    ``Join([wrapper, optimizer])``.

    Args:
        wrapper: the wrapped module, on the CPU.
        optimizer_class: the optimizer of each part, such as ``torch.optim.AdamW``.
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
            raise OptionError(
                "the first argument of a HostOptimizer must be paceline's wrapper; parameters come third: "
                f"HostOptimizer(ddp, torch.optim.AdamW, params, lr=...) (given: {type(wrapper).__name__})"
            )
        if optimizer_class is torch.optim.LBFGS:
            raise UnsupportedError("LBFGS looks at all parameters at once, which no rank of a host has")
        # Checks what was given, and fills in what groups leave out.
        given = Optimizer(_trainable(wrapper) if params is None else params, defaults)
        self._parameters: HostParameters = host_parameters_of(wrapper)
        self._parts = self._parameters.parts
        self._wrapper = wrapper
        self._is_elementwise = optimizer_class in ELEMENTWISE
        self._scaler_check = ScalerCheck(wrapper._group)
        self._groups: list[list[Tensor]] = []
        self._names: list[dict[str, Any]] = []
        self._keys: dict[Tensor, PartKey] = {}
        self._starts: dict[Tensor, list[tuple[int, Tensor]]] = {}
        groups = [self._take(group) for group in given.param_groups]
        Joinable.__init__(self)
        Optimizer.__init__(self, groups, defaults)
        self._local = optimizer_class([{**group} for group in groups], **defaults)
        self._state = self._parameters.open_state()
        self._use_local_groups()
        self._parts.reduce()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the module's parameters; every rank calls this."""
        if not hasattr(self, "_local"):  # torch's constructor
            super().add_param_group(param_group)
            return
        given = Optimizer([{**param_group, "params": _as_list(param_group["params"])}], self.defaults)
        if twice := [each for each in given.param_groups[0]["params"] if each in self._starts]:
            names = [self._parts.name_of(each) for each in twice]
            raise OptionError(f"parameters are in another group already ({', '.join(names)})")
        self._remove_scaler_check()
        self._local.add_param_group(self._take(given.param_groups[0]))
        self._use_local_groups()
        self._parts.reduce()

    @property
    def whole_parameters(self) -> list[Tensor]:
        """The module's parameters that this optimizer steps, on all ranks together."""
        return [parameter for group in self._groups for parameter in group]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step this rank's parts, and wait until every rank of the host has stepped its own."""
        if closure is not None:
            raise UnsupportedError(
                "a HostOptimizer takes no closure: backward inside the step would read parameters that other "
                "ranks change. Call backward first, then step()"
            )
        if self._wrapper._join_config.enable and not self._join_config.enable:
            raise OptionError(
                "the optimizer must join too, because ranks without inputs step their parts: "
                "use Join([wrapper, optimizer])"
            )
        Join.notify_join_context(self)
        strange = self._parts.follow_grads(self.whole_parameters)
        refusal = f"gradients are no averages: run a synced backward first ({', '.join(strange[:3])})"
        with self._parameters.updating(refusal if strange else ""), self._scaler_check.left_out():
            self._local.step()
            if not self._is_elementwise or len(self._local.state) != self._published:
                self._publish()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's signature
        """Drop the gradients of the parts that this optimizer steps, and those of the module's parameters."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        self._parts.drop_grads(self.whole_parameters)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients of all parts, on all ranks, so that their norm is at most ``max_norm``.

        Every rank calls it; returns the norm of the whole gradient, as torch's function of this name does.
        """
        grads = [part.grad for part in self._keys if part.grad is not None]
        return clip_parts(
            self._parameters.gather_numbers,
            grads,
            max_norm,
            norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Write to parameters in here; every rank enters it, and what it writes counts once.

        Code in here runs on every rank, as without shared parameters. What the first rank of each host writes
        stays. The others write to copies, which are dropped at the end.
        """
        return self._parameters.writing()

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain optimizer would return it; any rank may call this alone."""
        parts = self._own_state() if self._state is None else self._state.read_all()
        numbers = self._numbers()
        state = {}
        for parameter, number in numbers.items():
            ranges = self._parts.ranges_of(parameter)
            found = {
                start: parts[PartKey(number, start)] for _, start, _ in ranges if (number, start) in parts
            }
            if len(found) == len(ranges):
                state[number] = joined(parameter, found)
        return {
            "state": state,
            "param_groups": [
                {**group_options(group), "params": [numbers[parameter] for parameter in wholes], **names}
                for group, wholes, names in zip(self.param_groups, self._groups, self._names, strict=True)
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, of this class or of the plain optimizer; every rank calls this."""
        _check_loaded(state_dict, self._groups)
        state, wholes = state_dict["state"], self.whole_parameters
        # A state dict numbers parameters in the order of its groups.
        given = [number for group in state_dict["param_groups"] for number in group["params"]]
        names = dict(zip(wholes, given, strict=True))
        self._remove_scaler_check()
        own = [part for group in self._local.param_groups for part in group["params"]]
        places = {part: place for place, part in enumerate(own)}
        loaded = {
            places[part]: {
                name: cut(value, parameter, start, part) for name, value in state[names[parameter]].items()
            }
            for parameter in wholes
            if names[parameter] in state
            for start, part in self._starts[parameter]
        }
        groups = [
            {**group_options(group), "params": [places[part] for part in own_group["params"]]}
            for group, own_group in zip(state_dict["param_groups"], self._local.param_groups, strict=True)
        ]
        self._local.load_state_dict({"state": loaded, "param_groups": groups})
        if self._state is not None:
            self._state.forget()
        self._use_local_groups()
        self._parameters.wait()

    def __getstate__(self) -> dict[str, Any]:
        raise ShardError(
            "a HostOptimizer cannot be copied or pickled: its parts are in the memory of this host. Save its "
            "state_dict(), and load it into another one"
        )

    def join_hook(self, **_: Any) -> JoinHook:
        """The hook that torch's join context calls on a rank without inputs."""
        return _HostJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device for the collectives of torch's join context."""
        return self._wrapper.join_device

    @property
    def join_process_group(self) -> Any:
        """The group for the collectives of torch's join context."""
        return self._wrapper.process_group

    @property
    def steps_after_this_forward(self) -> bool:
        """Whether gradients are averaged after the wrapper's last forward."""
        return self._wrapper.require_forward_param_sync

    def forget_writes(self) -> None:
        """What was written to parameters so far is right."""
        self._parameters.forget_writes()

    def _take(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same group with this rank's parts of its parameters."""
        wholes: list[Tensor] = list(group["params"])
        if not self._is_elementwise:
            owners = assign_owners([*map(_cost, wholes)], [0.0] * self._parts.ranks)
            for parameter, owner in zip(wholes, owners, strict=True):
                self._parts.keep_whole(parameter, owner)
        first = sum(map(len, self._groups))
        self._groups.append(wholes)
        self._names.append({key: group[key] for key in ("param_names",) if key in group})
        parts = []
        for number, parameter in enumerate(wholes, start=first):
            self._starts[parameter] = self._parameters.take(parameter)
            for start, part in self._starts[parameter]:
                self._keys[part] = PartKey(number, start)
                parts.append(part)
        return {**group_options(group), "params": parts}

    def _use_local_groups(self) -> None:
        """Show the groups and the state of the local optimizer as this one's."""
        self._publish()
        self._local.param_groups[-1]["params"].append(self._scaler_check.parameter)
        self.param_groups = self._local.param_groups
        self.state = self._local.state
        self.defaults = self._local.defaults

    def _remove_scaler_check(self) -> None:
        self._local.param_groups[-1]["params"].pop()

    def _publish(self) -> None:
        if self._state is not None:
            self._state.publish(self._local.state, self._keys)
        self._published = len(self._local.state)

    def _own_state(self) -> dict[PartKey, dict[str, Any]]:
        return {self._keys[part]: dict(values) for part, values in self._local.state.items()}

    def _numbers(self) -> dict[Tensor, int]:
        return {parameter: number for number, parameter in enumerate(self.whole_parameters)}


class _HostJoinHook(JoinHook):
    def __init__(self, optimizer: HostOptimizer) -> None:
        self._optimizer = optimizer
        super().__init__()

    def main_hook(self) -> None:
        if self._optimizer.steps_after_this_forward:
            self._optimizer.step()

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: ARG002, FBT001  # torch's signature
        # The wrapper has given all ranks the last one's values, which are the same.
        self._optimizer.forget_writes()
        disable_join(self._optimizer)


def _trainable(wrapper: DistributedDataParallel) -> list[Any]:
    """Parameters that require a gradient, without the ignored ones."""
    ignored = wrapper.parameters_to_ignore
    named = wrapper.module.named_parameters()
    return [each for name, each in named if each.requires_grad and name not in ignored]


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _cost(parameter: Tensor) -> float:
    """What a step of a whole parameter costs: optimizers of matrices multiply by the shorter side."""
    return parameter.numel() * (min(parameter.shape) if parameter.dim() > 1 else 1)


def _check_loaded(state_dict: dict[str, Any], groups: Sequence[Sequence[Tensor]]) -> None:
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [*map(len, groups)]
    if theirs != ours:
        raise OptionError(
            "the loaded state has other parameter groups than the optimizer "
            f"(parameters per group: {theirs} loaded, {ours} here)"
        )
