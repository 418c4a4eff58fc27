"""Every private name of torch that paceline uses: what for, and what holds in a version that lacks it.

All were tried with torch 2.13, which pyproject.toml asks for. Another version may drop or change any of them,
and then this is the file to change. A name that is looked up at the top of this file and is missing makes
``import paceline`` raise. ``tests/project/test_torch_private.py`` checks that each name does what is said
here, and that no other file has a private name of torch.

Functions of torch that each step calls are bound as they are, and attributes are read by ``attrgetter``:
other files call them without a call of Python in between. Modules that take long to import are imported by
the functions that need them.

Some attributes cannot be read from here: those that a subclass of torch's classes reads or overrides, and
those where a function in between would cost too much. ``ATTRIBUTES``, at the end, lists them.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter, methodcaller
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import Node
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.nn import Parameter
from torch.storage import TypedStorage
from torch.utils import _pytree, backend_registration

# torch's type hints leave out much of what these have.
_autograd: Any = torch.autograd
_backend_registration: Any = backend_registration
_c10d: Any = distributed_c10d
_distributed: Any = distributed
_eval_frame: Any = torch._C._dynamo.eval_frame

# --- The autograd engine ---

# The number of the backward that this thread runs, -1 if none. Without it wrappers cannot know which of them
# run in one backward, and a forward that a checkpoint repeats inside backward looks like a new one.
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Whether the running backward retains its graph. Without it replicas' graphs would always be retained.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

# Whether the running backward will reach a node. Without it ``autograd.grad`` looks like a backward that adds
# to ``.grad``, and the graphs of DataParallel's replicas would always be retained.
will_execute_node: Callable[[Node], bool] = torch._C._will_engine_execute_node

# Calls a function at the end of the running backward. Nothing can replace it: no step would end.
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback

# A context in which writing to tensors does not count as a change. Without it a broadcast of buffers between
# forward and backward makes backward raise.
preserve_version_counter: Any = _autograd._unsafe_preserve_version_counter

# Whether a profiler runs. Without it each collective of the backend would be recorded, at twice its cost.
is_profiler_enabled: Callable[[], bool] = _autograd._profiler_enabled

# The name of the function by which re-entrant checkpointing asks whether backward was given inputs. Under
# another name DataParallel would run such a graph in threads, where it raises.
CHECKPOINT_TEST = "_is_checkpoint_valid"


def forward_ad_level() -> int:
    """The level of forward-mode differentiation, -1 if none. Without it DataParallel loses its tangents."""
    return forward_ad._current_level


def function_of(node: Node) -> Any:
    """The ``Function`` that a node written in Python belongs to; None for torch's own nodes.

    In a version where nodes do not name it, re-entrant checkpointing is not found: see ``CHECKPOINT_TEST``.
    """
    return getattr(type(node), "_forward_cls", None)


# --- Tensors and storages ---

# How often a tensor was written to. Without it every gradient that is copied into a bucket has its storage
# looked at, and writes by replicas to their chunks go unnoticed by autograd.
version_of: Callable[[Tensor], int] = attrgetter("_version")

# The address of the C++ object behind a tensor or a storage.
cdata_of: Callable[[Tensor | torch.UntypedStorage], int] = attrgetter("_cdata")

# The number of uses of a storage, given its ``cdata_of``. Without it a gradient whose slice or array somebody
# keeps cannot be told from one that is free: each step would need new storage.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count

# Whether a tensor is a view. Without it gradients that ``weigh`` sets aside would always be copied.
is_view: Callable[[Tensor], bool] = torch.Tensor._is_view

# The hooks on a tensor, or None. Without it a hook on a replica's parameter runs twice in backward.
backward_hooks_of: Callable[[Tensor], Any] = attrgetter("_backward_hooks")

# The class of all futures, those of C++ too. Without it a communication hook's future of C++ is refused.
CppFuture = torch._C.Future

# The memory of a typed storage. Without it tests' tensors are pickled torch's way, which takes longer.
untyped_storage_of: Callable[[TypedStorage], torch.UntypedStorage] = attrgetter("_untyped_storage")


def typed_storage(memory: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    """A typed storage, made as torch makes it: otherwise it warns that the class is deprecated."""
    return TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


# --- Operations on lists of tensors ---

# Without them: one call per tensor, which costs more than the copying if tensors are small.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_

# --- Structures of inputs and outputs ---

# The types that ``register_pytree_node`` was given. Without them such a type is a leaf: tensors in it are
# neither scattered nor gathered. torch has no public way to open one level.
PYTREE_NODES: Mapping[type, Any] = _pytree.SUPPORTED_NODES

# The keys by which such a type names its children. Without them errors show torch's text for a path.
GetAttrKey = _pytree.GetAttrKey
MappingKey = _pytree.MappingKey
SequenceKey = _pytree.SequenceKey

# Every leaf, and a change of every leaf, for the toy device. ``paceline.tensors.tree`` could replace them.
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map

# --- Modules and their parameters ---

# The dicts in which a module keeps its own parameters, buffers and children. Names and values can be had
# otherwise, but not the place to put others in.
parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")

# A copy of a module that copies itself in its own way, as recurrent layers do. Without it their replicas
# compute with the module's weights.
replicate_itself: Callable[[nn.Module], nn.Module] = methodcaller("_replicate_for_data_parallel")

# The hooks that run once a gradient was added to ``.grad``, in order. Without it our hooks may run before
# those that users add later, and a gradient that such a hook changes is averaged unchanged.
grad_hooks_of: Callable[[Any], dict[int, Any]] = attrgetter("_post_accumulate_grad_hooks")


def replicates_itself(kind: type[nn.Module]) -> bool:
    """Whether a class of modules has its own ``replicate_itself``."""
    return kind._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel


def renew_flat_weights(layer: nn.RNNBase) -> None:
    """Have a recurrent layer use its present parameters, of which it has a list beside them.

    torch 2.13 renews the list itself in the next forward; until then it keeps the old ones alive.
    """
    layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]


def renew_grad_hooks(parameter: Parameter) -> None:
    """Give a parameter's hooks to the C++ tensor behind it, which a conversion of DTensors exchanges.

    Without it a converted DTensor parameter is no longer averaged.
    """
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def in_backward_optimizers(parameter: Parameter) -> Sequence[Any]:
    """The optimizers that ``_apply_optimizer_in_backward`` gave to a parameter; without it: none."""
    return getattr(parameter, "_in_backward_optimizers", ())


def remove_in_backward_hooks(parameters: Iterable[Parameter]) -> None:
    """Remove the hooks of ``_apply_optimizer_in_backward``: they step before gradients are averaged."""
    parameters = list(parameters)
    if parameters:
        from torch.distributed.optim import apply_optimizer_in_backward

        for parameter in parameters:
            for handle in apply_optimizer_in_backward.param_to_optim_hook_handle_map.pop(parameter, []):
                handle.remove()


# --- torch.compile ---

# The module of the compiler, which ``init_process_group`` imports; test ranks have it imported in advance.
COMPILER = "torch._dynamo"


def leave_untraced(fn: FunctionType, *, with_calls: bool, reason: str) -> None:
    """Have torch.compile break its graph at a function, and compile neither it nor, if asked, what it calls.

    It does what ``torch._dynamo.skip`` and ``disable`` do, without importing the compiler. Without it the
    wrapper's own code is compiled in pieces, and again for every changed number.
    """
    skip, default = _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT
    strategy = _eval_frame._FrameExecStrategy(skip, skip if with_calls else default)
    _eval_frame.set_code_exec_strategy(fn.__code__, strategy)
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    fn._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def trace_instead(fn: Any, other: Callable[..., Any]) -> None:
    """Have torch.compile trace another function; without it a compiled backward cannot reduce gradients."""
    fn._torchdynamo_inline = other


def optimize_ddp_mode() -> str | None:
    """What torch.compile was asked to do about wrappers; None while nobody has imported the compiler.

    In a version without it gradients are never reduced inside a graph.
    """
    utils: Any = sys.modules.get("torch._dynamo.utils")
    mode: str | None = None if utils is None else utils.get_optimize_ddp_mode()
    return mode


def fuse_reductions(cap_bytes: int) -> None:
    """Have inductor join a graph's reductions into buckets; without it each gradient is reduced alone."""
    from torch._inductor import config

    config._fuse_ddp_communication = True
    config._fuse_ddp_bucket_size = cap_bytes / 2**20  # type: ignore[assignment]  # a cap may be a fraction


