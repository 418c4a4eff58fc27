"""DistributedDataParallel: one process per replica, gradients averaged across ranks while backward runs."""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.hooks import RemovableHandle

from paceline.comm import group as groups
from paceline.comm import rpc
from paceline.comm.group import Group
from paceline.comm.torch_distributed import Join, Joinable, JoinAlone, JoinHook
from paceline.ddp import build
from paceline.ddp.audit.audit import Audit
from paceline.ddp.compat import torch_wrapper
from paceline.ddp.compat.logging_data import LoggingData
from paceline.ddp.compat.torch_names import TorchNames, add_torch_names
from paceline.ddp.exchange.comm_hook import FutureHookExchange, check_hook
from paceline.ddp.exchange.generator_hook import GeneratorHookExchange, check_state, exchange_for_hook
from paceline.ddp.exchange.part_average import PartAverage
from paceline.ddp.join.uneven_inputs import UnevenInputs
from paceline.ddp.reducer.autograd_hooks import at_start_of_backward, current_backward, during_backward
from paceline.ddp.shard_loop import ShardProgress, Shards, agree_on_seed, fix_threads
from paceline.ddp.state.buffers import BufferHookLocation, BufferSettings, ModuleBuffers
from paceline.ddp.state.parameters import UnknownParameters, delayed_names
from paceline.ddp.state.wrapped_module import attribute_of, wrap_module
from paceline.errors import StepError, UnsupportedError, WrapError
from paceline.hooks.auto import Auto, auto
from paceline.hooks.hook import Hook
from paceline.options import CapOptions, WrapperOptions, hook_signature, strict_mode
from paceline.recording.recorder import Recorder
from paceline.torch_private import FIRST_BUCKET_BYTES
from paceline.tracing import break_graph, is_being_traced, reduces_in_graph, untraced, untraced_with_calls
from paceline.watch.error_words import describe_error
from paceline.watch.rank_page import Activity


