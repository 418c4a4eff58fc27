"""An optimizer for parameters that the ranks of a host have once: each rank steps its part of them."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.torch_distributed import Joinable
from paceline.ddp.buckets.cut import assign_owners
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import OptionError, ShardError, UnsupportedError
from paceline.optim.clipping import clip_parts
from paceline.optim.host_parameters import HostCall, HostParameters, host_parameters_of
from paceline.optim.part_state import PartKey, cut, joined
from paceline.optim.scaler_check import ScalerCheck
from paceline.optim.wrapped_optimizer import WrappedOptimizer, check_wrapper, trainable
from paceline.tensors.param_groups import group_options

# How many parameters an error names.
_TOLD = 3
# They treat every element by itself.
ELEMENTWISE = frozenset(
    {
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop),
        *(torch.optim.Rprop, torch.optim.ASGD),
    }
)
# They change their state in place, and hold it nowhere else.
IN_PLACE = ELEMENTWISE | {torch.optim.Adafactor, *filter(None, [getattr(torch.optim, "Muon", None)])}


class HostOptimizer(WrappedOptimizer):
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
        check_wrapper(wrapper, "HostOptimizer")
        if optimizer_class is torch.optim.LBFGS:
            raise UnsupportedError("LBFGS looks at all parameters at once, which no rank of a host has")
        # These check what was given, before anything is moved.
        given = Optimizer(trainable(wrapper) if params is None else params, defaults)
        optimizer_class([{**group} for group in given.param_groups], **defaults)
        self._parameters: HostParameters = host_parameters_of(wrapper)
        self._parts = self._parameters.parts
        self._wrapper = wrapper
        self._is_elementwise = optimizer_class in ELEMENTWISE
        self._is_in_place = optimizer_class in IN_PLACE
        self._scaler_check = ScalerCheck(partial(self._parameters.exchange, HostCall.UNSCALE))
        self._groups: list[list[Tensor]] = []
        self._names: list[dict[str, Any]] = []
        self._keys: dict[Tensor, PartKey] = {}
        self._starts: dict[Tensor, list[tuple[int, Tensor]]] = {}
        self._published: list[Any] = []
        self._check_equal(optimizer_class, given.param_groups)
        groups = [self._take(group) for group in given.param_groups]
        Joinable.__init__(self)
        Optimizer.__init__(self, groups, defaults)
        self._local = optimizer_class([{**group} for group in groups], **defaults)
        self._state = self._parameters.open_state(moves=self._is_in_place)
        self.defaults = self._local.defaults
        self._finish_groups()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with this rank's parts; the last one ends with a parameter without elements."""
        return self._local.param_groups if hasattr(self, "_local") else self.__dict__["early_groups"]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if hasattr(self, "_local"):
            self._local.param_groups = groups
        else:  # torch's constructor
            self.__dict__["early_groups"] = groups

    @property
    def state(self) -> Any:
        """The state of this rank's parts."""
        return self._local.state if hasattr(self, "_local") else self.__dict__["early_state"]

    @state.setter
    def state(self, state: Any) -> None:
        if hasattr(self, "_local"):
            self._local.state = state
        else:  # torch's constructor
            self.__dict__["early_state"] = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the module's parameters; every rank calls this."""
        if not hasattr(self, "_local"):  # torch's constructor
            super().add_param_group(param_group)
            return
        given = Optimizer([{**param_group, "params": _as_list(param_group["params"])}], self.defaults)
        if twice := [each for each in given.param_groups[0]["params"] if each in self._starts]:
            names = [self._parts.name_of(each) for each in twice]
            raise OptionError(f"parameters are in another group already ({', '.join(names)})")
        self._check_equal(type(self._local), given.param_groups)
        group = self._take(given.param_groups[0])
        with self._without_scaler_check():
            self._local.add_param_group(group)

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
        self._note_step()
        strange = [each.parameter for each in self._cut if not each.follow()]
        names = ", ".join(map(self._parts.name_of, strange[:_TOLD]))
        refusal = f"gradients are no averages: run a synced backward first ({names})" if strange else ""
        with self._parameters.updating(refusal), self._scaler_check.left_out():
            self._local.step()
            if not self._is_in_place:
                self._take_values_back()
            if not self._is_in_place or not self._is_published():
                self._publish()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's signature
        """Drop the gradients of the parts that this optimizer steps, and those of the module's parameters."""
        for each in self._cut:
            if set_to_none:
                each.drop()
            else:
                each.zero_parts()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients of all parts, on all ranks, so that their norm is at most ``max_norm``.

        Every rank calls it; returns the norm of the whole gradient, as torch's function of this name does.
        """
        grads = [part.grad for part in self._keys if part.grad is not None]
        return clip_parts(
            lambda own: self._parameters.exchange(HostCall.CLIP, own.item()),
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
        numbers = {parameter: number for number, parameter in enumerate(self.whole_parameters)}
        state = {key: value for key, value in parts.items() if not isinstance(key, tuple)}
        for parameter, number in numbers.items():
            ranges = self._parts.ranges_of(parameter)
            found = {start: parts[number, start] for _, start, _ in ranges if (number, start) in parts}
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
        self._parameters.exchange(HostCall.LOAD)  # others may still read the state as it was
        error = None
        with self._without_scaler_check():
            try:
                self._local.load_state_dict(self._own_part_of(state_dict))
            except Exception as raised:  # the others have to know
                error = raised
            if self._state is not None:
                self._state.forget()
        failed = self._parameters.exchange(HostCall.LOAD, error is not None).any()
        if error is not None:
            raise error
        if failed:
            raise ShardError("the state could not be loaded on another rank; load a right one on every rank")

    def _own_part_of(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A whole state, cut for the local optimizer."""
        state, wholes = state_dict["state"], self.whole_parameters
        # A state dict numbers parameters in the order of its groups.
        given = [number for group in state_dict["param_groups"] for number in group["params"]]
        numbers = dict(zip(wholes, given, strict=True))
        own = [part for group in self._local.param_groups for part in group["params"]]
        places = {part: place for place, part in enumerate(own)}
        loaded = {key: value for key, value in state.items() if key not in given}
        for parameter in wholes:
            values = state.get(numbers[parameter])
            if values is not None:
                for start, part in self._starts[parameter]:
                    cut_ = {name: cut(value, parameter, start, part) for name, value in values.items()}
                    loaded[places[part]] = cut_
        groups = [
            {**group_options(group), "params": [places[part] for part in own_group["params"]]}
            for group, own_group in zip(state_dict["param_groups"], self._local.param_groups, strict=True)
        ]
        return {"state": loaded, "param_groups": groups}

    def __getstate__(self) -> dict[str, Any]:
        raise ShardError(
            "a HostOptimizer cannot be copied or pickled: its parts are in the memory of this host. Save its "
            "state_dict(), and load it into another one"
        )

    def after_join(self) -> None:
        """The wrapper has given all ranks the last one's values, which are the same."""
        self._parameters.forget_writes()

    def _take(self, group: dict[str, Any]) -> dict[str, Any]:
        """The same group with this rank's parts of its parameters."""
        wholes: list[Tensor] = list(group["params"])
        owners = None
        if not self._is_elementwise:
            owners = assign_owners([*map(_cost, wholes)], [0.0] * self._parts.ranks)
        self._parameters.take(wholes, owners, self)
        first = sum(map(len, self._groups))
        self._groups.append(wholes)
        self._names.append({key: group[key] for key in ("param_names",) if key in group})
        parts = []
        for number, parameter in enumerate(wholes, start=first):
            self._starts[parameter] = self._parameters.parts_of(parameter)
            for start, part in self._starts[parameter]:
                self._keys[part] = PartKey(number, start)
                parts.append(part)
        # The same memory, for optimizers that give parts other memory.
        self._memory = {part: part.detach() for part in self._keys}
        return {**group_options(group), "params": parts}

    def _check_equal(self, optimizer_class: type[Optimizer], groups: Sequence[dict[str, Any]]) -> None:
        """Raise on all ranks, before anything is changed, if they would not add the same groups."""
        name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
        names = [[self._parts.name_of(each) for each in group["params"]] for group in groups]
        self._parameters.check_equal((name, names))

    @contextlib.contextmanager
    def _without_scaler_check(self) -> Iterator[None]:
        """While entered, parameter groups have nothing but parts; they may be changed."""
        check = self._scaler_check.parameter
        for group in self._local.param_groups:
            group["params"] = [part for part in group["params"] if part is not check]
        try:
            yield
        finally:
            self._finish_groups()

    def _finish_groups(self) -> None:
        """Follow the local optimizer's groups, as they are now."""
        self._publish()
        self._local.param_groups[-1]["params"].append(self._scaler_check.parameter)
        self._cut = self._parts.cut_of(self.whole_parameters)
        self._parts.reduce()

    def _take_values_back(self) -> None:
        """Put new values into the shared memory if the optimizer has given parts other memory."""
        for part, memory in self._memory.items():
            if part.data_ptr() != memory.data_ptr():
                memory.copy_(part)
                part.data = memory

    def _publish(self) -> None:
        if self._state is not None:
            self._state.publish(self._local.state, self._keys)
        self._published = [*self._local.state.values()]

    def _is_published(self) -> bool:
        """Whether the local optimizer has the same entries as when they were published."""
        entries = self._local.state.values()
        return len(entries) == len(self._published) and all(map(is_, entries, self._published))

    def _own_state(self) -> dict[Any, Any]:
        items = self._local.state.items()
        return {self._keys.get(part, part): copy.deepcopy(values) for part, values in items}


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _cost(parameter: Tensor) -> float:
    """What a step of a whole parameter costs: optimizers of matrices multiply by the shorter side."""
    return parameter.numel() * (min(parameter.shape) if parameter.dim() > 1 else 1)


def _check_loaded(state_dict: dict[str, Any], groups: Sequence[Sequence[Tensor]]) -> None:
    if strange := [key for key, values in state_dict["state"].items() if not isinstance(values, dict)]:
        raise OptionError(f"the loaded state has entries that are no dicts (keys: {strange[:3]})")
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [*map(len, groups)]
    if theirs != ours:
        raise OptionError(
            "the loaded state has other parameter groups than the optimizer "
            f"(parameters per group: {theirs} loaded, {ours} here)"
        )
