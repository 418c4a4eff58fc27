"""Every private name of torch that paceline uses: what for, and what holds in a version that lacks it.

``TRIED`` has the versions of torch that paceline was tried with. Another version may drop or change any of
these names, and then this is the file to change. A missing name never makes ``import paceline`` raise:
``_find`` has a fallback, and what ``_need`` returns raises an error that says what does not work.
``tests/project/test_torch_private.py`` checks that each name does what is said here, what happens without it,
and that no other file has a private name of torch.

Functions of torch that each step calls are bound as they are, and attributes are read by ``attrgetter``:
other files call them without a call of Python in between. Modules that take long to import are imported by
the functions that need them.

Some attributes cannot be read from here: those that a subclass of torch's classes reads or overrides, and
those where a function in between would cost too much. ``ATTRIBUTES``, at the end, lists them.
"""

import contextlib
import functools
import importlib
import inspect
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from operator import attrgetter, methodcaller
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Joinable
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.storage import TypedStorage

from paceline.errors import UnsupportedError

# torch's type hints leave out much of what these have.
_c10d: Any = distributed_c10d
_distributed: Any = distributed

# The versions that docs/versions.md has results of, from the oldest to the newest.
TRIED = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")


def release(version: str) -> str:
    """The release of a version: "2.13" of "2.13.0+cpu"; "0.0" of a text that is no version."""
    found = re.match(r"\d+\.\d+", version)
    return "0.0" if found is None else found[0]


def warn_if_newer() -> None:
    """Warn if the installed torch is newer than all that paceline was tried with."""
    installed, newest = (tuple(map(int, each.split("."))) for each in (release(torch.__version__), TRIED[-1]))
    if installed > newest:
        warnings.warn(
            f"paceline was not tried with a torch as new as this one (torch: {torch.__version__}, newest "
            f"tried: {TRIED[-1]}); if it fails where it worked before, install 'torch=={TRIED[-1]}.*'",
            stacklevel=3,
        )


def _resolve(path: str) -> Any:
    owner, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(owner)
    except ImportError:
        return getattr(_resolve(owner), name)
    return getattr(module, name)


def _find(path: str, fallback: Any) -> Any:
    """A private name of torch, or the fallback in a version that lacks it."""
    try:
        return _resolve(path)
    except (AttributeError, ImportError):
        return fallback


def _need(path: str, lost: str) -> Any:
    """A private name of torch; in a version that lacks it, a function that raises and says what is lost."""
    return _find(path, _raise_without(path, lost))


def _attribute(owner: Any, name: str, lost: str) -> Callable[[Any], Any]:
    """Reads a private attribute of tensors or modules; as ``_need`` in a version that lacks it."""
    return attrgetter(name) if hasattr(owner, name) else _raise_without(name, lost)


def _raise_without(name: str, lost: str) -> Callable[..., NoReturn]:
    def raise_unsupported(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            f"this version of torch has no {name}, without which {lost} (torch: {torch.__version__}, tried: "
            f"{TRIED[0]} to {TRIED[-1]}); install one that was tried"
        )

    return raise_unsupported


_NO_TOY = "there is no toy device for tests"

# --- Public names that not every version has ---

