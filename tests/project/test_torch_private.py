"""Private names of torch are in torch_private.py alone, and each does what is said there."""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.storage import TypedStorage
from torch.utils import checkpoint

from paceline import torch_private
from paceline.errors import UnsupportedError

PACKAGE = Path(__file__).parents[2] / "src/paceline"

# Private names of other packages.
NOT_TORCHS = {
    "_config": "multiprocessing.Process",
    "_current_exceptions": "sys",
    "_current_frames": "sys",
    "_exit": "os",
    "_run_module_as_main": "runpy",
    "_actions": "argparse",
    "_ArgumentGroup": "argparse",
    "_fields": "collections.namedtuple",
    "_make": "collections.namedtuple",
    "_asdict": "collections.namedtuple",
}
LIGHTNING = "integrations/lightning.py"

Use = tuple[str, str]  # file, name


@functools.cache
def sources() -> dict[str, ast.Module]:
    files = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for name, path in files.items()}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def listed() -> set[Use]:
    return {
        (file, name)
        for row in torch_private.ATTRIBUTES
        for file in row.files.split()
        for name in row.names.split()
    }


def defined_in(tree: ast.Module) -> set[str]:
    """Every name that a file defines: functions, classes, attributes, variables."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


@functools.cache
def own_names() -> frozenset[str]:
    return frozenset(NOT_TORCHS).union(*map(defined_in, sources().values()))


def chain(node: ast.expr) -> list[str]:
    """The names of ``a.b.c``; of ``f().b.c`` the last two."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def names_of_torch(tree: ast.Module) -> set[str]:
    """The variables of a file that stand for torch, for what was imported from it, or for a part of that."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names) if any(each.name.split(".")[0] == "torch" for each in names):
                found |= {(each.asname or each.name).split(".")[0] for each in names}
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                found |= {each.asname or each.name for each in names}
            case (
                ast.Assign(targets=[ast.Name(id=alias)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=alias), value=ast.expr() as value)
            ) if chain(value) and chain(value)[0] in found:
                found.add(alias)
    return found


def reached_from_torch(file: str, tree: ast.Module) -> Iterator[Use]:
    """Private names that are imported from torch, or read from something that was."""
    roots = names_of_torch(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                parts = [
                    part for each in names for part in each.name.split(".") if each.name.startswith("torch.")
                ]
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
                parts = [*module.split("."), *(each.name for each in names)]
            case ast.Attribute() if [*chain(node), ""][0] in roots:
                parts = chain(node)[1:]
            case ast.Constant(value=str(text)) if text.startswith("torch._") and " " not in text:
                parts = text.split(".")
            case _:
                continue
        yield from ((file, part) for part in parts if is_private(part))


def read_from_anything(tree: ast.Module) -> Iterator[str]:
    """Private attributes that are read or set, by a dot, by attrgetter or by getattr and the like."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if is_private(name):
                yield name
            case ast.Call(
                func=ast.Name(
                    id="getattr"
                    | "hasattr"
                    | "setattr"
                    | "delattr"
                    | "attrgetter"
                    | "methodcaller"
                    | "_attribute"
                    | "_find"
                    | "_need"
                ),
                args=args,
            ):
                yield from (
                    part
                    for arg in args
                    if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                    for part in arg.value.split(".")
                    if is_private(part)
                )