# --- Process groups ---

# The group that init_process_group made; raises torch's error if there is none. ``distributed.group.WORLD``
# is the same, but None if there is none.
default_process_group: Callable[[], Any] = _c10d._get_default_group

# Whether this process is outside a group. ``distributed.get_rank``, -1 there, says the same.
is_outside: Callable[[Any], bool] = _c10d._rank_not_in_group

# Broadcasts many tensors in few messages. Without it: one broadcast per tensor.
broadcast_coalesced: Callable[[Any, list[Tensor], int, int], None] = _distributed._broadcast_coalesced

# The size of the first bucket in torch's wrapper; 1 MiB in torch 2.13.
FIRST_BUCKET_BYTES = int(_distributed._DEFAULT_FIRST_BUCKET_BYTES)

# A tensor that a collective has not finished yet. Without it such a local tensor would be read too early.
AsyncCollectiveTensor: Any = _functional_collectives.AsyncCollectiveTensor


def _backend_options(process_group: Any) -> Any:
    device = torch.device(process_group._device_types[0])
    return process_group._get_backend(device).options


def timeout_of(process_group: Any) -> timedelta:
    """How long ranks wait for each other. Without it: torch's default of 30 minutes."""
    timeout: timedelta = _backend_options(process_group)._timeout
    return timeout


