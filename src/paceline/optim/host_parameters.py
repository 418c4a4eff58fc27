"""A wrapped module's parameters once per host, and which rank steps which part of them."""

import contextlib
import enum
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.shm import libc
from paceline.comm.shm.local_ranks import HostMemory
from paceline.comm.shm.transport import SharedMemoryTransport
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import OptionError, StepError, UnsupportedError
from paceline.optim.part_state import PLACE_BYTES, PartState
from paceline.optim.reduced_parts import ReducedParts
from paceline.tensors.part_parameter import part_of
from paceline.tensors.shared_parameter import Writes, are_in_use, make_private, use_memory
from paceline.watch.error_words import describe_error
from paceline.watch.rank_page import Activity

# Each parameter begins at a multiple of this many bytes.
_ALIGNED = 256
# Of how many parameters an error tells.
_TOLD = 3


class HostCall(enum.IntEnum):
    """What ranks do together; each tells the others which one it is in."""

    STEP = 0
    STEP_END = enum.auto()
    CLIP = enum.auto()
    WRITE = enum.auto()
    LOAD = enum.auto()
    MAKE = enum.auto()
    UNSCALE = enum.auto()


_CALLS = {
    HostCall.STEP: "step()",
    HostCall.STEP_END: "the end of step()",
    HostCall.CLIP: "clip_grad_norm_()",
    HostCall.WRITE: "writing() or load_state_dict() of the wrapper",
    HostCall.LOAD: "load_state_dict()",
    HostCall.MAKE: "the constructor or add_param_group()",
    HostCall.UNSCALE: "a scaler",
}


def host_parameters_of(wrapper: DistributedDataParallel) -> "HostParameters":
    """The wrapper's parameters, moved to shared memory the first time; all ranks call this at once."""
    if wrapper._host_parameters is None:
        wrapper._host_parameters = HostParameters(wrapper)
    found: HostParameters = wrapper._host_parameters
    return found