# Before 2.13 they have other names, which later versions call deprecated.
all_gather_single: Callable[..., Any] = _find(
    "torch.distributed.all_gather_single", distributed.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = _find(
    "torch.distributed.reduce_scatter_single", distributed.reduce_scatter_tensor
)

# Whether torch's wrapper has ``forward_sync_buffers``: where it has not, ``broadcast_buffers`` is what users
# write for both wrappers, and no warning tells them not to.
HAS_FORWARD_SYNC_BUFFERS = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters

# --- The autograd engine ---

# The number of the backward that this thread runs, -1 if none.
current_graph_task_id: Callable[[], int] = _need(
    "torch._C._current_graph_task_id", "wrappers cannot know which of them run in one backward"
)

# Whether the running backward retains its graph. Without it replicas' graphs are always retained.
keeps_graph: Callable[[], bool] = _find("torch._C._autograd._get_current_graph_task_keep_graph", lambda: True)

# Whether the running backward will reach a node. Without it ``autograd.grad`` looks like a backward that adds
# to ``.grad``, and the graphs of DataParallel's replicas are always retained.
will_execute_node: Callable[[Node], bool] = _find("torch._C._will_engine_execute_node", lambda _: True)

# Calls a function at the end of the running backward.
queue_callback: Callable[[Callable[[], None]], None] = _need(
    "torch.autograd.Variable._execution_engine.queue_callback", "no wrapper can end a step"
)

# A context in which writing to tensors does not count as a change. Without it a broadcast of buffers between
# forward and backward makes backward raise torch's error about a tensor that was changed.
preserve_version_counter: Any = _find(
    "torch.autograd._unsafe_preserve_version_counter", lambda _: contextlib.nullcontext()
)

# Whether a profiler runs. Without it each collective of the backend is recorded, at twice its cost.
is_profiler_enabled: Callable[[], bool] = _find("torch.autograd._profiler_enabled", lambda: True)

# The name of the function by which re-entrant checkpointing asks whether backward was given inputs. Under
# another name DataParallel would run such a graph in threads, where it raises.
CHECKPOINT_TEST = "_is_checkpoint_valid"


def forward_ad_level() -> int:
    """The level of forward-mode differentiation, -1 if none. Without it DataParallel loses its tangents."""
    return int(_find("torch.autograd.forward_ad._current_level", -1))


def function_of(node: Node) -> Any:
    """The ``Function`` that a node written in Python belongs to; None for torch's own nodes.

    In a version where nodes do not name it, re-entrant checkpointing is not found: see ``CHECKPOINT_TEST``.
    """
    return getattr(type(node), "_forward_cls", None)


# --- Tensors and storages ---

# How often a tensor was written to.
version_of: Callable[[Tensor], int] = _attribute(
    torch.Tensor, "_version", "it cannot be told whether somebody wrote to a gradient"
)

# What a GradScaler calls to multiply gradients and to look for infinities. Without it a HostOptimizer's ranks
# do not tell each other what their scalers find.
unscale_and_check: Callable[..., Any] = _find(
    "torch._amp_foreach_non_finite_check_and_unscale_", lambda *_: None
)

# The address of the C++ object behind a tensor or a storage.
cdata_of: Callable[[Tensor | torch.UntypedStorage], int] = _attribute(
    torch.Tensor, "_cdata", "it cannot be told who uses a gradient's memory"
)

# The number of uses of a storage, given its ``cdata_of``. Without it a gradient whose slice or array somebody
# keeps cannot be told from one that is free: each step takes new storage.
storage_use_count: Callable[[int], int] = _find("torch._C._storage_Use_Count", lambda _: sys.maxsize)

# Whether a tensor is a view. Without it gradients that ``weigh`` sets aside are always copied.
is_view: Callable[[Tensor], bool] = _find("torch.Tensor._is_view", lambda _: True)

# The hooks on a tensor, or None.
backward_hooks_of: Callable[[Tensor], Any] = _attribute(
    torch.Tensor, "_backward_hooks", "a hook on a replica's parameter would run twice in backward"
)

# The class of all futures, those of C++ too. Without it a communication hook's future of C++ is refused.
CppFuture: Any = _find("torch._C.Future", torch.futures.Future)

# The memory of a typed storage.
untyped_storage_of: Callable[[TypedStorage], torch.UntypedStorage] = attrgetter("_untyped_storage")


def typed_storage(memory: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    """A typed storage, made as torch makes it: otherwise it warns that the class is deprecated."""
    return TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


# --- Operations on lists of tensors ---


def _one_by_one(method: str) -> Callable[..., None]:
    """One call per tensor, which costs more than the copying if tensors are small."""

    def call(tensors: Sequence[Tensor], operand: Any, **options: Any) -> None:
        operands = operand if isinstance(operand, list | tuple) else [operand] * len(tensors)
        for tensor, each in zip(tensors, operands, strict=True):
            methodcaller(method, each, **options)(tensor)

    return call


foreach_add_: Callable[..., None] = _find("torch._foreach_add_", _one_by_one("add_"))
foreach_copy_: Callable[..., None] = _find("torch._foreach_copy_", _one_by_one("copy_"))
foreach_div_: Callable[..., None] = _find("torch._foreach_div_", _one_by_one("div_"))
foreach_mul_: Callable[..., None] = _find("torch._foreach_mul_", _one_by_one("mul_"))

# --- Structures of inputs and outputs ---


class _NoKey:
    """In the place of a class that a version lacks: nothing is an instance of it."""

    __match_args__ = ("key",)


# The types that ``register_pytree_node`` was given. Without them such a type is a leaf: tensors in it are
# neither scattered nor gathered. torch has no public way to open one level.
PYTREE_NODES: Mapping[type, Any] = _find("torch.utils._pytree.SUPPORTED_NODES", {})

# The keys by which such a type names its children. Without them errors show torch's text for a path.
GetAttrKey: Any = _find("torch.utils._pytree.GetAttrKey", _NoKey)
MappingKey: Any = _find("torch.utils._pytree.MappingKey", _NoKey)
SequenceKey: Any = _find("torch.utils._pytree.SequenceKey", _NoKey)

# Every leaf, and a change of every leaf, for the toy device.
tree_leaves: Callable[..., list[Any]] = _need("torch.utils._pytree.tree_leaves", _NO_TOY)
tree_map: Callable[..., Any] = _need("torch.utils._pytree.tree_map", _NO_TOY)

# --- Modules and their parameters ---

# The dicts in which a module keeps its own parameters, buffers and children. Names and values can be had
# otherwise, but not the place to put others in.
_MODULE = nn.Module()
_NO_REPLICAS = "modules cannot be replicated"
parameters_of: Callable[[nn.Module], dict[str, Any]] = _attribute(_MODULE, "_parameters", _NO_REPLICAS)
buffers_of: Callable[[nn.Module], dict[str, Any]] = _attribute(_MODULE, "_buffers", _NO_REPLICAS)
children_of: Callable[[nn.Module], dict[str, Any]] = _attribute(_MODULE, "_modules", _NO_REPLICAS)

# A copy of a module that copies itself in its own way, as recurrent layers do. Called only for classes of
# which ``replicates_itself`` is true.
replicate_itself: Callable[[nn.Module], nn.Module] = methodcaller("_replicate_for_data_parallel")

# The hooks that run once a gradient was added to ``.grad``, in order.
grad_hooks_of: Callable[[Any], dict[int, Any]] = _attribute(
    torch.Tensor,
    "_post_accumulate_grad_hooks",
    "a gradient that a user's hook changes could be averaged unchanged",
)


def replicates_itself(kind: type[nn.Module]) -> bool:
    """Whether a class of modules has its own ``replicate_itself``; in a version without it, none has."""
    own = getattr(kind, "_replicate_for_data_parallel", None)
    return own is not getattr(nn.Module, "_replicate_for_data_parallel", None)


def renew_flat_weights(layer: nn.RNNBase) -> None:
    """Have a recurrent layer use its present parameters, of which it has a list beside them.

    torch renews the list itself in the next forward; until then it keeps the old ones alive.
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

_frame_action: Any = _find("torch._C._dynamo.eval_frame._FrameAction", None)
_frame_strategy: Any = _find("torch._C._dynamo.eval_frame._FrameExecStrategy", None)
_set_frame_strategy: Any = _find("torch._C._dynamo.eval_frame.set_code_exec_strategy", None)


def leave_untraced(fn: FunctionType, *, with_calls: bool, reason: str) -> None:
    """Have torch.compile break its graph at a function, and compile neither it nor, if asked, what it calls.

    It does what ``torch._dynamo.skip`` and ``disable`` do, without importing the compiler. Without it the
    wrapper's own code is compiled in pieces, and again for every changed number.
    """
    if None not in (_frame_action, _frame_strategy, _set_frame_strategy):
        skip, default = _frame_action.SKIP, _frame_action.DEFAULT
        _set_frame_strategy(fn.__code__, _frame_strategy(skip, skip if with_calls else default))
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
    mode: str | None = getattr(utils, "get_optimize_ddp_mode", lambda: None)()
    return mode


def fuse_reductions(cap_bytes: int) -> None:
    """Have inductor join a graph's reductions into buckets; without it each gradient is reduced alone."""
    from torch._inductor import config

    with contextlib.suppress(AttributeError):  # what a version without these options raises
        config._fuse_ddp_communication = True
        config._fuse_ddp_bucket_size = cap_bytes / 2**20  # type: ignore[assignment]  # a cap may be a fraction


# --- Process groups ---


def _world_group() -> Any:
    if distributed.group.WORLD is None:
        raise ValueError("the default process group has not been initialized; call init_process_group first")
    return distributed.group.WORLD


def _broadcast_each(process_group: Any, tensors: list[Tensor], _nbytes: int, source: int) -> None:
    for tensor in tensors:
        distributed.broadcast(tensor, group=process_group, group_src=source)


# The group that init_process_group made; raises torch's error if there is none.
default_process_group: Callable[[], Any] = _find(
    "torch.distributed.distributed_c10d._get_default_group", _world_group
)

# Whether this process is outside a group.
is_outside: Callable[[Any], bool] = _find(
    "torch.distributed.distributed_c10d._rank_not_in_group", lambda group: distributed.get_rank(group) < 0
)

# Broadcasts many tensors in few messages. Without it: one broadcast per tensor.
broadcast_coalesced: Callable[[Any, list[Tensor], int, int], None] = _find(
    "torch.distributed._broadcast_coalesced", _broadcast_each
)

# The size of the first bucket in torch's wrapper.
FIRST_BUCKET_BYTES = int(_find("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES", 2**20))

# A tensor that a collective has not finished yet. Without it such a local tensor would be read too early.
AsyncCollectiveTensor: Any = _find("torch.distributed._functional_collectives.AsyncCollectiveTensor", _NoKey)


def _backend_options(process_group: Any) -> Any:
    """The options of a group's first backend; None for a group that has no backends, or one without any."""
    if not process_group._device_types:
        return None
    return process_group._get_backend(torch.device(process_group._device_types[0])).options


def timeout_of(process_group: Any) -> timedelta:
    """How long ranks wait for each other. Without it: torch's default of 30 minutes."""
    options = _backend_options(process_group)
    timeout: timedelta = _c10d.default_pg_timeout if options is None else options._timeout
    return timeout


def name_groups_anew() -> None:
    """Have the next default group named as the first one, after one that could not be opened.

    Ranks meet under the group's name, which is its number. Without it they would never meet again.
    """
    _c10d._world.group_count = 0


def set_timeout(process_group: Any, timeout: timedelta) -> None:
    """Change how long ranks wait for each other. Without it: as long as the group was given."""
    setter = getattr(_c10d, "_set_pg_timeout", None)
    if setter is not None:
        setter(timeout, process_group)


def gloo_threads_of(process_group: Any) -> int:
    """The number of gloo's threads, for the logging data. Without it: 0 there."""
    options = _backend_options(process_group)
    return 0 if options is None else int(options._threads)


def backend_config_of(process_group: Any, default: str) -> str:
    """The backend of each device, as ``init_process_group`` was given it, such as "cpu:gloo,cuda:nccl".

    Without it groups of the backend "paceline" have no other devices.
    """
    config: str = _c10d._world.pg_backend_config.get(process_group, default)
    return config


def is_open(process_group: Any) -> bool:
    """Whether a group was not destroyed yet. Without it: destroy it, and ignore torch's error."""
    return _c10d._world.pg_map.get(process_group) is not None


def open_gloo(store: Any, *, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group of gloo that torch.distributed does not know, whose ranks meet at the store.

    torch.distributed names a group of some ranks after the number of groups that each of them has opened.
    Ranks that have opened different numbers would never meet.
    """
    group = _c10d.ProcessGroup(store, rank, size)
    kind = _c10d.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend = _c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


_disabled_join: Any = _find(
    "torch.distributed.algorithms.join._JoinConfig.construct_disabled_join_config", None
)


def disable_join(joinable: Joinable) -> None:
    """Let forward tell the other ranks nothing more; torch's own wrapper goes on after its join has ended.

    Without it each forward after a join sends the other ranks one message that nobody needs.
    """
    if _disabled_join is not None:
        joinable._join_config = _disabled_join()


# The sum of a tensor over the ranks, by a collective that torch.compile can trace.
_traced_all_reduce: Any = _need(
    "torch.distributed._functional_collectives.all_reduce", "a compiled backward cannot reduce gradients"
)


def traced_all_reduce(tensor: Tensor, process_group: Any) -> Tensor:
    """The sum of a tensor over the ranks, by a collective that torch.compile can trace.

    It is waited for where it is first read.
    """
    total: Tensor = _traced_all_reduce(tensor, "sum", process_group)
    return total


def as_overlapped_optimizer(optimizer: type, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """An optimizer that steps behind a communication hook."""
    module = "torch.distributed.algorithms._optimizer_overlap.optimizer_overlap"
    make = _need(f"{module}._as_overlapped_optim", "there is no _register_fused_optim")
    return make(optimizer, parameters, *args, **kwargs)


# --- DTensor ---

# A DTensor's local tensor, as it is: ``to_local`` is part of autograd's graph, and may be a view.
local_tensor_of: Callable[[Any], Any] = attrgetter("_local_tensor")

# A DTensor's mesh, placements, shape and strides, which its constructor takes. ``from_local`` would do more.
spec_of: Callable[[Any], Any] = attrgetter("_spec")

# --- RPC, which some builds of torch do not have ---

# Whether this process takes part in RPC. Without it a context is always asked for.
is_rpc_open: Callable[[], bool] = (
    _find("torch.distributed.rpc.api._is_current_rpc_agent_set", lambda: True)
    if distributed.rpc.is_available()
    else lambda: False
)


def autograd_context_id() -> int:
    """This thread's context of distributed autograd; raises RuntimeError if there is none.

    Without it parameters that distributed autograd reaches are not averaged.
    """
    current = _need("torch.distributed.autograd._current_context", "distributed autograd is not supported")
    return int(current()._context_id())


# --- Data loaders ---


_LoaderIterator: Any = _find("torch.utils.data.dataloader._BaseDataLoaderIter", None)


def after_each_batch(call: Callable[[Any, int], object]) -> None:
    """Call a function after each batch that a loader gives; never without the name.

    Args:
        call: takes the loader's iterator, and when it was asked for the batch (nanoseconds of the monotonic
            clock).
    """
    if _LoaderIterator is None:
        return
    give = _LoaderIterator.__next__

    @functools.wraps(give)
    def give_and_call(self: Any) -> Any:
        asked = time.monotonic_ns()
        batch = give(self)
        call(self, asked)
        return batch

    _LoaderIterator.__next__ = give_and_call


_save: Any = _find("torch.serialization._save", None)


def after_each_save(call: Callable[[int], object]) -> None:
    """Call a function after each ``torch.save``, with when it began (as above); never without the name."""
    if _save is None:
        return

    @functools.wraps(_save)
    def save_and_call(*arguments: Any, **options: Any) -> Any:
        began = time.monotonic_ns()
        result = _save(*arguments, **options)
        call(began)
        return result

    torch.serialization._save = save_and_call


def sampler_iterator_of(loader_iterator: Any) -> object:
    """The iterator over its sampler that a loader's iterator reads from; None without the name.

    Without it a ``ShardedBatchSampler`` cannot tell how far training has come, and has to be told.
    """
    return getattr(loader_iterator, "_sampler_iter", None)


# --- The elastic agent ---


def parse_rendezvous_config(text: str) -> dict[str, str]:
    """The pairs of ``--rdzv-conf``."""
    parse: Callable[[str], dict[str, str]] = _need(
        "torch.distributed.elastic.rendezvous.utils._parse_rendezvous_config",
        "--rdzv-conf cannot be read",
    )
    return parse(text)


def is_this_host(address: str) -> bool:
    """Whether torch takes an address for this host's; without it the doctor's advice is less exact."""
    path = "torch.distributed.elastic.rendezvous.utils._matches_machine_hostname"
    return bool(_find(path, lambda _: False)(address))


# --- Devices that are implemented in Python ---

# They also need the order of the methods of a C++ class: see testing/toy/device_guard.py.
register_device: Callable[[str, Any], None] = _need(
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend", _NO_TOY
)
DeviceModule: Any = _find("torch.utils.backend_registration._DummyBackendModule", object)
# The number of the type that torch keeps for devices from outside.
OUTSIDE_DEVICE_TYPE = int(_find("torch._C._autograd.DeviceType.PrivateUse1.value", 20))
make_wrapper_subclass: Callable[..., Any] = _need("torch.Tensor._make_wrapper_subclass", _NO_TOY)
# Gives a tensor the storage of another one of its device, as views have it.
share_storage: Callable[[Tensor, Tensor], None] = _need("torch._functionalize_unsafe_set", _NO_TOY)
# The operations behind ``Tensor.to``, ``Tensor.item`` and ``torch.tensor``, and the view that some matmuls
# return, which does not say that it is one.
TO_COPY: Any = torch.ops.aten._to_copy.default
READ_SCALAR: Any = torch.ops.aten._local_scalar_dense.default
COPY_FROM: Any = torch.ops.aten._copy_from.default
UNSAFE_VIEW: Any = torch.ops.aten._unsafe_view.default


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
        "ddp/wrapper.py optim/wrapped_optimizer.py",
        "says in each forward whether a join is active; without it join has no effect",
    ),
    PrivateAttribute(
        "torch.distributed.algorithms.join.Join",
        "_extract_dist_info _joinables _process_group _rank _device",
        "comm/torch_distributed.py",
        "set for a wrapper whose group torch.distributed does not know; without them only known groups join",
    ),
    PrivateAttribute(
        "torch.distributed.ProcessGroup",
        "_allgather_base",
        "comm/group.py comm/backend/process_group.py testing/toy/toy_group.py",
        "gathers rows in each step; torch 2.13 also has all_gather_single, the other name of the same",
    ),
    PrivateAttribute(
        "torch.distributed.ProcessGroup",
        "_device_types _get_backend _set_group_name _set_group_desc _reduce_scatter_base _register_backend "
        "_set_default_backend",
        "comm/backend/process_group.py testing/toy/toy_group.py",
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
        "_start_workers _stop_workers _restart_workers _monitor_workers _exit_barrier _shutdown _pcontext "
        "_rdzv_handler _remaining_restarts",
        "tools/run/agent.py",
        "called or overridden by our agent to know the ranks' processes; without them paceline run fails",
    ),
    PrivateAttribute(
        "torch",
        "_dynamo",
        "tools/run/worker.py",
        "imported by the first optimizer, which takes a second; without it a spare is slower by that",
    ),
    PrivateAttribute(
        "torch.distributed.elastic.multiprocessing.api.SubprocessContext",
        "_running_local_ranks",
        "tools/run/healer.py",
        "the ranks whose ends the agent looks for; without it a run cannot go on without a lost rank",
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
