"""docs/mapping.md has every name of the original, with places and tests that exist."""

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from paceline.ddp.compat.torch_names import INNER_STEPS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mapping.md"
PACKAGE = ROOT / "src" / "paceline"

# By the page's headings.
NAMES = {
    "Types": "DistributedDataParallel _BufferCommHookLocation _DDPJoinHook main_hook post_hook _DDPSink",
    "Set-up": """
        _ddp_init_helper _build_params_for_reducer _assign_modules_buffers _build_debug_param_to_name_mapping
        _get_parameters model_parameters _check_default_group _set_params_and_buffers_to_ignore_for_model
        _get_data_parallel_params _passing_sync_batchnorm_handle _log_and_throw _dump_DDP_relevant_env_vars
        __getstate__ __setstate__ _lazy_init _BucketCapacityConfig compute_bucket_size_limits
        has_custom_per_bucket_caps bucket_cap_mb_list batched_grad_copy forward_sync_buffers
        lazy_bucket_allocation
    """,
    "Step": """
        forward _pre_forward _run_ddp_forward _post_forward _inside_ddp_forward _get_active_ddp_module
        to_kwargs scatter gather _find_tensors _tree_flatten_with_rref _tree_unflatten_with_rref no_sync train
        _clear_grad_buffer
    """,
    "Reduction": """
        _register_accum_grad_hook compiled_accum_grad_hook _fire_reducer_autograd_hook _remove_autograd_hooks
        _check_reducer_finalized _set_static_graph _set_ddp_sink_clone _set_sparse_metadata
        _update_process_group _register_delay_all_reduce_hook _delayed_all_reduce_hook
        require_manual_backward_finalization should_finalize_after_backward finalize_backward
        _check_manual_backward_finalization_supported
    """,
    "Hooks and optimizers": """
        register_comm_hook noop encode_and_decode decode _check_comm_hook _register_builtin_comm_hook
        _register_buffer_comm_hook _register_fused_optim _setup_in_backward_optimizers
    """,
    "Buffers": """
        will_sync_module_buffers _check_sync_bufs_pre_fwd _check_sync_bufs_post_fwd
        _check_and_sync_module_buffers _sync_buffers _sync_module_buffers _sync_final_model _find_common_rank
        _default_broadcast_coalesced _distributed_broadcast_coalesced _distributed_rank
    """,
    "Join": """
        join join_hook join_device join_process_group _check_global_requires_backward_grad_sync
        _match_all_reduce_for_bwd_pass _match_unused_params_allreduce
    """,
    "Precision": "_setup_mixed_precision_params _cast_buffers _root_copy_hook _module_wait_for_copy_hook",
    "Logging": "_get_ddp_logging_data _set_ddp_runtime_logging_sample_rate",
    "Scatter, gather, parallel_apply and DTensors": """
        scatter scatter_map scatter_kwargs gather gather_map is_namedtuple _is_namedtuple worker
        _flatten_tensor _unflatten_tensor sync_grad_hook
    """,
    "What test_data_parallel.py asks": """
        buffers_requiring_grad rnn lazy_linear parallel_apply parallel_apply_autocast
        parallel_apply_passes_exception multiple_input small_back device_args model_device model_no_refcycles
        no_grad data_parallel data_parallel_sparse data_parallel_complex nested_input nested_output
        module_zero_inputs module_kwargs_only module_kwargs_only_empty_dict module_kwargs_only_empty_list
        module_kwargs_only_empty_tuple function_deletion scatter_cpu scatter_gpu gather_cpu gather_gpu
        gather_different_len_dicts replicate replicate_buffers zero_grad autocast save_replica_module
        strided_grad_layout parameter_list_dict_replica several_dtypes
    """,
}
# The section about tests, which no release has: its table says nothing about releases.
TESTS = "What test_data_parallel.py asks"
OLDEST = "before 2.10"
WANTED = {(section, name) for section, names in NAMES.items() for name in names.split()}


class Row(NamedTuple):
    """One line of a table, with what stands in backquotes in its columns."""

    line: int
    section: str
    names: list[str]
    places: list[str]
    tests: list[str]
    since: str | None = None


def rows(page: str) -> Iterator[Row]:
    section = ""
    for line, text in enumerate(page.splitlines(), 1):
        if text.startswith("## "):
            section = text.removeprefix("## ")
        texts = text.strip("|").split(" | ")
        if text.startswith("| `") and len(texts) == (4 if section == TESTS else 5):
            names, places, tests = (re.findall(r"`([^`]+)`", texts[at]) for at in (0, -2, -1))
            yield Row(line, section, names, places, tests, None if section == TESTS else texts[1])
        elif text.startswith("| ") and not text.startswith("| name |"):
            yield Row(line, section, [], [], [])


