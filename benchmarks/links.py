"""Training steps over a link between network namespaces: their time, and the bytes that it counts."""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import nn

from paceline.testing.hosts import sent_bytes

# A step costs the same with any rate; with a small one no model diverges.
LEARNING_RATE = 1e-6

Step = Callable[[], None]
# For each side, one value per round: seconds per step, and bytes that this rank's host sent per step.
SecondsAndBytes = tuple[dict[str, list[float]], dict[str, list[float]]]


def stepper(
    wrapped: nn.Module, batch: torch.Tensor, sent: list[int], after: Callable[[], object] = lambda: None
) -> Step:
    """zero_grad, forward, backward and plain SGD, then ``after``; appends the bytes sent to ``sent``."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE, foreach=True)

    def step() -> None:
        before = sent_bytes()
        optimizer.zero_grad(set_to_none=True)
        wrapped(batch).square().mean().backward()
        optimizer.step()
        after()
        sent.append(sent_bytes() - before)

    return step


def by_turn(counts: Sequence[int], steps: int) -> list[float]:
    """The mean of each turn, which has that many steps."""
    return [statistics.mean(counts[start : start + steps]) for start in range(0, len(counts), steps)]


def check_same_gradients(first: nn.Module, *others: nn.Module) -> None:
    """Make sure that sides without compression did the same work."""
    for other in others:
        for theirs, ours in zip(first.parameters(), other.parameters(), strict=True):
            assert theirs.grad is not None
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-7)
