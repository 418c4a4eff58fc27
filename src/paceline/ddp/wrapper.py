"""DistributedDataParallel: one process a replica, gradients averaged over the ranks while backward runs."""

import contextlib
import copy
import functools
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.comm import group as groups
from paceline.comm import rpc
from paceline.comm.group import Group
from paceline.comm.torch_distributed import Joinable, first_bucket_bytes
from paceline.comm.verify import check_same
from paceline.ddp.buckets.plan import BucketCaps
from paceline.ddp.compat.environment import log_environment
from paceline.ddp.compat.logging_samples import Stats
from paceline.ddp.compat.strict import Strict
from paceline.ddp.compat.torch_names import TorchSurface, holds_wrapper
from paceline.ddp.exchange.average import Average, LowPrecisionAverage
from paceline.ddp.exchange.comm_hook import CommHook, check_hook
from paceline.ddp.exchange.generator_hook import GeneratorHook, run_registered
from paceline.ddp.join.uneven_inputs import UnevenInputs
from paceline.ddp.recorder_setup import make_recorder
from paceline.ddp.reducer.after_step import AfterStep
from paceline.ddp.reducer.autograd_hooks import at_start_of_backward, current_backward, during_backward
from paceline.ddp.reducer.planner import Planner
from paceline.ddp.reducer.reducer import BucketOptions, Reducer
from paceline.ddp.state import parameters as state
from paceline.ddp.state.admission import check_module, refuse_uninitialised
from paceline.ddp.state.broadcast import broadcast_state
from paceline.ddp.state.buffers import ModuleBuffers
from paceline.ddp.state.precision import Precision
from paceline.errors import OptionError, UnsupportedError, WrapError
from paceline.hooks.hook import Hook
from paceline.options import CapOptions, Transport, buffer_options, strict_mode
from paceline.recording.recorder import Recorder
from paceline.tensors import devices as dev
from paceline.tensors import tree
from paceline.tracing import is_being_traced, reduces_in_graph, untraced, untraced_with_calls

M = TypeVar("M", bound=nn.Module)


