"""The reducer of a wrapper, made from its options."""

from torch.utils.hooks import RemovableHandle

from paceline.comm.group import Group
from paceline.ddp.buckets.plan import BucketCaps
from paceline.ddp.compat.strict import Strict
from paceline.ddp.exchange.average import Average, LowPrecisionAverage
from paceline.ddp.recorder_setup import make_recorder
from paceline.ddp.reducer.after_step import AfterStep
from paceline.ddp.reducer.planner import Planner
from paceline.ddp.reducer.reducer import BucketOptions, Reducer
from paceline.ddp.reducer.variants.compiled_graph import traced_reduction
from paceline.ddp.state.buffers import ModuleBuffers
from paceline.ddp.state.parameters import ReducedParameters
from paceline.ddp.state.precision import Precision
from paceline.ddp.state.wrapped_module import WrappedModule
from paceline.errors import OptionError
from paceline.options import WrapperOptions
from paceline.torch_private import fuse_reductions


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
    return Reducer(
        ReducedParameters(wrapped.params),
        group,
        Average(group) if precision is None else LowPrecisionAverage(group),
        _planner(wrapped, options),
        buffers,
        make_recorder(wrapped.module, slots, parameters, caps=options.caps.sizes, device=wrapped.device),
        AfterStep(parameters, precision),
        BucketOptions(
            as_views=options.gradient_as_bucket_view,
            dtype=None if precision is None else precision.reduce_dtype,
        ),
        strict=_strict(wrapped, group, options, static_graph=static_graph) if options.strict else None,
    )


def make_precision(wrapped: WrappedModule, options: WrapperOptions) -> Precision | None:
    """What runs the module in mixed precision, if the user asked for that."""
    policy = options.mixed_precision
    return None if policy is None else Precision(policy, wrapped.module, wrapped.ignored)


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
    reducer.grad_hooks.remove()
    reduce = traced_reduction(reducer)
    fuse_reductions(options.caps.cap)
    return [
        parameter.register_post_accumulate_grad_hook(reduce)
        for name, parameter in wrapped.module.named_parameters()
        if parameter.requires_grad and name not in wrapped.ignored
    ]
