"""Names of torch's wrapper that its own tests and libraries reach for, beside those that users call."""

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm import group as groups
from paceline.comm.group import Group
from paceline.data_parallel.scatter_gather import gather, scatter_kwargs
from paceline.ddp.audit.audit import Audit
from paceline.ddp.compat.builtin_hooks import builtin_hook
from paceline.ddp.compat.logging_data import LoggingData
from paceline.ddp.compat.torch_reducer import TorchReducer
from paceline.ddp.compat.torch_wrapper import active
from paceline.ddp.exchange.comm_hook import FutureHookExchange
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.state.buffers import (
    BufferHook,
    BufferHookLocation,
    ModuleBuffers,
    broadcast_in_place,
)
from paceline.ddp.state.parameters import Slots
from paceline.ddp.state.wrapped_module import WrappedModule, move_tensors
from paceline.errors import OptionError, UnsupportedError
from paceline.options import WrapperOptions
from paceline.torch_private import as_overlapped_optimizer

# Attributes of torch's wrapper, and where the parts of ours have them.
ATTRIBUTES = {
    "dim": "_options.dim",
    "find_unused_parameters": "_options.find_unused_parameters",
    "gradient_as_bucket_view": "_options.gradient_as_bucket_view",
    "mixed_precision": "_options.mixed_precision",
    "skip_all_reduce_unused_params": "_options.skip_all_reduce_unused_params",
    "batched_grad_copy": "_options.batched_grad_copy",
    "lazy_bucket_allocation": "_options.lazy_bucket_allocation",
    "bucket_bytes_cap": "_options.caps.cap",
    "bucket_bytes_cap_list": "_options.caps.listed",
    "bucket_bytes_cap_default": "_options.caps.is_default",
    "device": "_wrapped.device",
    "device_type": "_wrapped.device.type",
    "device_ids": "_wrapped.device_ids",
    "output_device": "_wrapped.output_device",
    "is_multi_device_module": "_wrapped.is_multi_device",
    "parameters_to_ignore": "_wrapped.ignored",
    "_distributed_rank": "_group.rank",
    "_has_rebuilt_buckets": "_reducer.uses_rebuilt_plan",
    "_authoritative_rank": "_uneven_inputs.final_rank",
    "_check_manual_backward_finalization_supported": "_finalization.check_supported",
}

# Inner steps of torch's wrapper, which would work on parts that ours does not have.
INNER_STEPS = (
    *("_find_common_rank", "_sync_module_buffers", "_sync_final_model"),
    *("_check_and_sync_module_buffers", "_check_global_requires_backward_grad_sync"),
    *("_match_all_reduce_for_bwd_pass", "_match_unused_params_allreduce"),
    *("_setup_in_backward_optimizers", "_lazy_init", "_root_copy_hook"),
    *("_module_wait_for_copy_hook", "_fire_reducer_autograd_hook", "_register_accum_grad_hook"),
    *("_register_delay_all_reduce_hook", "_delayed_all_reduce_hook", "_clear_grad_buffer"),
    *("_ddp_init_helper", "_assign_modules_buffers", "_passing_sync_batchnorm_handle"),
    *("_get_parameters", "_log_and_throw", "_check_comm_hook", "_check_default_group"),
)


class WrapperParts(Protocol):
    """What is needed here of our wrapper."""

    module: nn.Module
    process_group: Any
    static_graph: bool
    _options: WrapperOptions
    _wrapped: WrappedModule
    _group: Group
    _module_buffers: ModuleBuffers
    _reducer: Reducer
    _logging: LoggingData
    _accum_grad_hooks: Sequence[RemovableHandle]

    def _use_hook(self, hook: FutureHookExchange) -> None:
        """Reduce buckets by a hook from now on."""

    def _audit(self) -> Audit | None:
        """What compares replicas in the group that it has."""