class DistributedDataParallel(UnevenInputs, TorchSurface):
    """Wraps a module so that every rank's backward leaves the gradients averaged over all ranks.

    No flag is needed for parameters that are unused on some ranks or all, frozen or thawed after wrapping,
    shared, checkpointed, or used outside forward: each gets the gradient that one process on the whole
    batch would give.

    Args:
        module: the module; its parameters must be equal in number, shape, type and strides on all ranks.
        device_ids: None, or the one device that holds the module, for a module on one accelerator.
        output_device: where outputs are, for a module on one accelerator; taken for torch's sake.
        dim: taken for torch's sake.
        broadcast_buffers: deprecated in torch; use ``forward_sync_buffers``.
        init_sync: check that ranks wrapped the same model and start it from rank 0's values.
        process_group: whom to average with; the default group if None.
        bucket_cap_mb: MiB of gradients that are reduced together; 25 by default, with a first bucket of 1.
        find_unused_parameters: taken for torch's sake; unused parameters need no flag.
        check_reduction: deprecated in torch, without effect.
        gradient_as_bucket_view: let gradients change in the next step, whoever holds them. They are parts of
            the buckets in any case, but otherwise a bucket of which somebody holds a part takes new memory.
        static_graph: taken for torch's sake; changing graphs need no flag.
        delay_all_reduce_named_params: names and parameters whose gradients are reduced last, all together.
        param_to_hook_all_reduce: the parameter whose gradient they wait for.
        mixed_precision: a ``paceline.MixedPrecision``, or a policy of torch's.
        device_mesh: a mesh of one dimension in the place of ``process_group``; where parameters
            are DTensors, the one over which they are equal.
        skip_all_reduce_unused_params: taken for torch's sake.
        bucket_cap_mb_list: MiB of each bucket in turn.
        batched_grad_copy: taken for torch's sake; small gradients are always copied together.
        forward_sync_buffers: make module buffers those of rank 0 before each forward; the default.
        rebuild_plan: after the first backward, order buckets by the arrival of gradients.
        strict: raise where torch's wrapper raises; by default as ``PACELINE_STRICT`` in the environment says.
        share_attributes: find attributes that the wrapper lacks on the module.
        transport: "auto" reduces in shared memory among ranks of one host, and over the process group between
            hosts; "c10d" leaves everything to the process group.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        rebuild_plan: bool = True,
        strict: bool | None = None,
        share_attributes: bool = False,
        transport: str = "auto",
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.process_group = groups.choose(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module = module
        self.dim = dim
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        refuse_uninitialised(module, self.parameters_to_ignore)
        self._delayed = state.delayed(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self._slots = state.collect(module, self.parameters_to_ignore, self._delayed)
        check_module(module, self._slots, self.parameters_to_ignore)
        self._place_module(device_ids, output_device)
        self._passing_sync_batchnorm_handle(module)
        self.forward_sync_buffers, init_buffers = buffer_options(
            broadcast=broadcast_buffers, forward_sync=forward_sync_buffers
        )
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.static_graph = False
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = 250 * 1024 * 1024
        self._caps = CapOptions(bucket_cap_mb, bucket_cap_mb_list, first_bucket_bytes())
        self._rebuild_plan = rebuild_plan
        self._strict = strict_mode(asked=strict)
        self._share_attributes = share_attributes
        self._transport = Transport(transport)
        if check_reduction:
            warnings.warn("`check_reduction` is deprecated and does nothing", FutureWarning, stacklevel=2)
        self._group = Group(self.process_group)
        log_environment(f"rank {self._group.rank} wraps {type(module).__name__}")
        state.refuse_shards(self._slots, self._group)
        self._buffers_in_module = ModuleBuffers(module, self.parameters_to_ignore)
        if init_sync:
            self._check_equal()
        self._share_memory()
        if init_sync:
            self._broadcast_state(source=0, buffers=init_buffers)
        self._build_reducer()
        if static_graph:
            self._set_static_graph()
        self._use_python_reducer = reduces_in_graph()
        if self._use_python_reducer:
            self._register_accum_grad_hook()

    @untraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; outputs are marked, so that their backward is synced."""
        if is_being_traced():  # by one rank alone, which draws the graph, so nothing can be exchanged
            return self.module(*inputs, **kwargs)
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            with self._noting_errors():
                inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            try:
                output = self._run_ddp_forward(*inputs, **kwargs)
            except BaseException as error:
                self._give_up(error)
                raise
            return self._post_forward(output, given=(inputs, kwargs))

    @untraced_with_calls
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._syncs_now():
            self._stats.begin_forward()
        if torch.is_grad_enabled():
            self.recorder.forward_began()
        if self._join_config.enable:
            self._attend(synced=self._syncs_now())
        if torch.is_grad_enabled():
            nested = self._holds_wrapper or self._get_active_ddp_module() is not None
            self.reducer.prepare(nested=nested)
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
            if torch.is_grad_enabled():
                self.recorder.buffers_synced()
        if self.device_ids:
            inputs, kwargs = tree.map_leaves(self._send, (inputs, kwargs))
        return inputs, kwargs

    @untraced
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        precision = self._precision
        with self._inside_ddp_forward():
            if precision is None:
                return self.module(*inputs, **kwargs)
            copies = precision.copies()
            inputs, kwargs = precision.cast_inputs(inputs, kwargs)
            with copies.in_place():
                output = self.module(*inputs, **kwargs)
            during_backward(rpc.leaves(output), copies.put, copies.take_out)
            return output

    @untraced_with_calls
    def _post_forward(self, output: Any, given: Any = ()) -> Any:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        synced = self._syncs_now()
        self.require_forward_param_sync = synced
        if torch.is_grad_enabled():
            self.recorder.forward_ended()
            if synced:
                self.reducer.turns.expect(self.reducer)
            begins = functools.partial(_begin_backward, weakref.ref(self.reducer), synced=synced)
            if (context := rpc.current_context()) is not None:
                output = self.reducer.distributed_autograd.watch(context, output, self.reducer.planner.order)
            at_start_of_backward(rpc.leaves(output), begins, but=rpc.leaves(given))
        return output

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward is synced; what ``no_sync`` switches off."""
        return self.reducer.syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, synced: bool) -> None:
        self.reducer.syncs = synced

    @property
    def recorder(self) -> Recorder:
        """Records this rank's steps; ``recorder.write(folder)`` writes what ``paceline report`` reads."""
        return self.reducer.recorder

    def _syncs_now(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    @untraced_with_calls
    def _give_up(self, error: BaseException) -> None:
        """Let the other ranks know that this one's forward raised, lest they wait for its gradients."""
        # Inside a backward it may be a checkpoint that has recomputed enough; if not, backward is lost by it.
        if self._syncs_now() and current_backward() == -1:
            try:
                self.reducer.turns.fail_forward(self.reducer, repr(error))
            except RuntimeError as another:
                error.add_note(f"the other ranks could not be told ({another})")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backward passes of forwards, or backward passes alone, in here."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def weigh(self, weight: float) -> contextlib.AbstractContextManager[None]:
        """Count what backward adds in here by its samples or tokens, instead of each rank the same.

        The gradients then are those of one process on the concatenated batch, whatever each rank's share of
        it, also over passes accumulated under ``no_sync`` (weigh each of them), and with ranks that have
        nothing (weight 0). Until they are averaged, ``.grad`` holds the sum of gradients times weights.
        """
        return self.reducer.weigh(weight)

    def backward(self, loss: Tensor, weight: float) -> None:
        """Run backward from a loss that is a mean over ``weight`` samples or tokens."""
        with self.weigh(weight):
            loss.backward()

    def _sync_buffers(self) -> None:
        self.reducer.after_step.wait_for(
            self._buffers_in_module.sync(
                self._group, source=self._buffer_source, bytes_at_once=self.broadcast_bucket_size
            )
        )

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Reduce buckets by a hook of ``(state, bucket)`` that returns a future of the reduced buffer.

        Or by one of ``paceline.hooks``, with None for the state.
        """
        with self._noting_errors():
            if isinstance(hook, Hook):
                self._use(run_registered(self._group, state, hook))
                return
            check_hook(hook)
            self._use(CommHook(self._group, state, hook))

    def _use(self, hook: CommHook | GeneratorHook) -> None:
        if isinstance(self.reducer.exchange, CommHook | GeneratorHook):
            raise UnsupportedError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self.reducer.use(hook)

    def module_state_dict(self) -> dict[str, Any]:
        """The module's own state dict, without the prefix ``module.``."""
        return self.module.state_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict, with the prefix ``module.`` or without."""
        inner = {*dict(self.module.named_parameters()), *dict(self.module.named_buffers())}
        prefixed = {f"module.{name}" for name in inner}
        if inner.isdisjoint(state_dict) or not prefixed.isdisjoint(state_dict):
            return nn.Module.load_state_dict(self, state_dict, strict, assign)
        return self.module.load_state_dict(state_dict, strict, assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            shared = self.__dict__.get("_share_attributes", False) and not name.startswith("__")
            if not shared or name == "module":
                raise
        # Outside the try, and past the module's own search: an error inside a property is shown as it is.
        static = getattr(type(self.module), name, None)
        if isinstance(static, property) and static.fget is not None:
            return static.fget(self.module)
        return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        if not groups.is_default(self.process_group):
            raise WrapError(
                "only a wrapper of the default process group can be copied or pickled; another group is "
                "not known elsewhere; pickle the module itself, and wrap it again"
            )
        attributes = copy.copy(self.__dict__)
        for name in (
            "process_group",
            "reducer",
            "_group",
            "_slots",
            "_buffers_in_module",
            "_stats",
            "_precision",
            "_accum_grad_hooks",
            "forward",
        ):
            attributes.pop(name, None)
        return attributes

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, attributes)
        self.process_group = groups.default_process_group()
        self._group = Group(self.process_group)
        self._slots = state.collect(self.module, self.parameters_to_ignore, self._delayed)
        self._buffers_in_module = ModuleBuffers(self.module, self.parameters_to_ignore)
        self._build_reducer()
        if self.static_graph and self.reducer.strict is not None:
            self.reducer.strict.static = True
        if self._use_python_reducer:
            self._register_accum_grad_hook()

    def _place_module(self, device_ids: Any, output_device: Any) -> None:
        parameters = self._slots.parameters
        found = {parameter.device for parameter in parameters}
        self.is_multi_device_module = len(found) > 1
        self.device = parameters[0].device
        self.device_type = self.device.type
        if device_ids and len(device_ids) > 1:
            raise OptionError(f"device_ids may name one device at most (device_ids: {device_ids})")
        self.device_ids: list[int] | None = None
        self.output_device: int | None = None
        if not device_ids or self.device_type == "cpu" or self.is_multi_device_module:
            if device_ids or output_device:
                raise OptionError(
                    "device_ids and output_device are for a module on one accelerator "
                    f"(device_ids: {device_ids}, output_device: {output_device}, "
                    f"module: {sorted(map(str, found))})"
                )
            return
        self.device_ids = [dev.resolve(device_ids[0]).index]
        output = device_ids[0] if output_device is None else output_device
        self.output_device = dev.resolve(output).index

    def _check_equal(self) -> None:
        options = [
            ("the bucket caps", repr(self._caps.sizes)),
            ("rebuild_plan", repr(self._rebuild_plan)),
            ("delayed parameters", repr(self._delayed)),
            ("mixed precision", repr(self.mixed_precision)),
            ("the transport", repr(self._transport.name)),
        ]
        check_same(self._group, state.describe(self._slots), options, self.device)

    def _broadcast_state(self, *, source: int, buffers: bool) -> None:
        broadcast_state(
            self._group,
            self.module,
            ignored=self.parameters_to_ignore,
            buffers=buffers,
            source=source,
            bytes_at_once=self.broadcast_bucket_size,
        )

    def _build_reducer(self) -> None:
        slots, parameters, trainable = self._slots
        planner = Planner(
            slots,
            trainable,
            first_caps=BucketCaps(self._caps.first_sizes),
            caps=BucketCaps(self._caps.sizes),
            rebuild=self._rebuild_plan and not (self._strict and self.find_unused_parameters),
        )
        self._precision = self._lower_precision()
        dtype = None if self._precision is None else self._precision.reduce_dtype
        self.reducer = Reducer(
            state.ReducedParameters(self._slots),
            self._group,
            Average(self._group) if self._precision is None else LowPrecisionAverage(self._group),
            planner,
            self._buffers_in_module,
            make_recorder(self.module, slots, parameters, caps=self._caps.sizes, device=self.device),
            AfterStep(parameters, self._precision),
            BucketOptions(as_views=self.gradient_as_bucket_view, dtype=dtype),
            strict=self._limits(trainable) if self._strict else None,
        )
        self._stats = Stats(self.reducer)
        self._holds_wrapper = holds_wrapper(self.module)

    def _limits(self, trainable: Sequence[int]) -> Strict:
        return Strict(
            self._slots.slots,
            trainable,
            rank=self._group.rank,
            finds_unused=self.find_unused_parameters,
            skips_unused=self.skip_all_reduce_unused_params,
        )

    def _lower_precision(self) -> Precision | None:
        if self.mixed_precision is None:
            return None
        return Precision(self.mixed_precision, self.module, self.parameters_to_ignore)

    def _send(self, leaf: Any) -> Any:
        return dev.send(leaf, self.device) if isinstance(leaf, Tensor) else leaf


def _begin_backward(reducer: "weakref.ref[Reducer]", *, synced: bool) -> None:
    # Weakly: a module that keeps its output would keep, through it, the wrapper that keeps the module.
    if (alive := reducer()) is not None:
        alive.begin(synced=synced)