def gloo_threads_of(process_group: Any) -> int:
    """The number of gloo's threads, for the logging data. Without it: 0 there."""
    return int(_backend_options(process_group)._threads)


def backend_config_of(process_group: Any, default: str) -> str:
    """The backend of each device, as ``init_process_group`` was given it, such as "cpu:gloo,cuda:nccl".

    Without it groups of the backend "paceline" have no other devices.
    """
    config: str = _c10d._world.pg_backend_config.get(process_group, default)
    return config


def is_open(process_group: Any) -> bool:
    """Whether a group was not destroyed yet. Without it: destroy it, and ignore torch's error."""
    return _c10d._world.pg_map.get(process_group) is not None


def disable_join(joinable: Joinable) -> None:
    """Let forward tell the other ranks nothing more; torch's own wrapper goes on after its join has ended.

    Without it each forward after a join sends the other ranks one message that nobody needs.
    """
    joinable._join_config = _JoinConfig.construct_disabled_join_config()


def traced_all_reduce(tensor: Tensor, process_group: Any) -> Tensor:
    """The sum of a tensor over the ranks, by a collective that torch.compile can trace.

    It is waited for where it is first read. Without it a compiled backward cannot reduce gradients.
    """
    total: Tensor = _functional_collectives.all_reduce(tensor, "sum", process_group)
    return total


