"""What torch.compile traces: the module, and nothing of what the wrapper does around it.

torch.compile follows Python frames. The wrapper's hold locks, call back into autograd and begin collectives,
which no graph can hold. Traced, each would be compiled in pieces, and again for every changed number. So
their code is marked to be skipped. The mark is on the code itself: programs that do not compile pay nothing
per call, and do not import torch's compiler, which takes a second.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.torch_private import leave_untraced, optimize_ddp_mode, trace_instead

F = TypeVar("F", bound=Callable[..., Any])


def untraced(fn: F) -> F:
    """Leave this function out of what is compiled; what it calls may be compiled."""
    return _leave_out(fn, with_calls=False)


def untraced_with_calls(fn: F) -> F:
    """Leave this function, and all that it calls, out of what is compiled."""
    return _leave_out(fn, with_calls=True)


def traced_as(other: Callable[..., Any]) -> Callable[[F], F]:
    """Have torch.compile trace another function instead of this one, which runs where nothing is compiled."""

    def set_other(fn: F) -> F:
        trace_instead(fn, other)
        return fn

    return set_other


def break_graph(module: nn.Module) -> None:  # noqa: ARG001  # torch.compile looks at calls with a module
    """Have ``torch.compile(fullgraph=True)`` refuse the caller: this can be traced, what it calls cannot."""
    _not_traced()


def reduces_in_graph() -> bool:
    """Whether torch.compile was asked to trace the reduction of gradients (``optimize_ddp``)."""
    return optimize_ddp_mode() == "python_reducer"


def _leave_out(fn: F, *, with_calls: bool) -> F:
    assert isinstance(fn, FunctionType)
    leave_untraced(fn, with_calls=with_calls, reason="paceline's part of a step is not traced")
    return fn


@untraced_with_calls
def _not_traced() -> None:
    pass


@untraced_with_calls
def is_being_traced() -> bool:
    """Whether ``torch.jit.trace`` is running, as it does when TensorBoard draws a graph."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]  # public, says its page
