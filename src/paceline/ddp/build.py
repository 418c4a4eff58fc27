"""A wrapper's start: all ranks begin from the same model, and its reducer is made from its options."""

import torch
from torch.utils.hooks import RemovableHandle

from paceline.comm.group import Group
from paceline.comm.verify import check_same
from paceline.ddp.audit.audit import Audit
from paceline.ddp.audit.buffer_watch import BufferWatch
from paceline.ddp.audit.catalogue import Catalogue
from paceline.ddp.audit.equal_steps import EqualSteps
from paceline.ddp.buckets.bucket_set import BucketOptions
from paceline.ddp.buckets.plan import BucketCaps
from paceline.ddp.compat.logging_data import log_environment
from paceline.ddp.compat.strict import Strict
from paceline.ddp.exchange.average import Average, LowPrecisionAverage
from paceline.ddp.exchange.exchange import Exchange
from paceline.ddp.exchange.shard_average import ShardAverage
from paceline.ddp.recorder_setup import make_recorder
from paceline.ddp.reducer.after_step import AfterStep
from paceline.ddp.reducer.auto_tuner import AutoTuner, say_idle
from paceline.ddp.reducer.group_turns import turns_of
from paceline.ddp.reducer.manual_finalization import ManualFinalization
from paceline.ddp.reducer.planner import Planner
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.reducer.shard_sums import ShardSums
from paceline.ddp.reducer.variants.compiled_graph import traced_reduction
from paceline.ddp.state.buffers import ModuleBuffers
from paceline.ddp.state.parameters import ReducedParameters, check_dtensor_parts, describe_slots
from paceline.ddp.state.precision import Precision
from paceline.ddp.state.wrapped_module import WrappedModule
from paceline.errors import OptionError, UnsupportedError
from paceline.hooks.auto import Auto
from paceline.options import WrapperOptions
from paceline.recording.recorder import Recorder
from paceline.shard_tree import ShardTree
from paceline.tensors.dtensor import is_dtensor
from paceline.torch_private import fuse_reductions
from paceline.tracing import reduces_in_graph
from paceline.watch.rank_page import Activity


def start_equal(wrapped: WrappedModule, group: Group, options: WrapperOptions, *, bytes_at_once: int) -> None:
    """Check that all ranks wrapped the same model, and give them rank 0's values."""
    log_environment(f"rank {group.rank} wraps {type(wrapped.module).__name__}")
    if group.may_change and group.size < 2:
        return  # nobody has met yet, and who comes later is given the state by others
    turns = turns_of(group.process_group)
    turns.finish_telling(group)
    turns.finish_launched()
    with group.watch.waiting(Activity.WRAPPING, 0, then=Activity.OUTSIDE):
        open_group(wrapped, group, options)
        if options.init_sync:
            buffers = options.syncs_buffers_at_start
            wrapped.broadcast(group, buffers=buffers, source=0, bytes_at_once=bytes_at_once)


def open_group(wrapped: WrappedModule, group: Group, options: WrapperOptions) -> None:
    """Check that all ranks of a group wrapped the same model, and open what they share."""
    if options.init_sync or options.may_share_memory:
        group.agree_on_name(wrapped.device)
    else:  # nothing is exchanged, so each rank counts for itself
        group.name_copy("")
    check_dtensor_parts(wrapped.params, group)
    if options.init_sync:
        check_same(group, describe_slots(wrapped.params), options.to_compare(), wrapped.device)
    _check_shards(wrapped, group, options)
    wrapped.open_transports(group, may_share_memory=options.may_share_memory)


def build_reducer(
    wrapped: WrappedModule,
    group: Group,
    buffers: ModuleBuffers,
    precision: Precision | None,
    options: WrapperOptions,
    *,
    static_graph: bool,
) -> Reducer:
    """The reducer of a module's gradients."""
    slots, parameters, _ = wrapped.params
    recorder = make_recorder(
        wrapped.module, slots, parameters, caps=options.caps.sizes, device=wrapped.device
    )
    reduced = ReducedParameters(wrapped.params)
    return Reducer(
        reduced,
        group,
        _exchange(group, precision, options),
        _planner(wrapped, options, group),
        buffers,
        recorder,
        AfterStep(parameters, precision),
        BucketOptions(
            as_views=options.gradient_as_bucket_view,
            lazy=options.lazy_bucket_allocation,
            dtype=None if precision is None else precision.reduce_dtype,
        ),
        strict=_strict(wrapped, group, options, static_graph=static_graph) if options.strict else None,
        audit=make_audit(wrapped, group, buffers, options, recorder),
        shard_sums=None if options.shards is None else ShardSums(ShardTree(options.shards), reduced.local),
    )


def _exchange(group: Group, precision: Precision | None, options: WrapperOptions) -> Exchange:
    if options.shards is not None:
        return ShardAverage(group, ShardTree(options.shards))
    return Average(group) if precision is None else LowPrecisionAverage(group)