def as_overlapped_optimizer(optimizer: type, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """An optimizer that steps behind a communication hook; without it there is no _register_fused_optim."""
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

    return _as_overlapped_optim(optimizer, parameters, *args, **kwargs)


# --- DTensor ---

# A DTensor's local tensor, as it is: ``to_local`` is part of autograd's graph, and may be a view.
local_tensor_of: Callable[[Any], Any] = attrgetter("_local_tensor")

# A DTensor's mesh, placements, shape and strides, which its constructor takes. ``from_local`` would do more.
spec_of: Callable[[Any], Any] = attrgetter("_spec")

# --- RPC, which some builds of torch do not have ---

# Whether this process takes part in RPC. Without it: ask for a context, torch raises if there is none.
is_rpc_open: Callable[[], bool] = (
    _distributed.rpc.api._is_current_rpc_agent_set if distributed.rpc.is_available() else lambda: False
)


def autograd_context_id() -> int:
    """This thread's context of distributed autograd; raises RuntimeError if there is none.

    Without it parameters that distributed autograd reaches are not averaged.
    """
    return int(_distributed.autograd._current_context()._context_id())


# --- The elastic agent ---


def parse_rendezvous_config(text: str) -> dict[str, str]:
    """The pairs of ``--rdzv-conf``; without it: split at commas and equals signs."""
    from torch.distributed.elastic.rendezvous import utils

    return utils._parse_rendezvous_config(text)


def is_this_host(address: str) -> bool:
    """Whether torch takes an address for this host's; without it the doctor's advice is less exact."""
    from torch.distributed.elastic.rendezvous import utils

    return bool(utils._matches_machine_hostname(address))


# --- Devices that are implemented in Python ---

# Without these there is no toy device for tests. It also needs the order of the methods of a C++ class: see
# testing/toy/device_guard.py.
register_device: Callable[[str, Any], None] = _backend_registration._setup_privateuseone_for_python_backend
DeviceModule = backend_registration._DummyBackendModule
# The number of the type that torch keeps for devices from outside.
OUTSIDE_DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
# The operation behind ``Tensor.to``.
TO_COPY: Any = torch.ops.aten._to_copy.default


# --- Attributes that other files use by name ---


class PrivateAttribute(NamedTuple):
    """Private attributes of one class of torch's, which files use by name, each list separated by spaces."""

    owner: str
    names: str
    files: str
    purpose: str


ATTRIBUTES = (
    PrivateAttribute(
        "torch.nn.Module",
        "_parameters _buffers _modules _is_replica _compiled_call_impl",
        "data_parallel/replicate.py",
        "written as keys of a replica's state, for all modules of a tree at once; a replica without them "
        "would share the module's dicts, and zero_grad in it would not warn",
    ),
    PrivateAttribute(
        "torch.nn.parallel.DistributedDataParallel",
        "_active_ddp_module",
        "ddp/compat/torch_wrapper.py",
        "torch.compile reads it to cut its graphs at the bounds of buckets, and would compile a function in "
        "between; without it graphs are not cut",
    ),
    PrivateAttribute(
        "modules and parameters that a wrapper was given",
        "_ddp_params_and_buffers_to_ignore _ddp_ignored _mp_param _fp_param",
        "ddp/compat/torch_wrapper.py ddp/state/wrapped_module.py ddp/state/precision.py",
        "set as torch's wrapper sets them, for libraries and torch's tests; torch need not have them",
    ),
    PrivateAttribute(
        "torch.distributed.algorithms.join.Joinable",
        "_join_config",
        "ddp/wrapper.py optim/sharded_optimizer.py",
        "says in each forward whether a join is active; without it join has no effect",
    ),
    PrivateAttribute(
        "torch.distributed.ProcessGroup",
        "_allgather_base",
        "comm/group.py comm/backend/process_group.py",
        "gathers rows in each step; torch 2.13 also has all_gather_single, the other name of the same",
    ),
    PrivateAttribute(
        "torch.distributed.ProcessGroup",
        "_device_types _get_backend _set_group_name _set_group_desc _reduce_scatter_base _register_backend "
        "_set_default_backend",
        "comm/backend/process_group.py",
        "overridden by our group where torch calls them; the last two tell C++ which backends a group has, "
        "and without them collectives that C++ calls fail",
    ),
    PrivateAttribute(
        "torch.distributed.ProcessGroupGloo",
        "_set_sequence_number_for_group",
        "comm/backend/process_group.py",
        "called because torch does so for each gloo that it makes; a version that does not needs none",
    ),
    PrivateAttribute(
        "torch.distributed.ProcessGroupGloo.Options",
        "_timeout",
        "comm/backend/process_group.py",
        "the timeout of a collective that was given none, read in each; without it: what the group was given",
    ),
    PrivateAttribute(
        "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent",
        "_start_workers _stop_workers _restart_workers _shutdown _pcontext _rdzv_handler _remaining_restarts",
        "tools/run/agent.py",
        "called or overridden by our agent to know the ranks' processes; without them paceline run fails",
    ),
    PrivateAttribute(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",
        "_stdout _stderr",
        "tools/run/agent.py",
        "the agent's copies of a rank's pipes, which are closed; without them a pipe's end is not noticed",
    ),
    PrivateAttribute(
        "torch.distributed.elastic.multiprocessing.LogsSpecs",
        "_local_ranks_filter _redirects _root_log_dir",
        "tools/run/command.py tools/run/rank_output.py",
        "what torchrun's options say about output; without them: our own arguments, kept by RankLogs",
    ),
)
