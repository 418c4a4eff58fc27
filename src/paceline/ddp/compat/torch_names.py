"""Names of torch's wrapper that its own tests and libraries reach for, beside those that users call.

Each does the job that it has in torch; ``distributed.py`` has what a step is made of.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm import group as groups
from paceline.comm.group import Group
from paceline.comm.torch_distributed import as_overlapped_optimizer
from paceline.data_parallel.scatter_gather import gather, scatter_kwargs
from paceline.ddp.compat.builtin_hooks import builtin_hook
from paceline.ddp.compat.logging_data import construction_data
from paceline.ddp.compat.logging_samples import Stats
from paceline.ddp.exchange.comm_hook import CommHook
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.reducer.variants.compiled_graph import traced_reduction
from paceline.ddp.state.buffers import BufferHook, BufferHookLocation, ModuleBuffers, broadcast_in_place
from paceline.ddp.state.parameters import Slots
from paceline.errors import OptionError, UnsupportedError
from paceline.options import CapOptions, Transport
from paceline.tensors import devices as dev
from paceline.tensors import tree
from paceline.tracing import fuse_reductions, untraced

# torch.compile asks torch's own class which wrapper is at work.
# Untyped, because what torch keeps in attributes we often derive.
_Torch: Any = nn.parallel.DistributedDataParallel


class TorchSurface(_Torch):  # type: ignore[misc]
    """What the wrapper has in common with torch's beside what users call.

    It is torch's wrapper by type only, so that ``isinstance`` checks in other code hold.
    """

    module: nn.Module
    reducer: Reducer
    process_group: Any
    dim: int
    device: torch.device
    device_type: str
    device_ids: list[int] | None
    output_device: int | None
    static_graph: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    broadcast_bucket_size: int
    parameters_to_ignore: set[str]
    logger: Any = None  # torch hands it to its C++ code, which takes None
    _caps: CapOptions
    _group: Group
    _slots: Slots
    _transport: Transport
    _buffers_in_module: ModuleBuffers
    _stats: Stats
    mixed_precision: Any
    _use: Callable[[CommHook], None]
    _accum_grad_hooks: Sequence[RemovableHandle] = ()

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes of the largest bucket."""
        return self._caps.cap

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """Bytes of each bucket in turn, if they were listed."""
        return self._caps.listed

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether the first bucket is smaller than the others."""
        return self._caps.is_default

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("the graph was said to be static before", stacklevel=2)
            return
        with self._noting_errors():
            if self.reducer.step_number:
                raise UnsupportedError("_set_static_graph should be called before training loop starts")
        self.static_graph = True
        if self.reducer.strict is not None:
            self.reducer.strict.static = True
        if self.find_unused_parameters:
            warnings.warn(
                "find_unused_parameters=True is not needed with a static graph, which finds them by itself",
                stacklevel=2,
            )

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether the plan in force is the one that the first backward taught; torch's ZeRO hooks ask."""
        return self.reducer.uses_rebuilt_plan

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are marked, never cloned: there is nothing to switch off."""

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        named = self.module.named_parameters()
        return [parameter for name, parameter in named if name not in self.parameters_to_ignore]

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        slots, parameters, trainable = self._slots
        return [parameters[index] for index in trainable], [slots[index].sparse for index in trainable]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        names = {id(parameter): slot.name for slot, parameter in zip(*self._slots[:2], strict=True)}
        for name, parameter in self.module.named_parameters():
            reduced = parameter.requires_grad and name not in self.parameters_to_ignore
            if reduced and not any(parameter is given for given in parameters):
                raise OptionError(f"Param with name {name} is trained, but not among those given")
        if len(parameters) != len({id(parameter) for parameter in parameters} & names.keys()):
            raise OptionError(
                "Expected param to name mapping of the wrapper's own parameters, each given once "
                f"(given: {len(parameters)}, known: {len(names)})"
            )
        return {index: names[id(parameter)] for index, parameter in enumerate(parameters)}

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Module buffers that are not ignored, by name."""
        return self._buffers_in_module.named()

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Module buffers that are not ignored."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward makes module buffers equal."""
        return self.require_forward_param_sync and self.forward_sync_buffers and self._buffers_in_module.any

    def _check_sync_bufs_pre_fwd(self) -> bool:
        hook = self._buffers_in_module.hook
        before = hook is None or hook.location is BufferHookLocation.PRE_FORWARD
        return before and self.will_sync_module_buffers()

    def _check_sync_bufs_post_fwd(self) -> bool:
        hook = self._buffers_in_module.hook
        after = hook is not None and hook.location is BufferHookLocation.POST_FORWARD
        return after and self.will_sync_module_buffers()

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Any = BufferHookLocation.POST_FORWARD,
    ) -> None:
        if not callable(hook):
            raise AssertionError(f"a hook for module buffers is something to call (hook: {hook!r})")
        # torch's own enumeration has the same names.
        location = BufferHookLocation[comm_hook_location.name]
        self._buffers_in_module.hook = BufferHook(state, hook, location)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        buffers = self.modules_buffers if bufs is None else list(bufs)
        self._distributed_broadcast_coalesced(
            buffers, bucket_size or self.broadcast_bucket_size, authoritative_rank
        )

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_in_place(self._group, tensors, source=authoritative_rank, bytes_at_once=buffer_size)

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Taken for torch's sake: which rows were touched travels with them."""

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        for name, layer in module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm) and self.device_type == "cpu":
                raise OptionError(
                    f"SyncBatchNorm layers only work with GPU modules (layer: {name!r}, device: cpu)"
                )

    def _register_accum_grad_hook(self) -> None:
        """Leave the averaging to hooks that compiled autograd can trace, and the forward to the module."""
        if self.mixed_precision is not None:
            raise OptionError("mixed precision and reductions in a compiled graph exclude each other")
        self.reducer.grad_hooks.remove()
        reduce = traced_reduction(self.reducer)
        self._accum_grad_hooks = [
            parameter.register_post_accumulate_grad_hook(reduce)
            for parameter in self._module_parameters
            if parameter.requires_grad
        ]
        setattr(self, "forward", MethodType(_traced_forward, self))  # noqa: B010  # it has a type in subclasses
        fuse_reductions(self._caps.cap)

    def _remove_autograd_hooks(self) -> None:
        self.reducer.grad_hooks.remove()
        for hook in self._accum_grad_hooks:
            hook.remove()

    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finished()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with another group, of any size; ranks that are not in it keep what they have."""
        if groups.belongs_to(new_process_group):
            self.process_group = new_process_group
            self._group = Group(new_process_group)
            self._share_memory()
            self.reducer.move_to(self._group)

    def _share_memory(self) -> None:
        """Reduce in shared memory where that can be done; every rank of the group does this at once."""
        if self._transport.may_share and self.device_type == "cpu":
            self._group.share_memory(nbytes=sum(slot.nbytes for slot in self._slots.slots))

    @property
    def _distributed_rank(self) -> int:
        return self._group.rank

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {
            **construction_data(self.module, self.reducer, self._slots.parameters),
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self._caps.cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "join_uneven_inputs": int(self._stats.joins_uneven_inputs),
            "iteration": 0,
            **self._stats.sampled,
            **self._last_error(),
        }

    def _last_error(self) -> dict[str, Any]:
        strict = self.reducer.strict
        error = self.reducer.last_error or (strict.error if strict is not None else None)
        return {} if error is None else {"has_error": 1, "error": error}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise OptionError(
                f"one iteration in so many is sampled, so at least 1 (sample_rate: {sample_rate})"
            )
        self._stats.sample_rate = sample_rate

    @contextlib.contextmanager
    @untraced
    def _noting_errors(self) -> Iterator[None]:
        """Keep word of an error for the logging data."""
        try:
            yield
        except Exception as error:
            self.reducer.last_error = f"{type(error).__name__}: {error}"
            raise

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Average by a hook of torch's own, named by its type."""
        make = partial(builtin_hook, kind=comm_hook_type)
        self._use(CommHook(self._group, None, make(self._group), name=str(comm_hook_type), remake=make))

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step an optimizer of torch's on each bucket as soon as it is averaged."""
        if optim_params is not None:
            optim_params = list(optim_params)
            self._refuse_foreign(optim_params)
        try:
            as_overlapped_optimizer(optim, optim_params, *args, **kwargs).register_ddp(self)
            self.reducer.accumulation.no_weights = (
                "a fused optimizer steps before weights are known, so contributions cannot be weighed"
            )
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{optim.__name__} does not support overlapped DDP, only stepping after backward"
            ) from error

    def _refuse_foreign(self, parameters: Sequence[Tensor]) -> None:
        own = {id(parameter) for parameter in self._slots.parameters}
        foreign = [place for place, parameter in enumerate(parameters) if id(parameter) not in own]
        if foreign:
            raise OptionError(
                "an optimizer in backward can step the wrapped module's parameters only "
                f"(of the {len(parameters)} given, not its own: {foreign})"
            )

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return _Torch._active_ddp_module

    @contextlib.contextmanager
    @untraced
    def _inside_ddp_forward(self) -> Iterator[None]:
        outer = _Torch._active_ddp_module
        _Torch._active_ddp_module = self
        try:
            yield
        finally:
            _Torch._active_ddp_module = outer

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> tuple[Any, Any]:
        """Arguments moved to a device, as one-element tuples of arguments and keywords."""
        device = torch.device(self.device_type, device_id)
        moved = tree.map_leaves(
            lambda leaf: dev.send(leaf, device) if isinstance(leaf, Tensor) else leaf, (inputs, kwargs)
        )
        return (moved[0],), (moved[1],)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Arguments cut over devices."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Outputs of several devices joined on one."""
        return gather(outputs, output_device, dim=self.dim)


def holds_wrapper(module: nn.Module) -> bool:
    """Whether a wrapper, torch's or ours, is among the module's parts."""
    return any(isinstance(part, _Torch) for part in module.modules())


def _traced_forward(self: TorchSurface, *inputs: Any, **kwargs: Any) -> Any:
    return self.module(*inputs, **kwargs)


def _elsewhere(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"{name} is an inner step of torch's wrapper; docs/mapping.md says where paceline does its job"
        )

    return refuse


# Methods of torch's class that would work on parts which ours does not have.
for _name in (
    *("_find_common_rank", "_sync_module_buffers"),
    *("_check_and_sync_module_buffers", "_check_global_requires_backward_grad_sync"),
    *("_match_all_reduce_for_bwd_pass", "_match_unused_params_allreduce"),
    *("_setup_in_backward_optimizers", "_lazy_init", "_root_copy_hook"),
    *("_module_wait_for_copy_hook", "_fire_reducer_autograd_hook"),
    *("_register_delay_all_reduce_hook", "_delayed_all_reduce_hook", "_clear_grad_buffer"),
    *("_ddp_init_helper", "_assign_modules_buffers"),
):
    setattr(TorchSurface, _name, _elsewhere(_name))