def stale(page: str, wanted: set[tuple[str, str]]) -> list[str]:
    """What is missing from a page, and what of it is not so."""
    found = [*rows(page)]
    named = {(row.section, name) for row in found for name in row.names}
    return [
        *(f"no row for {name} under {section!r}" for section, name in sorted(wanted - named)),
        *(f"line {row.line}: {what}" for row in found for what in wrong(row)),
    ]


def wrong(row: Row) -> Iterator[str]:
    if not (row.names and row.places and row.tests):
        yield "a row needs a name, a place and a test, each in backquotes"
    if row.since is not None:
        yield from wrong_release(row.names, row.since)
    for place in row.places:
        if not exists(PACKAGE, place):
            yield f"there is no {place} in {PACKAGE.name}"
    for test in row.tests:
        bare, _, case = test.removesuffix("]").partition("[")
        if not exists(ROOT, bare) or not bare.startswith("tests/") or "::test_" not in bare:
            yield f"there is no test {bare}"
        elif case and case not in (ROOT / bare.partition("::")[0]).read_text():
            yield f"there is no case {case!r} of {bare}"


def wrong_release(names: Sequence[str], since: str) -> Iterator[str]:
    """Whether the installed torch has the names as it should."""
    match = re.match(r"before 2\.10$|(2\.\d+)(; .*)?$", since)
    if match is None:
        yield f'a release is "{OLDEST}" or a version ({since})'
        return
    installed = _version(torch.__version__)
    is_there = match[1] is None or _version(match[1]) <= installed
    for name in names:
        if (name in torchs_words()) != is_there:
            yield f"torch {torch.__version__} has {'no' if is_there else 'a'} {name} (since: {since})"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@functools.cache
def torchs_words() -> set[str]:
    """Every word of the files that the page is about, in the installed torch."""
    root = Path(torch.__file__).parent
    files = [*(root / "nn" / "parallel").glob("*.py")]
    files.append(root / "distributed" / "tensor" / "parallel" / "_data_parallel_utils.py")
    return {word for file in files for word in re.findall(r"\w+", file.read_text())}


def exists(root: Path, place: str) -> bool:
    path, _, name = place.partition("::")
    file = root / path
    return file.is_file() and name in definitions(file)


@functools.cache
def definitions(file: Path) -> set[str]:
    """What a file defines or imports, members of classes behind a dot."""
    return {*defined(ast.parse(file.read_text()).body)}


def defined(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
                yield from (f"{name}.{member}" for member in defined(statement.body))
            case ast.ImportFrom(names=names):
                yield from (each.asname or each.name for each in names)
            case ast.If():
                yield from defined([*statement.body, *statement.orelse])


def test_every_name_has_its_row_and_every_place_and_test_exists() -> None:
    told = stale(PAGE.read_text(), WANTED)
    assert not told, "\n".join(["docs/mapping.md is stale:", *told])


def test_names_that_refuse_with_a_hint_to_the_page_are_on_it() -> None:
    assert set(INNER_STEPS) <= {name for _, name in WANTED}


RIGHT = (
    "| `join` | before 2.10 | job | `ddp/wrapper.py::DistributedDataParallel.join` "
    "| `tests/ranks/ddp/test_join.py::test_join_can_be_switched_off` |"
)


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("", "", None),
        ("wrapper.py", "attic.py", "there is no ddp/attic.py::DistributedDataParallel.join in paceline"),
        (".join`", ".joint`", "there is no ddp/wrapper.py::DistributedDataParallel.joint in paceline"),
        ("test_join.py", "test_attic.py", "there is no test tests/ranks/ddp/test_attic.py::test_join_can"),
        ("_switched_off", "_switched_on", "there is no test tests/ranks/ddp/test_join.py::test_join_can_be_"),
        ("_switched_off`", "_switched_off[attic]`", "there is no case 'attic' of tests/ranks/ddp/test_join"),
        ("::test_join_can_be_switched_off", "::inputs", "there is no test tests/ranks/ddp/test_join.py::in"),
        ("`ddp/wrapper.py::DistributedDataParallel.join`", "somewhere", "a row needs a name, a place and"),
        ("| job ", "", "a row needs a name, a place and a test"),
        ("`join`", "`joint`", "no row for join under 'Join'"),
        ("before 2.10", "long ago", 'a release is "before 2.10" or a version (long ago)'),
        ("before 2.10", "2.99", f"torch {torch.__version__} has a join (since: 2.99)"),
        ("`join`", "`join`, `attic_`", f"torch {torch.__version__} has no attic_ (since: before 2.10)"),
    ],
)
def test_a_wrong_row_is_reported(before: str, after: str, complaint: str | None) -> None:
    told = stale(f"## Join\n\n{RIGHT.replace(before, after)}\n", {("Join", "join")})
    assert bool(told) == (complaint is not None)
    assert complaint is None or any(complaint in each for each in told)
