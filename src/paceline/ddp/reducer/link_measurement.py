"""Measures links and hooks for the hook "auto" on all ranks, which all get the same numbers or all raise."""

import enum
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.link_speed import Link, measure_links, open_measuring_group
from paceline.ddp.reducer.step_context import StepContext
from paceline.errors import PeerError, UnmeasuredError
from paceline.hooks.auto import Auto
from paceline.hooks.choice import HookCost
from paceline.tensors.dtensor import Trained

_T = TypeVar("_T")


class Failure(enum.IntEnum):
    """How a measurement failed on a rank, from harmless to what the user has to know."""

    NONE = 0
    NO_ANSWER = 1  # messages did not come: the way between hosts, or a rank that was stopped for a while
    ERROR = 2  # anything else that was raised


@dataclass(frozen=True)
class Measured:
    """What ranks have measured together.

    Attributes:
        link: the slowest link.
        costs: what each hook costs on the slowest rank, by name.
        seconds: how long they measured.
    """

    link: Link
    costs: dict[str, HookCost]
    seconds: float


class LinkMeasurement:
    """Measures for one wrapper among some ranks, as often as it is asked to.

    Args:
        hook: the hook "auto", which knows whose links and what hooks to measure.
        device: where the module is.
        reduce_dtype: in which gradients travel; None if each does in its parameter's own type.
    """

    def __init__(self, hook: Auto, device: torch.device, reduce_dtype: torch.dtype | None) -> None:
        self._hook = hook
        self._device = device
        self._reduce_dtype = reduce_dtype
        # Of a rank that measures links, a process group; None until all ranks have opened theirs.
        self._opened: list[Any] | None = None

    def measure(self, context: StepContext) -> Measured:
        """Measure links and hooks on all ranks; all get the same numbers, those of the slowest.

        An error on one rank is raised on all of them.
        """
        began = time.perf_counter()
        group, shared = context.group, context.group.shared
        gradients = [*map(self._travelling, context.parameters.local)]
        # Hooks first: what one rank raises by itself, the others learn before they wait for its messages.
        costs = self._on_all(group, lambda: self._hook.measure_costs(gradients, members_of(group)))
        link = self._measure_link(group)
        own = [
            time.perf_counter() - began,
            link.latency,
            -link.bandwidth,
            *(s for cost in costs.values() for s in (cost.before, cost.after)),
        ]
        taken, latency, negative, *seconds = map(max, zip(*gather(group, own, self._device), strict=True))
        # Each of a host's leaders has a part of the work. Predictions are by the bytes of slots.
        slots = sum(each.nbytes for each in context.parameters.slots)
        size = sum(each.nbytes for each in gradients) / max(1, slots)
        share = 1 if shared is None else shared.leaders
        pairs = zip(seconds[::2], seconds[1::2], strict=True)
        return Measured(
            Link(latency, -negative),
            {
                name: replace(
                    cost, before=size * before / share, after=size * after / share, sent=size * cost.sent
                )
                for (name, cost), (before, after) in zip(costs.items(), pairs, strict=True)
            },
            taken,
        )

    def _measure_link(self, group: Group) -> Link:
        try:
            self._open(group)
            return self._on_all(group, self._slowest_link, sends_messages=True)
        except BaseException:
            self._opened = None
            raise

    def _open(self, group: Group) -> None:
        """Open what links are measured through, unless it is open."""
        if self._opened is not None:
            return
        # A name that nobody has used before: the time of the first rank.
        [[now], *_] = gather(group, [time.time()], self._device)
        name, own, shared = f"links/{group.wrapper}/{now}", self._hook.group, group.shared
        # One rank per host measures: what goes between two hosts shares a link.
        members = [own] if own is not None and (shared is None or shared.rank == 0) else []
        self._opened = self._on_all(
            group,
            lambda: [open_measuring_group(each, self._device, name) for each in members],
            sends_messages=True,
        )

    def _slowest_link(self) -> Link:
        """The slowest of this rank's links; of a rank that measures none, one that is faster than all."""
        if not self._opened or self._hook.group is None:
            return Link(0.0, float("inf"))
        links = measure_links(self._hook.group, self._opened[0], self._device).values()
        return Link(max(each.latency for each in links), min(each.bandwidth for each in links))

    def _on_all(self, group: Group, measure: Callable[[], _T], *, sends_messages: bool = False) -> _T:
        """What this rank measures, unless a rank raises in it; then every rank raises.

        Args:
            group: the ranks.
            measure: measures.
            sends_messages: whether it sends messages, which may not be answered.
        """
        raised: BaseException | None = None
        failure = Failure.NONE
        try:
            found = measure()
        except BaseException as error:  # of Ctrl-C too: the others would wait
            raised = error
            # gloo raises nothing more special.
            is_harmless = sends_messages and isinstance(error, RuntimeError)
            failure = Failure.NO_ANSWER if is_harmless else Failure.ERROR
        worst = max(theirs for [theirs] in gather(group, [float(failure)], self._device))
        if worst == Failure.NONE:
            return found
        own = None if raised is None else f"{type(raised).__name__}: {raised}"
        reasons = enumerate(group.gather_objects(own, self._device))
        told = "; ".join(f"rank {group.name_ranks([rank])[0]}: {each}" for rank, each in reasons if each)
        what = f"ranks could not measure links and hooks for the hook auto; no step is lost ({told})"
        if worst == Failure.NO_ANSWER:
            raise UnmeasuredError(what) from raised
        # A rank that has waited in vain raises as the others do.
        if raised is None or failure is not Failure.ERROR:
            raise PeerError(what) from raised
        raised.add_note(f"paceline: {what}")
        raise raised

    def _travelling(self, parameter: Trained) -> Tensor:
        """A stand-in without memory for a gradient in the type in which it travels."""
        own = parameter.dtype
        dtype = own if self._reduce_dtype is None or own.is_complex else self._reduce_dtype
        return torch.empty(parameter.shape, dtype=dtype, device="meta")


def members_of(group: Group) -> int:
    """The number of hosts among which a hook would run; of ranks, if none of them share memory."""
    return group.size if group.shared is None else group.shared.hosts


def gather(group: Group, own: Sequence[float], device: torch.device) -> list[tuple[float, ...]]:
    """Every rank's numbers, of which all ranks have as many."""
    layout = struct.Struct(f"<{len(own)}d")
    return [layout.unpack(theirs) for theirs in group.gather_bytes(layout.pack(*own), device)]