def read_from_others(tree: ast.Module) -> Iterator[str]:
    """Private attributes of objects other than ``self``."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                yield name


@functools.cache
def names_of_torch_private() -> frozenset[str]:
    return frozenset(read_from_anything(sources()["torch_private.py"]))


def private_uses(file: str, tree: ast.Module) -> set[Use]:
    """Private names of torch in a file: those that lead from torch, and those that nobody else can own.

    Also those that torch_private has, unless they are read from ``self``.
    """
    found = set(reached_from_torch(file, tree))
    if file != LIGHTNING:
        found |= {(file, name) for name in read_from_anything(tree) if name not in own_names()}
        found |= {(file, name) for name in read_from_others(tree) if name in names_of_torch_private()}
    return found


def test_no_other_file_has_private_names_of_torch() -> None:
    others = {file: tree for file, tree in sources().items() if file != "torch_private.py"}
    found = {use for file, tree in others.items() for use in private_uses(file, tree)}
    assert sorted(found - listed()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_add_([], [])",
        "import torch._dynamo",
        "from torch.utils._pytree import tree_map",
        "from torch.distributed.algorithms.join import _JoinConfig",
        "from torch.distributed import distributed_c10d as c10d\nc10d._get_default_group()",
        "from typing import Any\nimport torch\naten: Any = torch.ops.aten\naten._to_copy.default",
        "from torch import nn\nTheirs = nn.Module\nTheirs._replicate_for_data_parallel",
        "def f(tensor):\n    return tensor._base",
        "def f(module):\n    return module._buffers",
        "def f(tensor):\n    return getattr(tensor, '_base', None)",
        "import sys\nsys.modules['torch._inductor']",
    ],
)
def test_a_private_name_elsewhere_is_found(source: str) -> None:
    assert private_uses("ddp/new.py", ast.parse(source))


def test_the_table_lists_nothing_that_is_not_used() -> None:
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    for row in torch_private.ATTRIBUTES:
        files = [texts[file] for file in row.files.split()]
        assert [name for name in row.names.split() if not any(name in text for text in files)] == []


def names_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr


def test_every_name_is_used() -> None:
    ours = sources()["torch_private.py"]
    offered = {name for name in defined_in(ours) & vars(torch_private).keys() if not name.startswith("_")}
    used = {name for tree in sources().values() if tree is not ours for name in names_in(tree)}
    assert offered - used == {"ATTRIBUTES", "PrivateAttribute"}


def test_importing_the_package_imports_nothing_that_takes_long() -> None:
    late = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.elastic")
    code = f"import sys, paceline; print([name for name in {late} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr


# What a version without one of them does.


def looked_up() -> dict[str, tuple[str, str]]:
    """For each private name of torch that is looked up at import: our name, and by which function."""
    found = {}
    for node in sources()["torch_private.py"].body:
        for target in [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", []):
            for call in ast.walk(node.value):
                match call:
                    case ast.Call(func=ast.Name(id="_attribute"), args=[_, ast.Constant(value=name), *_]):
                        found[name] = (target.id, "_attribute")
                    case ast.Call(
                        func=ast.Name(id="_find" | "_need" as by), args=[ast.Constant(value=name), *_]
                    ):
                        found[name] = (target.id, by)
    return found


def load(source: str) -> dict[str, Any]:
    module: dict[str, Any] = {"__name__": "paceline.torch_private"}
    exec(compile(source, torch_private.__file__, "exec"), module)
    return module


@pytest.mark.parametrize("name", looked_up())
def test_without_a_name_there_is_a_fallback_or_an_error_that_names_it(name: str) -> None:
    ours, by = looked_up()[name]
    source = Path(torch_private.__file__).read_text()
    assert source.count(f'"{name}"') >= 1
    module = load(source.replace(f'"{name}"', f'"{name}_gone"'))
    if isinstance(module[ours], int):
        assert module[ours] == getattr(torch_private, ours)
    elif by == "_find":
        is_here = hasattr(find_owner(name.rpartition(".")[0]), name.rpartition(".")[2])
        assert (module[ours] is not getattr(torch_private, ours)) is is_here
    else:
        with pytest.raises(UnsupportedError, match=f"has no {name}_gone, without which .* was tried"):
            module[ours](None)


WITH_FALLBACKS = """
import re
from importlib.machinery import SourceFileLoader
import torch
from torch import distributed, nn

get_code = SourceFileLoader.get_code

def without_names(loader, name):
    if name != "paceline.torch_private":
        return get_code(loader, name)
    source, number = re.subn(r'_find\\(\\s*"torch', '_find("torch.gone', loader.get_source(name))
    assert number > 20
    return compile(source, loader.path, "exec")

SourceFileLoader.get_code = without_names

import paceline

assert paceline.torch_private.PYTREE_NODES == {}
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
rows = torch.randn(6, 4)
model(rows).sum().backward()
expected = [parameter.grad.clone() for parameter in model.parameters()]
for wrapped in (paceline.DistributedDataParallel(model), paceline.DataParallel(model, ["cpu"])):
    for _ in range(3):
        model.zero_grad()
        wrapped(rows).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
