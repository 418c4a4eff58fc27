"""What torch.compile traces: the module, and nothing of what the wrapper does around it.

torch.compile follows Python frames. The wrapper's hold locks, call back into autograd and begin collectives,
which no graph can hold. Traced, each would be compiled in pieces, and again for every changed number. So
their code is marked to be skipped. The mark is on the code itself: programs that do not compile pay nothing
per call, and do not import torch's compiler, which takes a second.

Private parts of torch that are used here, tried with torch 2.13: ``set_code_exec_strategy`` with its types
and the attribute ``_torchdynamo_disable`` (and its ``_msg``), which together are what ``torch._dynamo.skip``
sets, the attribute ``_torchdynamo_inline``, ``get_optimize_ddp_mode``, and inductor's ``_fuse_ddp_...``.
"""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

_eval_frame: Any = torch._C._dynamo.eval_frame
_SKIP, _DEFAULT = _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT

F = TypeVar("F", bound=Callable[..., Any])


def untraced(fn: F) -> F:
    """Leave this function out of what is compiled; what it calls may be compiled."""
    return _leave_out(fn, below=_DEFAULT)


def untraced_with_calls(fn: F) -> F:
    """Leave this function, and all that it calls, out of what is compiled."""
    return _leave_out(fn, below=_SKIP)


def traced_as(other: Callable[..., Any]) -> Callable[[F], F]:
    """Have torch.compile trace another function instead of this one, which runs where nothing is compiled."""

    def set_other(fn: F) -> F:
        fn._torchdynamo_inline = other  # type: ignore[attr-defined]
        return fn

    return set_other


def break_graph(module: nn.Module) -> None:  # noqa: ARG001  # torch.compile looks at calls with a module
    """Have ``torch.compile(fullgraph=True)`` refuse the caller: this can be traced, what it calls cannot."""
    _not_traced()


def reduces_in_graph() -> bool:
    """Whether torch.compile was asked to trace the reduction of gradients (``optimize_ddp``)."""
    # If somebody asked, the compiler has been imported.
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.get_optimize_ddp_mode() == "python_reducer"


def fuse_reductions(cap_bytes: int) -> None:
    """Have inductor join the reductions that it finds in a graph into buckets of that many bytes."""
    from torch._inductor import config

    config._fuse_ddp_communication = True
    config._fuse_ddp_bucket_size = cap_bytes / 2**20  # type: ignore[assignment]  # a cap may be a fraction


def _leave_out(fn: F, *, below: Any) -> F:
    assert isinstance(fn, FunctionType)
    _eval_frame.set_code_exec_strategy(fn.__code__, _eval_frame._FrameExecStrategy(_SKIP, below))
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    fn._torchdynamo_disable_msg = "paceline's part of a step is not traced"  # type: ignore[attr-defined]
    return fn


@untraced_with_calls
def _not_traced() -> None:
    pass


@untraced_with_calls
def is_being_traced() -> bool:
    """Whether ``torch.jit.trace`` is running, as it does when TensorBoard draws a graph."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]  # public, says its page