def _check_shards(wrapped: WrappedModule, group: Group, options: WrapperOptions) -> None:
    """Raise if a step's batch cannot be in shards here."""
    if options.shards is None:
        return
    ShardTree(options.shards).share(group.rank, group.size)
    refusals = {
        "a process group whose ranks may change": group.may_change,
        "parameters that are DTensors": any(map(is_dtensor, wrapped.params.parameters)),
        "reductions in a compiled graph": reduces_in_graph(),
        "strict mode": options.strict,
        "module buffers that forward does not make equal": any(True for _ in wrapped.module.buffers())
        and not options.syncs_buffers_in_forward(ranks_change=False),
        "gradients that travel in another type than they have": _travels_in_another_type(wrapped, options),
    }
    for what, is_so in refusals.items():
        if is_so:
            raise UnsupportedError(f"shards and {what} exclude each other (shards: {options.shards})")


def _travels_in_another_type(wrapped: WrappedModule, options: WrapperOptions) -> bool:
    """Whether sums within a rank are rounded in another way than those between ranks."""
    travels_in = _reduce_dtype(options)
    return travels_in is not None and any(
        parameter.dtype != travels_in for parameter in wrapped.params.parameters
    )


def _reduce_dtype(options: WrapperOptions) -> torch.dtype | None:
    """The type in which gradients travel; None if each does in its parameter's own type."""
    policy = options.mixed_precision
    return getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)


def make_audit(
    wrapped: WrappedModule, group: Group, buffers: ModuleBuffers, options: WrapperOptions, recorder: Recorder
) -> Audit | None:
    """What compares replicas; None if it is switched off, or if there is nothing to compare."""
    mode = options.audit or ("warn" if wrapped.device.type == "cpu" else "off")
    if mode == "off" or group.may_change or group.awaits_others:
        return None
    writer = recorder.audit_writer(group)
    if group.size == 1 and writer is None:
        return None
    named = wrapped.module.named_parameters()
    return Audit(
        mode,
        Catalogue((name, parameter) for name, parameter in named if name not in wrapped.ignored),
        BufferWatch(wrapped.module, wrapped.ignored),
        buffers,
        EqualSteps(writer),
        device=wrapped.device,
        bytes_at_once=buffers.settings.bytes_at_once,
    )


def use_auto(reducer: Reducer, hook: Auto, wrapped: WrappedModule, options: WrapperOptions) -> None:
    """Average by the hook "auto" from now on: measure and decide; every rank calls this at once."""
    if options.shards is not None:
        say_idle(reducer.group, "shards are averaged in one way")
        return
    with reducer.group.watch.waiting(Activity.WRAPPING, reducer.step_number, then=Activity.OUTSIDE):
        # Lazy buckets are for users who want to choose what is held in memory.
        may_choose_caps = options.caps.is_default and not options.lazy_bucket_allocation
        tuner = AutoTuner(
            hook,
            reducer.exchange,
            wrapped.device,
            reduce_dtype=_reduce_dtype(options),
            may_choose_caps=may_choose_caps,
        )
        reducer.tune(tuner)


def manual_finalization(
    reducer: Reducer, options: WrapperOptions, *, in_graph: bool, required: bool
) -> ManualFinalization:
    """What lets the user end the reducer's steps; ``required`` if the user does so from the start."""
    refusal = None
    if in_graph:
        refusal = "not supported with the Python reducer, which averages in a compiled graph"
    elif options.strict and all(slot.delayed for slot in reducer.context.parameters.slots):
        refusal = "not supported when all DDP parameters use delay_all_reduce_named_params (strict mode)"
    finalization = ManualFinalization(
        reducer,
        None if refusal is None else f"Manual backward finalization is {refusal}",
        always_after_backward=options.mixed_precision is not None,
    )
    if required:
        finalization.require(required=True)
    return finalization


def make_precision(wrapped: WrappedModule, options: WrapperOptions) -> Precision | None:
    """What runs the module in mixed precision, if the user asked for that."""
    policy = options.mixed_precision
    return None if policy is None else Precision(policy, wrapped.module, wrapped.ignored)


def _planner(wrapped: WrappedModule, options: WrapperOptions, group: Group) -> Planner:
    caps = BucketCaps(options.caps.sizes)
    return Planner(
        wrapped.params.slots,
        wrapped.params.trainable,
        # One bucket would be allocated whole with the first gradient.
        first_caps=caps if options.lazy_bucket_allocation else BucketCaps(options.caps.first_sizes),
        caps=caps,
        rebuild=options.rebuilds_plan and not group.may_change,
    )


def _strict(wrapped: WrappedModule, group: Group, options: WrapperOptions, *, static_graph: bool) -> Strict:
    strict = Strict(
        wrapped.params.slots,
        wrapped.params.trainable,
        rank=group.rank,
        finds_unused=options.find_unused_parameters,
        skips_unused=options.skip_all_reduce_unused_params,
    )
    strict.static = static_graph
    return strict


def reduce_in_graph(
    reducer: Reducer, wrapped: WrappedModule, options: WrapperOptions
) -> list[RemovableHandle]:
    """Average by hooks that compiled autograd can trace, instead of the reducer's own; returns the hooks."""
    if options.mixed_precision is not None:
        raise OptionError("mixed precision and reductions in a compiled graph exclude each other")
    reducer.grad_hooks.remove()
    reduce = traced_reduction(reducer)
    fuse_reductions(options.caps.cap)
    return [
        parameter.register_post_accumulate_grad_hook(reduce)
        for name, parameter in wrapped.module.named_parameters()
        if parameter.requires_grad and name not in wrapped.ignored
    ]