print("trained")
"""


def test_models_train_with_all_fallbacks_at_once() -> None:
    command = [sys.executable, "-c", WITH_FALLBACKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("trained\n"), done.stderr


@pytest.mark.parametrize("version", ["2.100.0", "2.100.0a0+git", "2.100+own", "3.0.0", "10.1"])
def test_a_torch_newer_than_all_that_were_tried_is_warned_about(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(UserWarning, match=rf"\(torch: {re.escape(version)}, newest tried: 2\.\d+\)"):
        torch_private.warn_if_newer()


@pytest.mark.parametrize(
    "version", ["2.9.1", "unknown", *(f"{release}.3+cpu" for release in torch_private.TRIED)]
)
def test_other_versions_are_not_warned_about(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    torch_private.warn_if_newer()


def test_the_warning_comes_once_and_points_to_the_import() -> None:
    code = "import torch\ntorch.__version__ = '2.100.0'\nimport paceline\nimport paceline.nn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("not tried with a torch as new") == 1
    assert done.stderr.startswith("<string>:3: UserWarning")


# What each name does.


def find_owner(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(find_owner(module), name)


def has(kind: type, name: str) -> bool:
    """Whether a class has an attribute, or its source sets or asks for it."""
    in_python = [each for each in kind.__mro__ if each.__module__.startswith("torch.")]
    return hasattr(kind, name) or any(name in inspect.getsource(each) for each in in_python)


@pytest.mark.parametrize("row", torch_private.ATTRIBUTES, ids=lambda row: row.owner)
def test_torchs_classes_have_the_listed_attributes(row: torch_private.PrivateAttribute) -> None:
    if row.owner.startswith("torch."):
        kind = find_owner(row.owner)
        assert [name for name in row.names.split() if not has(kind, name)] == []


def test_the_engine_tells_about_the_running_backward() -> None:
    seen: list[object] = []
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    product = a * b
    (_, leaf_of_b) = (node for node, _ in product.grad_fn.next_functions)

    def look(_: Tensor) -> None:
        number = torch_private.current_graph_task_id()
        seen.append((number >= 0, torch_private.keeps_graph(), torch_private.will_execute_node(leaf_of_b)))
        torch_private.queue_callback(lambda: seen.append("end"))

    product.register_hook(look)
    torch.autograd.grad(product.sum(), a, retain_graph=True)
    product.sum().backward()
    assert torch_private.current_graph_task_id() == -1
    assert seen == [(True, True, False), "end", (True, False, True), "end"]


def test_asked_for_leaves_are_not_executed() -> None:
    a = torch.ones(2, requires_grad=True)
    doubled = a * 2
    leaf = doubled.grad_fn.next_functions[0][0]

    def look(_: Tensor) -> None:
        with pytest.raises(RuntimeError):
            torch_private.will_execute_node(leaf)

    doubled.register_hook(look)
    torch.autograd.grad(doubled.sum(), a)


def test_versions_count_writes() -> None:
    tensor = torch.zeros(2)
    tensor.add_(1)
    assert torch_private.version_of(tensor) == 1
    with torch_private.preserve_version_counter((tensor,)):
        tensor.add_(1)
    assert torch_private.version_of(tensor) == 1


def test_the_profiler_is_noticed() -> None:
    assert not torch_private.is_profiler_enabled()
    with torch.profiler.profile(acc_events=True):  # torch 2.10 warns about the default
        assert torch_private.is_profiler_enabled()


def test_forward_mode_is_noticed() -> None:
    assert torch_private.forward_ad_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.forward_ad_level() == 0


def test_reentrant_checkpoints_are_recognised() -> None:
    x = torch.ones(2, requires_grad=True)
    function = torch_private.function_of(checkpoint.checkpoint(torch.sin, x, use_reentrant=True).grad_fn)
    assert torch_private.CHECKPOINT_TEST in inspect.unwrap(function.backward).__code__.co_names
    assert torch_private.function_of(x.sin().grad_fn) is None


def test_uses_of_a_storage_are_counted() -> None:
    tensor = torch.zeros(4)
    address = torch_private.cdata_of(tensor.untyped_storage())
    before = torch_private.storage_use_count(address)
    kept = tensor[1:]
    assert torch_private.storage_use_count(address) == before + 1
    assert torch_private.is_view(kept)
    assert not torch_private.is_view(tensor)
    assert torch_private.cdata_of(kept) != torch_private.cdata_of(tensor)


def test_hooks_on_tensors_are_seen() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    assert torch_private.backward_hooks_of(tensor) is None
    tensor.register_hook(lambda grad: grad)
    assert len(torch_private.backward_hooks_of(tensor)) == 1


def test_futures_of_python_are_futures_of_cpp() -> None:
    assert isinstance(torch.futures.Future(), torch_private.CppFuture)


def test_typed_storages_hold_memory_without_a_warning() -> None:
    memory = torch.zeros(3).untyped_storage()
    storage = torch_private.typed_storage(memory, torch.float32)
    assert isinstance(storage, TypedStorage)
    assert torch_private.untyped_storage_of(storage).data_ptr() == memory.data_ptr()


def test_lists_of_tensors_are_changed_in_place() -> None:
    tensors = [torch.zeros(2), torch.zeros(3)]
    torch_private.foreach_copy_(tensors, [torch.ones(2), torch.ones(3)])
    torch_private.foreach_mul_(tensors, 6.0)
    torch_private.foreach_div_(tensors, 3.0)
    torch_private.foreach_add_(tensors, [torch.ones(2), torch.ones(3)], alpha=5.0)
    assert [tensor.tolist() for tensor in tensors] == [[7.0] * 2, [7.0] * 3]


def test_structures_are_opened() -> None:
    flat, context = torch_private.PYTREE_NODES[dict].flatten_fn({"a": 1, "b": 2})
    assert [*flat] == [1, 2]
    assert torch_private.PYTREE_NODES[dict].unflatten_fn(flat, context) == {"a": 1, "b": 2}
    assert torch_private.tree_leaves([1, (2, {"c": 3})]) == [1, 2, 3]
    assert torch_private.tree_map(lambda leaf: leaf + 1, [1, (2,)]) == [2, (3,)]
    keys = torch_private.MappingKey("a"), torch_private.SequenceKey(0), torch_private.GetAttrKey("b")
    assert (keys[0].key, keys[1].idx, keys[2].name) == ("a", 0, "b")


def test_modules_are_opened() -> None:
    layer = nn.BatchNorm1d(2)
    assert [*torch_private.parameters_of(layer)] == ["weight", "bias"]
    assert "running_mean" in torch_private.buffers_of(layer)
    assert torch_private.children_of(nn.Sequential(layer))["0"] is layer


def test_recurrent_layers_replicate_themselves() -> None:
    layer = nn.LSTM(2, 2)
    assert torch_private.replicates_itself(nn.LSTM)
    assert not torch_private.replicates_itself(nn.Linear)
    assert type(torch_private.replicate_itself(layer)) is nn.LSTM
    weight = torch_private.parameters_of(layer)["weight_ih_l0"] = nn.Parameter(torch.zeros(8, 2))
    torch_private.renew_flat_weights(layer)
    assert layer._flat_weights[0] is weight
    assert layer(torch.zeros(1, 1, 2))[0].shape == (1, 1, 2)


def test_hooks_on_gradients_are_in_order_and_can_be_renewed() -> None:
    parameter, seen = nn.Parameter(torch.zeros(2)), []
    handles = [parameter.register_post_accumulate_grad_hook(lambda _, n=n: seen.append(n)) for n in range(2)]
    assert [*torch_private.grad_hooks_of(parameter)] == [handle.id for handle in handles]
    torch_private.renew_grad_hooks(parameter)
    parameter.sum().backward()
    assert seen == [0, 1]


def test_optimizers_in_backward_are_found_and_their_hooks_removed() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    parameter = nn.Parameter(torch.zeros(2))
    assert torch_private.in_backward_optimizers(parameter) == ()
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 1.0})
    assert len(torch_private.in_backward_optimizers(parameter)) == 1
    torch_private.remove_in_backward_hooks([parameter])
    parameter.sum().backward()
    assert parameter.tolist() == [0.0, 0.0]


def test_functions_are_left_out_of_graphs() -> None:
    importlib.import_module(torch_private.COMPILER)
    operations: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        operations.extend(node.name for node in graph.graph.nodes if node.op == "call_method")
        return graph.forward

    def inner(x: Tensor) -> Tensor:
        return x.cos()

    def left_out(x: Tensor) -> Tensor:
        return inner(x.sin())

    def replaced(x: Tensor) -> Tensor:
        return x.tan()

    torch_private.leave_untraced(left_out, with_calls=True, reason="a test")
    torch_private.trace_instead(replaced, lambda x: x.exp())
    result = torch.compile(lambda x: left_out(replaced(x)).neg(), backend=backend)(torch.ones(2))
    assert operations == ["exp", "neg"]
    assert result.equal(torch.ones(2).exp().sin().cos().neg())


def test_the_compiler_is_asked_and_told_about_reductions() -> None:
    dynamo = importlib.import_module("torch._dynamo.config")
    inductor = importlib.import_module("torch._inductor.config")
    with dynamo.patch(optimize_ddp="python_reducer"):
        assert torch_private.optimize_ddp_mode() == "python_reducer"
    with inductor.patch(_fuse_ddp_communication=False, _fuse_ddp_bucket_size=25):
        torch_private.fuse_reductions(3 * 2**19)
        assert (inductor._fuse_ddp_communication, inductor._fuse_ddp_bucket_size) == (True, 1.5)


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """The default group, of this process alone."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_without_a_default_group_torch_raises_its_error() -> None:
    with pytest.raises(ValueError, match="has not been initialized"):
        torch_private.default_process_group()


