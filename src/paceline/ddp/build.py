"""The reducer of a wrapper, made from its options."""

from torch.utils.hooks import RemovableHandle

from paceline.comm.group import Group
from paceline.ddp.buckets.plan import BucketCaps
from paceline.ddp.exchange.exchange import LowPrecisionAverage
from paceline.ddp.recorded import describer
from paceline.ddp.reducer.planner import Planner
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.reducer.strict import Strict
from paceline.ddp.reducer.variants.compiled_graph import traced_reduction
from paceline.ddp.state.buffers import ModuleBuffers
from paceline.ddp.state.precision import Precision
from paceline.ddp.state.wrapped_module import WrappedModule
from paceline.errors import OptionError
from paceline.options import WrapperOptions
from paceline.tensors.dtensor import local_parameter
from paceline.tracing import fuse_reductions


def build_reducer(
    wrapped: WrappedModule,
    group: Group,
    buffers: ModuleBuffers,
    options: WrapperOptions,
    *,
    static_graph: bool,
) -> Reducer:
    """The reducer of a module's gradients."""
    slots, parameters, _ = wrapped.params
    policy = options.mixed_precision
    reducer = Reducer(
        slots,
        [local_parameter(each) for each in parameters],
        group,
        _planner(wrapped, options),
        buffers,
        as_views=options.gradient_as_bucket_view,
        strict=_strict(wrapped, group, options, static_graph=static_graph) if options.strict else None,
        about=describer(wrapped.module, slots, caps=options.caps.sizes, device=wrapped.device),
        precision=None if policy is None else Precision(policy, wrapped.module, wrapped.ignored),
    )
    if policy is not None:
        reducer.use(LowPrecisionAverage(group))
    return reducer


def _planner(wrapped: WrappedModule, options: WrapperOptions) -> Planner:
    return Planner(
        wrapped.params.slots,
        wrapped.params.trainable,
        first_caps=BucketCaps(options.caps.first_sizes),
        caps=BucketCaps(options.caps.sizes),
        rebuild=options.rebuilds_plan,
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
    reducer.detach()
    reduce = traced_reduction(reducer)
    fuse_reductions(options.caps.cap)
    return [
        parameter.register_post_accumulate_grad_hook(reduce)
        for name, parameter in wrapped.module.named_parameters()
        if parameter.requires_grad and name not in wrapped.ignored
    ]
