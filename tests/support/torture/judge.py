"""Whether what the ranks have is what one process would have."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from torture.case import Case
from torture.run import Expected, ExpectedLoss, Grads, Lost, Refused

# Largest difference, as a share of the step's largest gradient entry of the same type.
TOLERANCE = {torch.double: 1e-12, torch.cdouble: 1e-12, torch.bfloat16: 2**-7}


class Verdict(StrEnum):
    """How a case can end, best first."""

    RIGHT = "right"
    ERROR = "error"
    HANG = "hang"
    WRONG = "silently wrong"


@dataclass(frozen=True)
class Finding:
    """A verdict, and what it rests on."""

    verdict: Verdict
    reason: str = ""


Seen = Sequence[Grads | Lost] | Refused


def judge(case: Case, expected: Sequence[Expected | ExpectedLoss], ranks: Sequence[Seen]) -> Finding:
    """Compare every rank's steps with the oracle's."""
    for rank, seen in enumerate(ranks):
        if bool(case.refused) != isinstance(seen, Refused):
            return Finding(Verdict.WRONG, f"rank {rank}: wrapped, but had to be refused")
        if isinstance(seen, Refused) and case.refused not in seen.error:
            return Finding(Verdict.ERROR, f"rank {rank}: refused for another reason: {seen.error}")
    if case.refused:
        return Finding(Verdict.RIGHT)
    for step, want in enumerate(expected):
        finding = _judge_step(want, [seen[step] for seen in ranks])
        if finding.verdict is not Verdict.RIGHT:
            return Finding(finding.verdict, f"step {step}: {finding.reason}")
    return Finding(Verdict.RIGHT)


def _judge_step(want: Expected | ExpectedLoss, ranks: Sequence[Grads | Lost]) -> Finding:
    if isinstance(want, ExpectedLoss):
        return _judge_loss(want, ranks)
    for rank, seen in enumerate(ranks):
        if isinstance(seen, Lost):
            return Finding(Verdict.ERROR, f"rank {rank}: {seen.error}")
        if misfit := _misfit(seen.grads, want.grads) or _misfit(seen.local, want.local[rank]):
            return Finding(Verdict.WRONG, f"rank {rank}: {misfit}")
        if misfit := _misfit(seen.grads, ranks[0].grads, to_the_bit=True):
            return Finding(Verdict.WRONG, f"ranks 0 and {rank} differ: {misfit}")
    return Finding(Verdict.RIGHT)


def _judge_loss(want: ExpectedLoss, ranks: Sequence[Grads | Lost]) -> Finding:
    """A culprit sees its own error; the others' errors name one."""
    names = [f"rank {culprit}" for culprit in want.culprits]
    for rank, seen in enumerate(ranks):
        if not isinstance(seen, Lost):
            return Finding(Verdict.WRONG, f"rank {rank}: went on without {', '.join(names)}")
        words = ["boom"] if rank in want.culprits else names
        if not any(word in seen.error for word in words):
            return Finding(Verdict.ERROR, f"rank {rank}: the error does not name {words[0]}: {seen.error}")
    return Finding(Verdict.RIGHT)


Named = dict[str, torch.Tensor | None]


def _misfit(got: Named, want: Named, *, to_the_bit: bool = False) -> str:
    """The first tensor that differs, and how; empty if none does."""
    if got.keys() != want.keys():
        return f"has {sorted(got)}, not {sorted(want)}"
    allowed = {} if to_the_bit else _allowed(want)
    for name, tensor in want.items():
        if reason := _difference(got[name], tensor, allowed):
            return f"{name}: {reason}"
    return ""


Allowed = dict[torch.dtype, float]


def _allowed(want: Named) -> Allowed:
    """How far a gradient of each type may be off; not at all where the type is not listed."""
    allowed = dict.fromkeys(TOLERANCE, 0.0)
    for tensor in want.values():
        if tensor is not None and tensor.dtype in TOLERANCE:
            share = TOLERANCE[tensor.dtype] * _largest(tensor)
            allowed[tensor.dtype] = max(allowed[tensor.dtype], share)
    return allowed


def _difference(got: torch.Tensor | None, want: torch.Tensor | None, allowed: Allowed) -> str:
    if got is None or want is None:
        return "" if got is want else f"is {_kind(got)}, not {_kind(want)}"
    if _kind(got) != _kind(want):
        return f"is {_kind(got)}, not {_kind(want)}"
    error, most = _largest(got - want), allowed.get(want.dtype, 0.0)
    # Written so that NaN is a difference.
    return "" if error <= most else f"is off by {error:.2g}, more than {most:.2g}"


def _kind(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "None"
    strides = "" if tensor.is_sparse else f" with strides {tensor.stride()}"
    return f"{tensor.dtype} {tensor.layout} {tuple(tensor.shape)}{strides}"


def _largest(tensor: torch.Tensor) -> float:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.abs().max().item() if dense.numel() else 0.0