class TorchNames:
    """Answers for the wrapper when it is asked for a name of torch's; made anew each time.

    Args:
        wrapper: our wrapper.
    """

    logger = None  # torch passes it to its C++ code, which takes None

    def __init__(self, wrapper: WrapperParts) -> None:
        self._wrapper = wrapper

    def __getattr__(self, name: str) -> Any:
        if name in ATTRIBUTES:
            return operator.attrgetter(ATTRIBUTES[name])(self._wrapper)
        if name in INNER_STEPS:
            return functools.partial(_refuse, name)
        raise AttributeError(f"torch's wrapper has no attribute {name!r} that ours answers for", name=name)

    @property
    def reducer(self) -> TorchReducer:
        """Our reducer under the names of torch's."""
        return TorchReducer(self._wrapper._reducer)

    def _set_static_graph(self) -> None:
        wrapper = self._wrapper
        if wrapper.static_graph:
            warnings.warn("the graph was declared static before", stacklevel=2)
            return
        with wrapper._logging.noting_errors():
            if wrapper._reducer.step_number:
                raise UnsupportedError("_set_static_graph should be called before training loop starts")
        wrapper.static_graph = True
        if wrapper._reducer.strict is not None:
            wrapper._reducer.strict.static = True
        if wrapper._options.find_unused_parameters:
            warnings.warn(
                "find_unused_parameters=True is not needed with a static graph, which finds them by itself",
                stacklevel=2,
            )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accepted for compatibility, no effect: outputs are never cloned."""

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Accepted for compatibility, no effect: sparse gradients are sent with their indices."""

    # Parameters

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        named = self._wrapper.module.named_parameters()
        return [parameter for name, parameter in named if name not in self._wrapper._wrapped.ignored]

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        slots, parameters, trainable = self._wrapper._wrapped.params
        return [parameters[index] for index in trainable], [slots[index].sparse for index in trainable]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        wrapper = self._wrapper
        names = {
            id(parameter): slot.name for slot, parameter in zip(*wrapper._wrapped.params[:2], strict=True)
        }
        for name, parameter in wrapper.module.named_parameters():
            reduced = parameter.requires_grad and name not in wrapper._wrapped.ignored
            if reduced and not any(parameter is given for given in parameters):
                raise OptionError(f"Param with name {name} is trained, but not among those given")
        if len(parameters) != len({id(parameter) for parameter in parameters} & names.keys()):
            raise OptionError(
                "Expected param to name mapping of the wrapper's own parameters, each given once "
                f"(given: {len(parameters)}, known: {len(names)})"
            )
        return {index: names[id(parameter)] for index, parameter in enumerate(parameters)}

    # Module buffers

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Module buffers that are not ignored, by name."""
        return self._wrapper._module_buffers.named()

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Module buffers that are not ignored."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward makes module buffers equal."""
        return self._wrapper._module_buffers.will_sync()

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self._wrapper._module_buffers.will_sync(BufferHookLocation.PRE_FORWARD)

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self._wrapper._module_buffers.will_sync(BufferHookLocation.POST_FORWARD)

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Any = BufferHookLocation.POST_FORWARD,
    ) -> None:
        if not callable(hook):
            raise AssertionError(f"a hook for module buffers must be callable (hook: {hook!r})")
        # torch's own enumeration has the same names.
        location = BufferHookLocation[comm_hook_location.name]
        self._wrapper._module_buffers.hook = BufferHook(state, hook, location)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else list(bufs),
            bucket_size or self._wrapper._module_buffers.settings.bytes_at_once,
            authoritative_rank,
        )

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_in_place(
            self._wrapper._group, tensors, source=authoritative_rank, bytes_at_once=buffer_size
        )

    # The reducer and its group

    def _remove_autograd_hooks(self) -> None:
        self._wrapper._reducer.grad_hooks.remove()
        for hook in self._wrapper._accum_grad_hooks:
            hook.remove()

    def _check_reducer_finalized(self) -> None:
        self._wrapper._reducer.check_finished()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Continue with another group, of any size; ranks that are not in it keep what they have."""
        wrapper = self._wrapper
        if groups.belongs_to(new_process_group):
            wrapper.process_group = new_process_group
            wrapper._group = Group(new_process_group)
            wrapper._group.agree_on_name(wrapper._wrapped.device)
            wrapper._wrapped.open_transports(
                wrapper._group, may_share_memory=wrapper._options.may_share_memory
            )
            wrapper._reducer.move_to(wrapper._group, audit=wrapper._audit())

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Average by one of torch's built-in hooks, given its type."""
        group = self._wrapper._group
        make = functools.partial(builtin_hook, kind=comm_hook_type)
        self._wrapper._use_hook(
            FutureHookExchange(group, None, make(group), name=str(comm_hook_type), remake=make)
        )

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step one of torch's optimizers on each bucket as soon as it is averaged."""
        if optim_params is not None:
            optim_params = list(optim_params)
            _check_own(optim_params, self._wrapper._wrapped.params)
        try:
            as_overlapped_optimizer(optim, optim_params, *args, **kwargs).register_ddp(self._wrapper)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{optim.__name__} does not support overlapped DDP, only stepping after backward"
            ) from error
        self._wrapper._reducer.accumulation.no_weights = (
            "contributions cannot be weighed with a fused optimizer: it would step on sums that are not "
            "divided yet"
        )

    # The forward and its arguments

    def _inside_ddp_forward(self) -> contextlib.AbstractContextManager[None]:
        return active(self._wrapper)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> tuple[Any, Any]:
        """Arguments moved to a device, as one-element tuples of arguments and keywords."""
        device = torch.device(self._wrapper._wrapped.device.type, device_id)
        inputs, kwargs = move_tensors((inputs, kwargs), device)
        return (inputs,), (kwargs,)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Arguments cut into one chunk per device."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self._wrapper._options.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Outputs of several devices joined on one."""
        return gather(outputs, output_device, dim=self._wrapper._options.dim)

    # Logging

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        wrapper = self._wrapper
        wrapped = wrapper._wrapped
        return wrapper._logging.data(
            device_ids=", ".join(map(str, wrapped.device_ids or ())),
            output_device=-1 if wrapped.output_device is None else wrapped.output_device,
            broadcast_buffers=int(wrapper._module_buffers.settings.in_forward),
            static_graph=int(wrapper.static_graph),
        )

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._wrapper._logging.set_sample_rate(sample_rate)


