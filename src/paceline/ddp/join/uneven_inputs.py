"""Uneven inputs: what a wrapper does under torch's join context manager.

Note [Uneven inputs]. At the start of every forward under join, the ranks tell each other who has inputs left.
A rank that has none, an exhausted rank, then issues the collectives of that step without contributing to it:
the broadcast of module buffers, and a reduction per bucket, of zeros. At the end every rank takes over the
model, and the state of its optimizers, from a rank that had inputs to the last.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.torch_distributed import Join, Joinable, JoinHook
from paceline.ddp.join.optimizer_state import copy_optimizer_state, watch_optimizers
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.state.buffers import ModuleBuffers
from paceline.ddp.state.wrapped_module import WrappedModule
from paceline.errors import OptionError, StepError
from paceline.torch_private import disable_join
from paceline.watch.rank_page import Activity


class ActiveRanks(NamedTuple):
    """What the ranks told each other at the start of a step.

    Attributes:
        ranks: those that have inputs.
        synced: whether a synced backward follows.
    """

    ranks: list[int]
    synced: bool

    @property
    def source(self) -> int:
        """The rank that the others take module buffers, or the final model, from."""
        return self.ranks[-1]


def exchange_active(
    group: Group, device: torch.device, *, active: bool, synced: bool, step: int
) -> ActiveRanks:
    """Tell the other ranks whether this one has inputs and will sync, and hear the same from them."""
    told = torch.zeros(group.size + 1, device=device)
    told[group.rank] = float(active)
    told[group.size] = float(active and synced)
    with group.watch.waiting(Activity.INPUTS, step, then=Activity.OUTSIDE):
        group.all_reduce(told).wait(lambda: None)
    *flags, syncing = map(round, told.tolist())
    ranks = [rank for rank, flag in enumerate(flags) if flag]
    if 0 < syncing < len(ranks):
        raise StepError(
            "some ranks synchronise this step and others only accumulate "
            f"(ranks with inputs: {group.name_ranks(ranks)}, synchronising: {syncing}, "
            f"this rank: {group.global_rank})"
        )
    return ActiveRanks(ranks, synced=syncing > 0)


class UnevenInputs:
    """One wrapper's part in a join.

    Args:
        wrapped: the wrapper's module.
        reducer: the wrapper's.
        buffers: the module's.

    Attributes:
        final_rank: the rank whose model every rank has taken over, after a join.
    """

    def __init__(self, wrapped: WrappedModule, reducer: Reducer, buffers: ModuleBuffers) -> None:
        self._wrapped = wrapped
        self._reducer = reducer
        self._buffers = buffers
        self._divides_by_all = True
        self._left_unfinalized = False
        self.final_rank: int | None = None

    def enter(self, wrapper: Joinable, *, divides_by_all: bool, in_graph: bool) -> "ExhaustedRank":
        """A join context manager is made; returns what it calls once this rank's inputs have run out."""
        if not self._reducer.exchange.supports_join or in_graph:
            raise OptionError(
                "join does not work with hooks that average parameters, nor with reductions in a compiled "
                f"graph (hook: {self._reducer.exchange.name}, in graph: {in_graph})"
            )
        if self._reducer.group.may_change:
            raise OptionError("join does not work with a process group whose ranks may change")
        self._divides_by_all = divides_by_all
        self._left_unfinalized = False
        watch_optimizers()
        return ExhaustedRank(wrapper, self)

    def begin_forward(self, wrapper: Joinable, *, synced: bool) -> None:
        """A forward begins on a rank that has inputs."""
        if self._reducer.turns.is_shared(self._reducer):
            self._refuse_nested()
        with self.naming_lost_ranks():
            if (told := Join.notify_join_context(wrapper)) is not None:
                told.wait()
        self._exchange(active=True, synced=synced)

    def naming_lost_ranks(self) -> contextlib.AbstractContextManager[None]:
        """While entered, this rank waits for the others to say whether they have inputs."""
        reducer = self._reducer
        return reducer.group.watch.waiting(Activity.INPUTS, reducer.step_number, then=Activity.OUTSIDE)

    def end_launched_step(self) -> None:
        """The inputs have run out: end what this rank has launched, before it issues other collectives."""
        self._reducer.recorder.inputs_ran_out()
        turns = self._reducer.turns
        if turns.awaits_finalize(self._reducer):
            self._left_unfinalized = True
            turns.finalize(self._reducer)
        turns.finish_launched()

    def check_finalized(self) -> None:
        """Raise if the user has left the last step of this rank to be ended after the join."""
        if self._left_unfinalized:
            raise StepError(
                "the join block ended before finalize_backward() was called for this rank's last step, so "
                "no optimizer has used its gradients; call it and step the optimizer inside the block "
                f"({self._reducer.where})"
            )

    def run_empty_step(self) -> None:
        """On an exhausted rank, issue the collectives of one step of the others, in their order."""
        reducer = self._reducer
        synced = self._exchange(active=False, synced=False).synced
        reducer.prepare()
        if self._buffers.will_sync():
            reducer.after_step.wait_after_step(self._buffers.sync(reducer.group))
        self._buffers.settings.required = synced
        if synced:
            reducer.context.parameters.clear_grads()
            reducer.run_empty_step()
        reducer.group.watch.wait(Activity.INPUTS, reducer.step_number)

    def sync_final_model(self, *, was_last: bool) -> None:
        """Make every rank's model, and the state of its optimizers, that of a rank with the most inputs."""
        group = self._reducer.group
        last = exchange_active(
            group, self._wrapped.device, active=was_last, synced=False, step=self._reducer.step_number
        )
        self.final_rank = last.source
        self._buffers.source = 0
        self._reducer.ranks = group.size
        self._reducer.counts.begin()
        bytes_at_once = self._buffers.settings.bytes_at_once
        self._wrapped.broadcast(
            group,
            buffers=self._buffers.settings.in_forward,
            source=last.source,
            bytes_at_once=bytes_at_once,
        )
        if (audit := self._reducer.context.audit) is not None:
            audit.watch.forget()  # the broadcast has changed buffers on some ranks only
        if len(last.ranks) < group.size:
            copy_optimizer_state(
                group,
                self._wrapped.params.parameters,
                self._wrapped.device,
                source=last.source,
                bytes_at_once=bytes_at_once,
            )

    def end(self) -> None:
        """No rank waits for another one any more."""
        self._reducer.recorder.join_ended()

    def grads(self) -> list[Tensor | None]:
        """The gradients of this rank's parameters."""
        return [parameter.grad for parameter in self._reducer.context.parameters.local]

    def set_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Give this rank's parameters these gradients."""
        for parameter, grad in zip(self._reducer.context.parameters.local, grads, strict=True):
            parameter.grad = grad

    def _exchange(self, *, active: bool, synced: bool) -> ActiveRanks:
        """Hear which ranks have inputs, and do what follows for this step."""
        reducer = self._reducer
        heard = exchange_active(
            reducer.group, self._wrapped.device, active=active, synced=synced, step=reducer.step_number
        )
        self._buffers.source = heard.source
        if heard.synced and not self._divides_by_all:
            self._reducer.ranks = len(heard.ranks)
        return heard

    def _refuse_nested(self) -> None:
        reason = (
            "under join a wrapper's forward needs its backward before another wrapper of the group has its "
            "forward, because an exhausted rank cannot know the order of the others' collectives"
        )
        self._reducer.turns.fail_forward(self._reducer, reason)
        raise StepError(f"{reason} (rank: {self._reducer.group.global_rank})")


class ExhaustedRank(JoinHook):
    """What torch's join context manager calls on a rank whose inputs have run out.

    Args:
        wrapper: the wrapper, to torch's context manager.
        inputs: its part in this join.
    """

    def __init__(self, wrapper: Joinable, inputs: UnevenInputs) -> None:
        super().__init__()
        self._wrapper = wrapper
        self._inputs = inputs
        self._own_grads: list[Tensor | None] | None = None

    def main_hook(self) -> None:
        """The ranks that have inputs run a step."""
        if self._own_grads is None:
            self._inputs.end_launched_step()
            # The steps of the others end in this rank's parameters too, as in theirs.
            self._own_grads = self._inputs.grads()
        self._inputs.run_empty_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Every rank is exhausted."""
        self._inputs.end_launched_step()
        if self._own_grads is not None:
            self._inputs.set_grads(self._own_grads)
        self._inputs.sync_final_model(was_last=is_last_joiner)
        self._inputs.end()
        disable_join(self._wrapper)
        self._inputs.check_finalized()