class HostParameters:
    """Has the parameters of a wrapped module in memory that all ranks of a host share.

    When it goes, parameters that are still there get memory of their own again.

    Args:
        wrapper: the wrapped module.

    Attributes:
        parts: which rank has which part.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        _refuse(wrapper)
        self.parts = ReducedParts(wrapper, "a HostOptimizer")
        self._group = wrapper._group
        self._reducer = wrapper._reducer
        self._slots, self._whole, _ = wrapper._wrapped.params
        self._writes = Writes(self)
        self._broken: str | None = None
        self._is_writing = False
        self._memory: HostMemory | None = None
        self._offsets: list[int] = []
        self._takers: list[tuple[weakref.ref[Any], set[int]]] = []
        if (shared := self._group.shared) is None:
            for parameter in self._whole:
                self._writes.share(parameter, _dense(parameter))
        else:
            self._move(shared)
        weakref.finalize(self, make_private, [*map(weakref.ref, self._whole)]).atexit = False

    def take(self, parameters: Sequence[Tensor], owners: Sequence[int] | None, taker: object) -> None:
        """Have an optimizer step parameters, whole ones if they have owners; raises if it cannot.

        Args:
            parameters: the parameters.
            owners: the rank that steps each of them; None to cut them.
            taker: the optimizer.
        """
        slots = [*map(self.parts.slot_of, parameters)]
        self._takers = [each for each in self._takers if each[0]() not in (None, taker)]
        for parameter, slot, owner in zip(parameters, slots, owners or (), strict=bool(owners)):
            before = self.parts.ranges_of(parameter)
            is_other = len(before) > 1 or before[0].owner != owner
            if is_other and any(slot in taken for _, taken in self._takers):
                raise UnsupportedError(
                    "an optimizer that steps whole parameters cannot share them with another one "
                    f"(parameter: {self._slots[slot].name!r})"
                )
        for parameter, owner in zip(parameters, owners or (), strict=bool(owners)):
            self.parts.keep_whole(parameter, owner)
        self._takers.append((weakref.ref(taker), {*slots}))

    def parts_of(self, parameter: Tensor) -> list[tuple[int, Tensor]]:
        """This rank's parts of a parameter: where each begins, and a tensor for an optimizer to step.

        A part is flat, unless it is the whole parameter.
        """
        slot = self.parts.slot_of(parameter)
        ranges = self.parts.ranges_of(parameter)
        taken = []
        for owner, start, end in ranges:
            if owner == self.parts.rank:
                memory = self._tensor(slot)
                part = memory if len(ranges) == 1 else part_of(memory, start, _flat(end - start))
                taken.append((start, part.requires_grad_()))
        self.parts.set_parts(parameter, taken)
        return taken

    def check_equal(self, what: object) -> None:
        """Raise on every rank if ranks make different optimizers; all call this at once."""
        self.exchange(HostCall.MAKE)
        if self._group.size > 1 and len(set(map(repr, self._group.gather_objects(what)))) > 1:
            raise OptionError(
                "ranks must make the same optimizer: the same class, and the same parameters in the same "
                f"groups and order (rank {self._group.global_rank}: {what})"
            )

    def open_state(self, *, moves: bool) -> PartState | None:
        """A place for the state of an optimizer; every rank calls this at once. None if there is one rank.

        Args:
            moves: whether the optimizer's own tensors may be moved there.
        """
        if (shared := self._group.shared) is None:
            return None
        memory = shared.open_memory(self._group, PLACE_BYTES * len(shared.ranks))
        state = PartState(shared, memory, moves=moves)
        self.exchange(HostCall.MAKE)
        return state

    def exchange(self, call: HostCall, number: float = 0.0) -> Tensor:
        """The numbers of all ranks; waits for all of them, and raises if they are in different calls."""
        group = self._group
        told = torch.zeros(len(HostCall) + group.size, dtype=torch.float64)
        told[call] = 1
        told[len(HostCall) + group.rank] = number
        if group.size > 1:
            with group.watch.waiting(Activity.UPDATE, self._reducer.step_number, then=Activity.OPTIMIZER):
                told = group.all_reduce(told).wait(lambda: None)
        if told[call] != group.size:
            found = [f"{int(told[each])} in {_CALLS[each]}" for each in HostCall if told[each]]
            raise StepError(
                f"ranks are in different calls of the optimizer: {', '.join(found)} (rank: "
                f"{group.global_rank}, in {_CALLS[call]}, step: {self._reducer.step_number})"
            )
        numbers = told[len(HostCall) :]
        # Other hosts have the same parts, and so the same numbers.
        return numbers if call is not HostCall.CLIP or group.shared is None else numbers[group.shared.ranks]

    @contextlib.contextmanager
    def updating(self, refusal: str = "") -> Iterator[None]:
        """All ranks of the host write their parts in here, and nobody reads.

        Ranks wait for each other before, because some may still compute with the old values, and after, so
        that everybody sees the new ones. If it fails on a rank, all ranks raise.

        Args:
            refusal: why this rank cannot step, in words; then no rank does.
        """
        if self._broken is not None:
            raise StepError(self._broken)
        self._reducer.turns.finish_launched()
        self._check(refusal)
        error = None
        try:
            yield
        except BaseException as raised:
            error = raised
        self._end_update(error)
        # As if each rank had written all of it: a backward over an older graph then raises, as it should.
        torch.autograd.graph.increment_version(self._whole)
        self.forget_writes()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Let the user write to parameters: what the first rank of each host writes stays.

        In here, the other ranks have copies of their own, which are dropped at the end.
        """
        if self._is_writing:
            yield
            return
        is_first = self._group.shared is None or self._group.shared.rank == 0
        self.exchange(HostCall.WRITE)
        error: BaseException | None = None
        memories = [*map(self._tensor, range(len(self._whole)))]
        try:
            copies = [] if is_first else [memory.clone() for memory in memories]
        except RuntimeError as raised:  # there is no memory for them
            error, copies = raised, []
        self._raise_if_any(error)
        for parameter, own in zip(self._whole, copies, strict=False):
            use_memory(parameter, own)
        self._is_writing = True
        try:
            yield
        except BaseException as raised:
            error = raised
        self._is_writing = False
        for parameter, memory in zip(self._whole, memories, strict=True):
            if is_first and parameter.data_ptr() != memory.data_ptr():
                memory.copy_(parameter.detach())  # it was given other memory
            use_memory(parameter, memory)
        self.forget_writes()
        self._raise_if_any(error)
        self._broken = None

    def forget_writes(self) -> None:
        """What was written to parameters so far is right."""
        self._writes.forget()

    def _tensor(self, slot: int) -> Tensor:
        """A parameter's memory, as a tensor with a storage of its own."""
        parameter = self._whole[slot]
        if self._memory is None:
            return parameter.detach()
        flat = self._memory.tensor(self._offsets[slot], parameter.numel(), parameter.dtype)
        return flat.as_strided(parameter.shape, _strides(parameter))

    def _move(self, shared: SharedMemoryTransport) -> None:
        """Move the parameters to memory that the ranks of the host share."""
        end = 0
        for parameter in self._whole:
            self._offsets.append(end)
            end += -(-parameter.nbytes // _ALIGNED) * _ALIGNED
        self.exchange(HostCall.MAKE)
        try:
            self._memory = shared.open_memory(self._group, max(end, 1))
        except OSError as error:
            raise UnsupportedError(f"there is no memory for the parameters of the host ({error})") from None
        tensors = [*map(self._tensor, range(len(self._whole)))]
        if shared.rank == 0:
            for tensor, parameter in zip(tensors, self._whole, strict=True):
                tensor.copy_(parameter.detach())
        self.exchange(HostCall.MAKE)
        for tensor, parameter in zip(tensors, self._whole, strict=True):
            self._writes.share(parameter, tensor)
        libc.release_freed()  # the memory that the parameters had

    def _check(self, refusal: str) -> None:
        """Wait for all ranks; raise on all of them if some rank cannot step, or has written to parameters."""
        found = self._writes.found(only_moved=self._memory is None).items()
        written = "; ".join([f"{self._slots[slot].name!r} {words}" for slot, words in found][:_TOLD])
        if not self.exchange(HostCall.STEP, bool(written or refusal)).any():
            return
        told = (written, refusal)
        everyone = self._group.gather_objects(told) if self._group.size > 1 else [told]
        ranks = [*zip(self._group.global_ranks, everyone, strict=True)]
        self.forget_writes()
        where = f"(rank: {self._group.global_rank}, step: {self._reducer.step_number})"
        if refusals := [f"on rank {rank}, {words}" for rank, (_, words) in ranks if words]:
            raise StepError(f"no parameter was stepped: {'; '.join(refusals)} {where}")
        writes = [f"on rank {rank}, {words}" for rank, (words, _) in ranks if words]
        raise StepError(
            f"a parameter that all ranks of the host share was written to outside the optimizer: "
            f"{'; '.join(writes)}. Each rank that does so changes what all have. Write inside "
            f"`with optimizer.writing():`, where it counts once. No parameter was stepped {where}"
        )

    def _raise_if_any(self, error: BaseException | None) -> None:
        """Wait for all ranks; raise on all of them if one has an error."""
        if not self.exchange(HostCall.WRITE, error is not None).any():
            return
        told = self._tell("" if error is None else describe_error(error))
        if error is not None:
            raise error
        raise StepError(f"parameters could not be written to: {told}")

    def _tell(self, words: str) -> str:
        """What ranks have raised, in words; all call this at once."""
        everyone = self._group.gather_objects(words) if self._group.size > 1 else [words]
        ranks = zip(self._group.global_ranks, everyone, strict=True)
        return "; ".join(f"rank {rank} raised {why}" for rank, why in ranks if why)

    def _end_update(self, error: BaseException | None) -> None:
        half = "so parameters of this host are updated in part: load a checkpoint"
        try:
            failed = self.exchange(HostCall.STEP_END, error is not None).any()
        except (RuntimeError, OSError) as lost:
            self._broken = f"the optimizer's step was not finished, {half} ({lost})"
            raise StepError(self._broken) from (error or lost)
        if not failed:
            return
        told = self._tell("" if error is None else describe_error(error))
        self._broken = f"the optimizer's step failed, {half}: {told}"
        if error is not None:
            error.add_note(self._broken)
            raise error
        raise StepError(self._broken)


def _refuse(wrapper: DistributedDataParallel) -> None:
    """Raise if ranks of a host cannot share the parameters."""
    group = wrapper._group
    if wrapper._wrapped.device.type != "cpu":
        raise UnsupportedError(
            "a HostOptimizer is for parameters on the CPU: ranks of accelerators share no memory. "
            'ShardedOptimizer(..., gradients="parts") splits the optimizer\'s state there'
        )
    if group.awaits_others:
        raise UnsupportedError("a HostOptimizer and `paceline run --heal` exclude each other")
    if group.size > 1 and group.shared is None:
        raise UnsupportedError(
            "a HostOptimizer needs memory that the ranks of a host share, and these share none: the wrapper "
            'has transport="c10d", or has warned. ShardedOptimizer(..., gradients="parts") needs none'
        )
    if are_in_use(wrapper._wrapped.params.parameters):
        gc.collect()  # a wrapper that nobody uses any more may still be there
        if are_in_use(wrapper._wrapped.params.parameters):
            raise UnsupportedError(
                "a HostOptimizer of another wrapper has these parameters in shared memory already"
            )
    if str(wrapper._options.audit).startswith("heal"):
        raise UnsupportedError(f'a HostOptimizer and audit="{wrapper._options.audit}" exclude each other')


def _strides(parameter: Tensor) -> tuple[int, ...]:
    return torch.empty_like(parameter.detach(), device="meta").stride()


def _dense(parameter: Parameter) -> Tensor:
    """A parameter's memory; new memory if the old one has gaps."""
    values = parameter.detach()
    return values if values.stride() == _strides(parameter) else torch.empty_like(values).copy_(values)


def _flat(numel: int) -> Tensor:
    return torch.empty(numel, device="meta")