def test_process_groups_tell_about_themselves(group: Any) -> None:
    assert torch_private.default_process_group() is group
    assert not torch_private.is_outside(group)
    assert torch_private.is_outside(distributed.GroupMember.NON_GROUP_MEMBER)
    assert torch_private.timeout_of(group) == timedelta(seconds=77)
    assert torch_private.gloo_threads_of(group) > 0
    assert torch_private.backend_config_of(group, "none").startswith("cpu:gloo")
    assert torch_private.backend_config_of(None, "none") == "none"
    assert torch_private.is_open(group)
    assert not torch_private.is_open(None)


def test_gloo_can_be_opened_beside_torchs_groups(group: Any) -> None:
    store, timeout = distributed.HashStore(), timedelta(seconds=9)
    opened = torch_private.open_gloo(store, rank=0, size=1, timeout=timeout)
    tensor = torch.ones(2)
    opened.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]
    assert (opened.rank(), opened.size()) == (0, 1)
    assert torch_private.timeout_of(opened) == timeout
    assert opened.get_group_store() is not None
    assert torch_private.is_open(group)
    assert not torch_private.is_open(opened)


def test_many_tensors_are_broadcast_at_once(group: Any) -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    torch_private.broadcast_coalesced(group, tensors, 1024, 0)
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 2, [1.0] * 3]


