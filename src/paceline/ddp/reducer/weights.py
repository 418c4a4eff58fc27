"""Contributions that count by their number of samples or tokens: what ``weigh`` does to gradients.

The average over ranks r and accumulated passes k is ``sum n[r,k] * g[r,k] / sum n[r,k]``. Passes that only
accumulate leave ``sum n * g`` in ``.grad``; the pass that synchronises reduces that sum, and the sum of the
weights travels in the step report. Gradients that were there before the first pass are set aside meanwhile,
and the average is added to them.
"""

import contextlib
import math
import numbers
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.tensors.dtensor import Trained, grad_version
from paceline.torch_private import is_view


class Weights:
    """The weighted passes since gradients were last averaged.

    Args:
        parameters: every slot's parameter.

    Attributes:
        now: the weight in force; None outside ``weigh``.
    """

    def __init__(self, parameters: Sequence[Trained]) -> None:
        self._parameters = parameters
        self.now: float | None = None
        self.reset()

    def reset(self) -> None:
        """Forget earlier passes."""
        self._earlier: float | None = None
        self._ran = self._synced = self._in_flight = False
        self._left: list[tuple[Trained, Tensor, int]] = []
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self._older: list[Tensor | None] = [None] * len(self._parameters)

    @property
    def total(self) -> float | None:
        """The weight that goes with the sums; None for the plain mean."""
        return None if self.now is None else self.earlier + self.now

    @property
    def earlier(self) -> float:
        """The weight of earlier passes that wait to be averaged."""
        return self._earlier or 0.0

    @property
    def has_earlier(self) -> bool:
        """Whether earlier passes wait to be averaged."""
        return self._earlier is not None

    @contextlib.contextmanager
    def hold(self, weight: float) -> Iterator[None]:
        """Weight whatever backward adds inside."""
        self.now, self._ran = _check(weight), False
        try:
            yield
        except BaseException:
            if self._ran and not (self._synced or self._in_flight):
                self._undo()
            raise
        else:
            self._close()
        finally:
            self.now = None

    def were_cleared(self) -> bool:
        """Whether the sums of earlier passes are gone: set to None, or filled with zeros."""
        return bool(self._left) and all(
            parameter.grad is None
            or (
                (parameter.grad is not left or grad_version(parameter) != version)
                and not parameter.grad.any()
            )
            for parameter, left, version in self._left
        )

    def begin(self) -> None:
        """A backward begins under this weight: set aside what is there from before."""
        if not self._ran or self._synced:
            self._set_aside(self._sums if self.has_earlier else self._older)
        self._ran = True

    def apply(self, slot: int) -> None:
        """Turn a parameter's new gradient into the weighted sum that is to be reduced."""
        parameter = self._parameters[slot]
        grad, total = parameter.grad, self._sums[slot]
        self._sums[slot] = None
        if grad is None or not self.now:  # a pass that counts nothing may well have made NaNs
            parameter.grad = total
            return
        weighted = grad * self.now
        parameter.grad = weighted if total is None else _sum(weighted, total)

    def leave_in_flight(self) -> None:
        """The sums are in flight, and ``finish`` may come after the weight's ``with`` block."""
        self._in_flight = True

    def finish(self) -> None:
        """The sums have been averaged: add what was there before."""
        self._add_older()
        if self._in_flight:
            self.reset()
        else:
            self._synced = True

    def _close(self) -> None:
        if self._synced:
            self.reset()
        elif self._ran and not self._in_flight:
            with torch.no_grad():
                for slot in range(len(self._parameters)):
                    self.apply(slot)
            self._earlier = self.total
            # To tell later whether the user has cleared them.
            self._left = [
                (parameter, parameter.grad, grad_version(parameter))
                for parameter in self._parameters
                if parameter.grad is not None
            ]

    def _undo(self) -> None:
        """Forget a pass that failed: gradients are as they were before it."""
        for slot, parameter in enumerate(self._parameters):
            parameter.grad = self._sums[slot] if self.has_earlier else self._older[slot]
        self._sums = [None] * len(self._sums)
        if not self.has_earlier:
            self._older = [None] * len(self._older)

    def _add_older(self) -> None:
        for slot, older in enumerate(self._older):
            if older is not None:
                parameter = self._parameters[slot]
                parameter.grad = older if parameter.grad is None else _sum(parameter.grad, older)
        self._older = [None] * len(self._older)

    def _set_aside(self, where: list[Tensor | None]) -> None:
        with torch.no_grad():
            for slot, parameter in enumerate(self._parameters):
                if parameter.grad is not None:
                    # A copy where it may be a view of storage that is about to be filled.
                    where[slot] = parameter.grad.clone() if is_view(parameter.grad) else parameter.grad
                    parameter.grad = None


def _sum(a: Tensor, b: Tensor) -> Tensor:
    """Their sum, in place in the first if possible."""
    if a.layout is b.layout or b.layout is not torch.strided:
        return a.add_(b)
    return b + a  # sparse to dense, not the other way round


def _check(weight: object) -> float:
    if isinstance(weight, Tensor):
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise OptionError(f"a weight must be a number (weight: {weight!r})")
    if not math.isfinite(weight) or weight < 0:
        raise OptionError(f"a weight must be finite and not negative (weight: {weight})")
    return float(weight)