class DistributedDataParallel(nn.Module, Joinable):
    """Wraps a module so that each backward leaves gradients that are averaged across all ranks.

    Parameters need no flag if some ranks or all of them do not use them, if they are frozen or unfrozen after
    wrapping, shared, checkpointed, or used outside forward. Each gets the gradient that one process would
    compute on the whole batch.

    Args:
        module: the module; its parameters must be equal in number, shape, type and strides on all ranks.
        device_ids: None, or the one device that holds the module, for a module on one accelerator.
        output_device: accepted for compatibility, no effect: outputs stay where the module leaves them.
        dim: accepted for compatibility, no effect.
        broadcast_buffers: deprecated in torch; use ``forward_sync_buffers``.
        init_sync: check that ranks wrapped the same model, and start all of them from rank 0's values.
        process_group: the ranks to average with; the default group if None.
        bucket_cap_mb: MiB of gradients that are reduced together; 25 by default, with a first bucket of 1.
        find_unused_parameters: accepted for compatibility, no effect outside strict mode: unused parameters
            need no flag.
        check_reduction: deprecated in torch, no effect.
        gradient_as_bucket_view: let gradients change in the next step, even if somebody still holds them.
            Gradients are parts of the buckets in any case; without this option a bucket takes new memory if
            somebody holds a part of it.
        static_graph: accepted for compatibility, no effect outside strict mode: graphs that change need no
            flag.
        delay_all_reduce_named_params: names and parameters whose gradients are reduced last, all together.
        param_to_hook_all_reduce: the parameter whose gradient they wait for.
        mixed_precision: a ``paceline.MixedPrecision``, or one of torch's policies.
        device_mesh: a mesh of one dimension instead of ``process_group``; where parameters are DTensors, the
            mesh over which they are equal.
        skip_all_reduce_unused_params: accepted for compatibility, no effect outside strict mode.
        bucket_cap_mb_list: MiB of each bucket in turn.
        batched_grad_copy: accepted for compatibility, no effect: small gradients are always copied together.
        forward_sync_buffers: make module buffers equal to those of rank 0 before each forward; the default.
        lazy_bucket_allocation: allocate a bucket's memory when its first gradient is ready, and release it
            when ``zero_grad()`` has dropped its gradients. Saves memory in forward, and costs time.
        rebuild_plan: after the first backward, order buckets as the gradients became ready.
        strict: raise where torch's wrapper raises; by default as the environment variable
            ``PACELINE_STRICT`` says.
        share_attributes: look up attributes on the module that the wrapper does not have.
        transport: "auto" reduces in shared memory among ranks of one host, and over the process group between
            hosts; "c10d" does everything over the process group.
        audit: what to do when replicas differ: "warn", "raise", "heal" (take over the value of most ranks),
            "heal-from-rank-0", or "off" for not to look. By default "warn" on CPUs, "off" on accelerators.
        shards: the number of shards of each step's batch, on all ranks together. Train in
            ``for inputs in ddp.shards(batch)``; the result has the same bits for every number of ranks.
        hook: one of ``paceline.hooks``, as by ``register_comm_hook(None, hook)``; "auto" is ``hooks.auto()``.
    """

    # What torch asks of the class.
    _set_params_and_buffers_to_ignore_for_model = staticmethod(torch_wrapper.ignore_names)
    _get_data_parallel_params = staticmethod(torch_wrapper.managed_parameters)
    _get_active_ddp_module = staticmethod(torch_wrapper.active_wrapper)
    _active_ddp_module = torch_wrapper.ActiveWrapper()

    # Of the class, because older pickles have none.
    _finalizes_manually = False
    _shard_progress: ShardProgress
    # The parameters in memory that the ranks of a host share, if an optimizer has moved them there.
    _host_parameters: Any = None
    # Gives this rank's shards of a step's batch; only with ``shards``.
    shards: Shards
    _name = ""

    require_backward_grad_sync: bool = torch_wrapper.kept_in(
        "_reducer", "syncs", "Whether a backward is synced; ``no_sync`` switches it off."
    )
    require_forward_param_sync: bool = torch_wrapper.kept_in(
        "_buffer_settings", "required", "Whether the next forward may make module buffers equal."
    )
    forward_sync_buffers: bool = torch_wrapper.kept_in(
        "_buffer_settings", "in_forward", "Whether forwards make module buffers equal."
    )
    broadcast_buffers: bool = torch_wrapper.kept_in(
        "_buffer_settings", "in_forward", "The older name of ``forward_sync_buffers``."
    )
    broadcast_bucket_size: int = torch_wrapper.kept_in(
        "_buffer_settings", "bytes_at_once", "Bytes per broadcast of parameters and module buffers."
    )

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
        lazy_bucket_allocation: bool = False,
        *,
        rebuild_plan: bool = True,
        strict: bool | None = None,
        share_attributes: bool = False,
        transport: Literal["auto", "c10d"] = "auto",
        audit: Literal["warn", "raise", "heal", "heal-from-rank-0", "off"] | None = None,
        shards: int | None = None,
        hook: Hook | Literal["auto"] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        if isinstance(hook, str) and hook == "auto":
            hook = auto()
        self.process_group = groups.choose(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._options = WrapperOptions(
            caps=CapOptions(bucket_cap_mb, bucket_cap_mb_list, FIRST_BUCKET_BYTES),
            delayed=delayed_names(module, delay_all_reduce_named_params, param_to_hook_all_reduce),
            dim=dim,
            init_sync=init_sync,
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            mixed_precision=mixed_precision,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
            lazy_bucket_allocation=lazy_bucket_allocation,
            rebuild_plan=rebuild_plan,
            strict=strict_mode(asked=strict),
            share_attributes=share_attributes,
            transport=transport,
            audit=audit,
            shards=shards,
            hook=hook_signature(hook, Hook),
        )
        self.module = module
        self.static_graph = False
        self._use_python_reducer = reduces_in_graph()
        self._wrapped = wrap_module(
            module, self._options.delayed, device_ids=device_ids, output_device=output_device
        )
        self._group = Group(self.process_group)
        self._buffer_settings = BufferSettings(
            in_forward=self._options.syncs_buffers_in_forward(ranks_change=self._group.may_change)
        )
        build.start_equal(self._wrapped, self._group, self._options, bytes_at_once=self.broadcast_bucket_size)
        self._name = self._group.wrapper
        if shards is not None:
            fix_threads()
            self._shard_progress = ShardProgress(agree_on_seed(self._group, self._wrapped.device))
        self._build_parts()
        if static_graph:
            TorchNames(self)._set_static_graph()
        if hook is not None:
            self.register_comm_hook(None, hook)

    def _build_parts(self) -> None:
        """Build what a copy of the wrapper does not take over."""
        self._has_auto_hook = False
        self._owner = os.getpid()
        self._module_buffers = ModuleBuffers(self.module, self._wrapped.ignored, self._buffer_settings)
        self._unknown_parameters = UnknownParameters(
            self.module, self._wrapped.params.parameters, self._wrapped.ignored
        )
        self._precision = build.make_precision(self._wrapped, self._options)
        self._reducer = build.build_reducer(
            self._wrapped,
            self._group,
            self._module_buffers,
            self._precision,
            self._options,
            static_graph=self.static_graph,
        )
        self._finalization = build.manual_finalization(
            self._reducer,
            self._options,
            in_graph=self._use_python_reducer,
            required=self._finalizes_manually,
        )
        self._logging = LoggingData(self._wrapped, self._reducer, self._options)
        self._uneven_inputs = UnevenInputs(self._wrapped, self._reducer, self._module_buffers)
        if (sums := self._reducer.context.shard_sums) is not None:
            self.shards = Shards(
                self._reducer,
                sums,
                self._module_buffers,
                self._sync_buffers,
                self._wrapped.device,
                self._shard_progress,
            )
        self._holds_wrapper = torch_wrapper.holds_wrapper(self.module)
        self._accum_grad_hooks: Sequence[RemovableHandle] = ()
        if self._use_python_reducer:
            self._accum_grad_hooks = build.reduce_in_graph(self._reducer, self._wrapped, self._options)
            # In an attribute, so that the module's forward is traced, and not ours.
            setattr(self, "forward", MethodType(_forward_of_module, self))  # noqa: B010  # mypy refuses to assign to a method

    @untraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; the end of backward over its outputs leaves averaged gradients."""
        if is_being_traced():  # by one rank alone, to draw the graph, so nothing can be exchanged
            return self.module(*inputs, **kwargs)
        break_graph(self)
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            with self._logging.noting_errors():
                inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            try:
                output = self._run_ddp_forward(*inputs, **kwargs)
            except BaseException as error:
                self._fail_forward(error)
                raise
            return self._post_forward(output, given=(inputs, kwargs))

    @untraced_with_calls
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if os.getpid() != self._owner:
            raise StepError(
                "a wrapper cannot be called in a forked child, which would take its parent's place among the "
                "ranks; call the module itself (wrapper.module)"
            )
        self._group.watch.mark(Activity.FORWARD, self._reducer.step_number)
        if torch.is_grad_enabled():
            if self._group.awaits_others:
                raise StepError("with `paceline run --heal`, ranks train together only inside paceline.Run")
            self._reducer.check_finalized()
            self._unknown_parameters.warn(is_step_new=self._reducer.is_step_new)
            self.recorder.forward_began()
        else:
            self.recorder.evaluation_began()
        synced = self._syncs_now()
        self._reducer.turns.finish_telling(self._group)
        if synced:
            self._reducer.before_forward(may_repeat=self._join_config.enable or not self.module.training)
            self._logging.begin_forward()
        if self._join_config.enable:
            self._reducer.turns.finish_launched()
            self._uneven_inputs.begin_forward(self, synced=synced)
            if torch.is_grad_enabled():
                self.recorder.joined()
        if torch.is_grad_enabled():
            is_inside = torch_wrapper.active_wrapper() is not None
            self._reducer.prepare(nested=self._holds_wrapper or is_inside)
        self._reducer.context.end_buffer_watch()
        if self._module_buffers.will_sync(BufferHookLocation.PRE_FORWARD):
            self._sync_buffers()
            if torch.is_grad_enabled():
                self.recorder.buffers_synced()
        return self._wrapped.move_inputs(inputs, kwargs)

    @untraced
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        precision = self._precision
        with torch_wrapper.active(self):
            if precision is None:
                return self.module(*inputs, **kwargs)
            copies = precision.copies()
            inputs, kwargs = precision.cast_inputs(inputs, kwargs)
            with copies.in_place():
                output = self.module(*inputs, **kwargs)
            during_backward(rpc.leaves(output), copies.install, copies.restore)
            return output

    @untraced_with_calls
    def _post_forward(self, output: Any, given: Any = ()) -> Any:
        self._sync_buffers_after_forward()
        self._group.watch.mark(Activity.OUTSIDE, self._reducer.step_number)
        synced = self._syncs_now()
        if not torch.is_grad_enabled():
            self.recorder.evaluation_ended()
            self._reducer.context.begin_buffer_watch()
        else:
            self.recorder.forward_ended()
            if synced:
                self._reducer.expect_backward(training=self.module.training)
            if (context := rpc.current_context()) is not None:
                output = self._reducer.watch_context(context, output)
            at_start_of_backward(
                rpc.leaves(output), self._reducer.begin, synced=synced, but=rpc.leaves(given)
            )
        return output

    def _sync_buffers_after_forward(self) -> None:
        if self._module_buffers.will_sync(BufferHookLocation.POST_FORWARD):
            self._sync_buffers()
        self.require_forward_param_sync = self._syncs_now()

    def _sync_buffers(self) -> None:
        self._reducer.turns.finish_launched()
        step = self._reducer.step_number
        with self._group.watch.waiting(Activity.BUFFERS, step, then=Activity.FORWARD):
            futures = self._module_buffers.sync(self._group)
        self._reducer.after_step.wait_after_step(futures)

    def _syncs_now(self) -> bool:
        return torch.is_grad_enabled() and self._reducer.syncs

    @untraced_with_calls
    def _fail_forward(self, error: BaseException) -> None:
        """Tell the other ranks that forward raised here, so that they do not wait for gradients."""
        if not torch.is_grad_enabled():
            self.recorder.evaluation_ended()
        elif current_backward() == -1:
            self.recorder.forward_ended()
        # Inside a backward it may be a checkpoint that has recomputed enough. If not, backward raises too.
        if self._syncs_now() and current_backward() == -1:
            try:
                self._reducer.turns.fail_forward(self._reducer, describe_error(error))
            except RuntimeError as another:
                error.add_note(f"the other ranks could not be told ({another})")

    def _go_on_in(self, process_group: Any, *, step: int) -> None:
        """Go on in another group, whose ranks have wrapped the same; every rank of it calls this at once.

        Args:
            process_group: the group.
            step: the number of the next step, the same on all ranks.
        """
        self.process_group = process_group
        self._group = group = Group(process_group)
        build.open_group(self._wrapped, group, self._options)
        self._name = group.wrapper
        self._reducer.move_to(group, step=step, audit=self._audit(), has_lost_ranks=True)

    def _audit(self) -> Audit | None:
        """What compares replicas in the group that this wrapper has; a rank that was alone had none."""
        return self._reducer.context.audit or build.make_audit(
            self._wrapped, self._group, self._module_buffers, self._options, self.recorder
        )

    @property
    def recorder(self) -> Recorder:
        """The times of this rank's steps; ``recorder.write(folder)`` saves them for ``paceline report``."""
        return self._reducer.recorder

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in backward passes that run in here, or whose forward did."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def weigh(self, weight: float) -> contextlib.AbstractContextManager[None]:
        """Weight what backward adds in here by its number of samples or tokens, instead of equally per rank.

        The gradients then are those of one process on the concatenated batch, whatever each rank's share of
        it. This holds over passes accumulated under ``no_sync`` too (weigh each of them), and for ranks that
        have nothing (weight 0). Until they are averaged, ``.grad`` holds the sum of gradients times weights.
        """
        return self._reducer.weigh(weight)

    def skip(self) -> None:
        """Take part in this step without a batch, for example because the batch is bad.

        Call it instead of forward and backward, or instead of backward if the loss is bad, and step the
        optimizer as usual: gradients are averages over the other ranks. If earlier passes of this rank were
        accumulated under ``no_sync``, these count. No ``finalize_backward()`` is to follow.
        """
        self._refuse_with_shards("skip()")
        with self._logging.noting_errors():
            if not (self._syncs_now() and self._reducer.counts.has_forward):
                self._pre_forward()
                self._sync_buffers_after_forward()
            if self._syncs_now():
                with torch.no_grad():
                    self._reducer.skip()

    def backward(self, loss: Tensor, weight: float) -> None:
        """Run backward from a loss that is a mean over ``weight`` samples or tokens."""
        with self.weigh(weight):
            loss.backward()

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether backward only launches reductions, and ``finalize_backward`` has to follow."""
        return self._finalizes_manually

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        with self._logging.noting_errors():
            self._finalization.require(required=required)
        self._finalizes_manually = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether ``finalize_backward`` must come after the next backward, not in a hook inside it."""
        return self._finalization.comes_after_backward

    @untraced_with_calls
    def finalize_backward(self) -> None:
        """Wait for the reductions that backward has launched, and make the averages ``.grad``.

        Call it once for each synced backward, after it and before the optimizer's step. A backward hook may
        call it as soon as all gradients are there, unless ``should_finalize_after_backward``.
        """
        with self._logging.noting_errors():
            self._finalization.finalize()

    def register_comm_hook(self, state: Any, hook: Hook | Callable[[Any, Any], Future[Tensor]]) -> None:
        """Reduce buckets by a hook of ``(state, bucket)`` that returns a future of the reduced buffer.

        Or by one of ``paceline.hooks``, with None for the state.
        """
        with self._logging.noting_errors():
            if isinstance(hook, Auto):
                check_state(state, hook)
                self._refuse_second_hook()
                build.use_auto(self._reducer, hook, self._wrapped, self._options)
                self._has_auto_hook = True
                return
            self._refuse_with_shards("communication hooks")
            if isinstance(hook, Hook):
                self._use_hook(exchange_for_hook(self._group, state, hook))
            else:
                check_hook(hook)
                self._use_hook(FutureHookExchange(self._group, state, hook))

    def _refuse_with_shards(self, what: str) -> None:
        if self._options.shards is not None:
            raise UnsupportedError(f"shards and {what} exclude each other (shards: {self._options.shards})")

    def _use_hook(self, hook: FutureHookExchange | GeneratorHookExchange) -> None:
        self._refuse_second_hook()
        self._reducer.use(hook)

    def _refuse_second_hook(self) -> None:
        exchange = self._reducer.exchange
        if isinstance(exchange, PartAverage):
            raise UnsupportedError("communication hooks and gradients in parts exclude each other")
        if self._has_auto_hook or isinstance(exchange, FutureHookExchange | GeneratorHookExchange):
            raise UnsupportedError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train in here with inputs that run out on some ranks before others.

        A rank without inputs takes part in the others' collectives without contributing. At the end every
        rank has the model of one that had inputs to the last, and the state of its optimizers. Each synced
        forward needs its backward, and with manual finalization its ``finalize_backward``.

        Args:
            divide_by_initial_world_size: divide sums by the number of all ranks, so that each sample counts
                the same; if not, by the number of ranks that still have inputs. A user's communication hook
                divides as it likes.
            enable: False for inputs known to be even: then ranks exchange nothing about their inputs.
            throw_on_early_termination: raise on every rank as soon as one runs out of inputs.
        """
        self._refuse_with_shards("join()")
        return JoinAlone(
            self,
            self._uneven_inputs.end_launched_step if enable else lambda: None,
            self._uneven_inputs.naming_lost_ranks if enable else contextlib.nullcontext,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's join context manager calls on a rank without inputs."""
        self._refuse_with_shards("join()")
        hook = self._uneven_inputs.enter(
            self,
            divides_by_all=bool(kwargs.get("divide_by_initial_world_size", True)),
            in_graph=self._use_python_reducer,
        )
        self._logging.joins_uneven_inputs = True
        return hook

    @property
    def join_device(self) -> torch.device:
        """The device for the collectives of torch's join context manager."""
        return self._wrapped.device

    @property
    def join_process_group(self) -> Any:
        """The group for the collectives of torch's join context manager."""
        return self.process_group

    def module_state_dict(self) -> dict[str, Any]:
        """The module's own state dict, without the prefix ``module.``."""
        return self.module.state_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict, with or without the prefix ``module.``."""
        inner = {*dict(self.module.named_parameters()), *dict(self.module.named_buffers())}
        prefixed = {f"module.{name}" for name in inner}
        shared = self._host_parameters
        with contextlib.nullcontext() if shared is None else shared.writing():
            if inner.isdisjoint(state_dict) or not prefixed.isdisjoint(state_dict):
                return nn.Module.load_state_dict(self, state_dict, strict, assign)
            return self.module.load_state_dict(state_dict, strict, assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if not self._shares(name):
                raise
        # Outside the try: an error inside a property is shown as it is.
        return attribute_of(self.module, name)

    def _shares(self, name: str) -> bool:
        options = self.__dict__.get("_options")  # not there yet while a copy is made
        return (
            options is not None
            and options.share_attributes
            and not name.startswith("__")
            and name != "module"
        )

    def __getstate__(self) -> dict[str, Any]:
        if not groups.is_default(self.process_group):
            raise WrapError(
                "only a wrapper of the default process group can be copied or pickled; another group is "
                "not known elsewhere; pickle the module itself, and wrap it again"
            )
        attributes = copy.copy(self.__dict__)
        for name in _BUILT_ANEW:
            attributes.pop(name, None)
        return attributes

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, attributes)
        self.process_group = groups.default_process_group()
        self._group = Group(self.process_group)
        self._group.name_copy(self._name)
        self._wrapped = self._wrapped.refreshed(self._options.delayed)
        self._build_parts()


torch_wrapper.pass_as_torchs(DistributedDataParallel)
add_torch_names(DistributedDataParallel)

# What a copy of a wrapper does not take over.
_BUILT_ANEW = (
    *("process_group", "_group", "_owner", "_module_buffers", "_unknown_parameters", "_precision"),
    *("_reducer", "_logging", "_host_parameters"),
    *("_uneven_inputs", "_accum_grad_hooks", "_finalization", "forward", "shards"),
)


def _forward_of_module(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    return self.module(*inputs, **kwargs)