def test_collectives_can_be_traced_and_are_waited_for(group: Any) -> None:
    total = torch_private.traced_all_reduce(torch.ones(2), group)
    assert isinstance(total, torch_private.AsyncCollectiveTensor)
    assert total.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("group")
def test_dtensors_are_opened() -> None:
    mesh = init_device_mesh("cpu", (1,))
    local = torch.ones(2)
    whole = DTensor.from_local(local, mesh)
    assert torch_private.local_tensor_of(whole).data_ptr() == local.data_ptr()
    spec = torch_private.spec_of(whole)
    assert (spec.mesh, spec.placements) == (mesh, whole.placements)
    assert DTensor(local, spec, requires_grad=False).placements == whole.placements


def test_the_first_bucket_is_torchs() -> None:
    assert torch_private.FIRST_BUCKET_BYTES == 2**20


def test_join_can_be_turned_off() -> None:
    class Example(Joinable):
        join_hook = join_device = join_process_group = None

        def __init__(self) -> None:
            super().__init__()

    example = Example()
    torch_private.disable_join(example)
    assert not example._join_config.enable


def test_optimizers_can_step_behind_hooks() -> None:
    with warnings.catch_warnings(record=True):  # torch's about itself, which no filter reaches
        optimizer = torch_private.as_overlapped_optimizer(torch.optim.SGD, None, lr=0.1)
    assert callable(optimizer.register_ddp)


def test_outside_rpc_there_is_no_context() -> None:
    assert not torch_private.is_rpc_open()
    with pytest.raises(RuntimeError):
        torch_private.autograd_context_id()


def test_rendezvous_options_are_read() -> None:
    assert torch_private.parse_rendezvous_config("is_host=1,timeout=3") == {"is_host": "1", "timeout": "3"}
    assert torch_private.is_this_host("localhost")
    assert not torch_private.is_this_host("198.51.100.1")


def test_a_device_can_be_implemented_in_python() -> None:
    class Wrapper(Tensor):
        __torch_dispatch__ = None

    stream = torch.Stream(stream_id=1, device_index=0, device_type=torch_private.OUTSIDE_DEVICE_TYPE)
    assert stream.device.type == torch.device("privateuseone").type
    assert torch_private.make_wrapper_subclass(Wrapper, (2, 3)).shape == (2, 3)
    assert torch_private.TO_COPY(torch.ones(2), dtype=torch.int64).dtype is torch.int64
    assert torch_private.READ_SCALAR(torch.ones(())) == 1
    assert torch_private.UNSAFE_VIEW(torch.ones(4), [2, 2]).shape == (2, 2)
    assert "dst" in str(torch_private.COPY_FROM._schema)
    one, other = torch.ones(2), torch.zeros(2)
    torch_private.share_storage(one, other)
    assert one.data_ptr() == other.data_ptr()
    assert callable(torch_private.register_device)
    assert torch_private.DeviceModule().is_available()