# Every name that TorchNames answers for.
TORCH_NAMES = frozenset(
    (*ATTRIBUTES, *INNER_STEPS, *(name for name in vars(TorchNames) if not name.startswith("__")))
)


class TorchName:
    """One of these names as an attribute of the wrapper's class, so that subclasses can extend it.

    Args:
        name: the name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(TorchNames(wrapper), self._name)

    def __call__(self, wrapper: WrapperParts, *args: Any, **kwargs: Any) -> Any:
        """Call it as a method of the class, with the wrapper as first argument."""
        return getattr(TorchNames(wrapper), self._name)(*args, **kwargs)


def add_torch_names(wrapper: type) -> None:
    """Give the wrapper's class every name that TorchNames answers for, and that it has not itself."""
    for name in TORCH_NAMES - vars(wrapper).keys():
        setattr(wrapper, name, TorchName(name))


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        f"{name} is an inner step of torch's wrapper; docs/mapping.md says where paceline does its job"
    )


def _check_own(parameters: Sequence[Tensor], params: Slots) -> None:
    own = {id(parameter) for parameter in params.parameters}
    foreign = [position for position, parameter in enumerate(parameters) if id(parameter) not in own]
    if foreign:
        raise OptionError(
            "an optimizer in backward can step the wrapped module's parameters only "
            f"(of the {len(parameters)} given, not its own: {foreign})"
        )
