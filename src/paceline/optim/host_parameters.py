"""A wrapped module's parameters once per host, and which rank steps which part of them."""

import contextlib
import gc
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.shm.transport import SharedMemoryTransport
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import StepError, UnsupportedError
from paceline.optim.clipping import gather_numbers
from paceline.optim.part_state import PLACE_BYTES, PartState
from paceline.optim.reduced_parts import ReducedParts
from paceline.tensors.part_parameter import part_of
from paceline.tensors.shared_parameter import SharedParameter, Writes, use_memory
from paceline.watch.error_words import describe_error
from paceline.watch.rank_page import Activity

# Each parameter begins at a multiple of this many bytes.
_ALIGNED = 256
# Of how many parameters an error tells.
_TOLD = 3


def host_parameters_of(wrapper: DistributedDataParallel) -> "HostParameters":
    """The wrapper's parameters, moved to shared memory the first time; all ranks call this at once."""
    if wrapper._host_parameters is None:
        wrapper._host_parameters = HostParameters(wrapper)
    found: HostParameters = wrapper._host_parameters
    return found


class HostParameters:
    """Has the parameters of a wrapped module in memory that all ranks of a host share.

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
        shared = self._group.shared
        self._tensors = [*map(_dense, self._whole)] if shared is None else self._move(shared)

    def take(self, parameter: Tensor) -> list[tuple[int, Tensor]]:
        """This rank's parts of a parameter: where each begins, and a tensor for an optimizer to step.

        A part is flat, unless it is the whole parameter.
        """
        memory = self._tensors[self.parts.slot_of(parameter)]
        ranges = self.parts.ranges_of(parameter)
        taken = [
            (start, memory if len(ranges) == 1 else _flat(memory, start, end))
            for owner, start, end in ranges
            if owner == self.parts.rank
        ]
        self.parts.set_parts(parameter, taken)
        return taken

    def open_state(self) -> PartState | None:
        """A place for the state of an optimizer; every rank calls this at once. None if there is one rank."""
        if (shared := self._group.shared) is None:
            return None
        state = PartState(shared, shared.open_memory(self._group, PLACE_BYTES * len(shared.ranks)))
        self.wait()
        return state

    def gather_numbers(self, own: Tensor) -> Tensor:
        """The numbers of all ranks of a host, one of each."""
        return gather_numbers(self._group, max(0, self._reducer.step_number - 1), own)

    def wait(self) -> None:
        """Wait for all ranks."""
        self._count(said=False)

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
        is_first = self._group.shared is None or self._group.shared.rank == 0
        self.wait()
        error: BaseException | None = None
        try:
            copies = [] if is_first else [memory.clone() for memory in self._tensors]
        except RuntimeError as raised:  # there is no memory for them
            error, copies = raised, []
        self._raise_if_any(error)
        for parameter, own in zip(self._whole, copies, strict=False):
            use_memory(parameter, own)
        try:
            yield
        except BaseException as raised:
            error = raised
        for parameter, memory in zip(self._whole, self._tensors, strict=True):
            if is_first and parameter.data_ptr() != memory.data_ptr():
                memory.copy_(parameter.detach())  # it was given other memory
            use_memory(parameter, memory)
        self.forget_writes()
        self._raise_if_any(error)
        self._broken = None

    def forget_writes(self) -> None:
        """What was written to parameters so far is right."""
        self._writes.forget()

    def _move(self, shared: SharedMemoryTransport) -> list[Tensor]:
        """Move the parameters to memory that the ranks of the host share."""
        offsets, end = [], 0
        for parameter in self._whole:
            offsets.append(end)
            end += -(-parameter.nbytes // _ALIGNED) * _ALIGNED
        try:
            memory = shared.open_memory(self._group, max(end, 1))
        except OSError as error:
            raise UnsupportedError(f"there is no memory for the parameters of the host ({error})") from None
        tensors = [
            memory.tensor(offset, each.numel(), each.dtype).as_strided(each.shape, _strides(each))
            for offset, each in zip(offsets, self._whole, strict=True)
        ]
        if shared.rank == 0:
            for tensor, parameter in zip(tensors, self._whole, strict=True):
                tensor.copy_(parameter.detach())
        self.wait()
        for tensor, parameter in zip(tensors, self._whole, strict=True):
            self._writes.share(parameter, tensor)
        return tensors

    def _check(self, refusal: str) -> None:
        """Wait for all ranks; raise on all of them if some rank cannot step, or has written to parameters."""
        found = self._writes.found().items()
        written = "; ".join([f"{self._slots[slot].name!r} {words}" for slot, words in found][:_TOLD])
        if not self._count(said=bool(written or refusal)):
            return
        everyone = (
            self._group.gather_objects((written, refusal)) if self._group.size > 1 else [(written, refusal)]
        )
        ranks = [*zip(self._group.global_ranks, everyone, strict=True)]
        self.forget_writes()
        where = f"(rank: {self._group.global_rank}, step: {self._reducer.step_number})"
        if told := [f"on rank {rank}, {words}" for rank, (_, words) in ranks if words]:
            raise StepError(f"no parameter was stepped: {'; '.join(told)} {where}")
        told = [f"on rank {rank}, {words}" for rank, (words, _) in ranks if words]
        raise StepError(
            f"a parameter that all ranks of the host share was written to outside the optimizer: "
            f"{'; '.join(told)}. Each rank that does so changes what all have. Write inside "
            f"`with optimizer.writing():`, where it counts once. No parameter was stepped {where}"
        )

    def _raise_if_any(self, error: BaseException | None) -> None:
        """Wait for all ranks; raise on all of them if one has an error."""
        if not self._count(said=error is not None):
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
            failed = self._count(said=error is not None)
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

    def _count(self, *, said: bool) -> int:
        """How many ranks say so; waits for all of them."""
        if self._group.size == 1:
            return int(said)
        told = torch.tensor([float(said)])
        step = max(0, self._reducer.step_number - 1)
        with self._group.watch.waiting(Activity.UPDATE, step, then=Activity.OPTIMIZER):
            return int(self._group.all_reduce(told).wait(lambda: None).item())


def _refuse(wrapper: DistributedDataParallel) -> None:
    """Raise if ranks of a host cannot share the parameters."""
    group = wrapper._group
    if wrapper._wrapped.device.type != "cpu":
        raise UnsupportedError(
            "a HostOptimizer is for parameters on the CPU: ranks of accelerators share no memory. "
            'ShardedOptimizer(..., gradients="parts") splits the optimizer\'s state there'
        )
    if group.size > 1 and group.shared is None:
        raise UnsupportedError(
            "a HostOptimizer needs memory that the ranks of a host share, and these share none: the wrapper "
            'has transport="c10d", or has warned. ShardedOptimizer(..., gradients="parts") needs none'
        )
    if _are_shared(wrapper._wrapped.params.parameters):
        gc.collect()  # a wrapper that nobody uses any more may still be there
        if _are_shared(wrapper._wrapped.params.parameters):
            raise UnsupportedError(
                "a HostOptimizer of another wrapper has these parameters in shared memory already"
            )
    if str(wrapper._options.audit).startswith("heal"):
        raise UnsupportedError(f'a HostOptimizer and audit="{wrapper._options.audit}" exclude each other')


def _are_shared(parameters: Iterable[Parameter]) -> bool:
    return any(isinstance(each, SharedParameter) and each.writes.is_in_use for each in parameters)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    return torch.empty_like(parameter.detach(), device="meta").stride()


def _dense(parameter: Parameter) -> Tensor:
    """A parameter's memory; given new memory if the old one has gaps."""
    values = parameter.detach()
    if values.stride() != _strides(parameter):
        parameter.data = values = torch.empty_like(values).copy_(values)
    return values


def _flat(memory: Tensor, start: int, end: int) -> Tensor:
    like = torch.empty(end - start, device="meta")
    return part_of(memory, start, like)
