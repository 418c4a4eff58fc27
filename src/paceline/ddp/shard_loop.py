"""A step over this rank's shards: what ``ddp.shards(batch)`` does between them."""

import contextlib
import hashlib
import inspect
import os
import random
import struct
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import repeat
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.ddp.reducer.reducer import Reducer
from paceline.ddp.reducer.shard_sums import ShardSums
from paceline.ddp.reducer.step_report import StepOutcome
from paceline.ddp.state.buffers import ModuleBuffers
from paceline.errors import OptionError, StepError, StructureError, UnsupportedError
from paceline.shard_tree import split_rows
from paceline.tensors import tree as structures

# How many threads each rank calculates with: a sum over several threads has other last bits.
THREADS_VARIABLE = "PACELINE_SHARD_THREADS"
# Stands for a shard's number where random numbers belong to a step.
_NO_SHARD = 2**64 - 1


@dataclass
class ShardProgress:
    """What the random numbers of a shard depend on, beside its own number.

    Attributes:
        seed: the same on all ranks.
        step: the number of steps that were begun.
    """

    seed: int
    step: int = 0


class Shards:
    """Gives a rank's shards of a step's batch, one after the other; ``ddp.shards`` is one.

    ``ddp.shards(batch)`` cuts this rank's batch into its shards, the last one first. Each shard begins with
    random numbers that depend only on the seed, the step and the shard, and with the module buffers of the
    step's start. Its gradients are kept apart from the others', and backward of the last one syncs.

    Args:
        reducer: averages the gradients.
        sums: adds up this rank's shards.
        buffers: the module's buffers.
        sync_buffers: makes them equal on all ranks.
        device: the module's.
        progress: the seed, and how many steps there were.
    """

    def __init__(
        self,
        reducer: Reducer,
        sums: ShardSums,
        buffers: ModuleBuffers,
        sync_buffers: Callable[[], None],
        device: torch.device,
        progress: ShardProgress,
    ) -> None:
        self._reducer = reducer
        self._sums = sums
        self._buffers = buffers
        self._sync_buffers = sync_buffers
        self._device = device
        self._progress = progress
        # Weak, so that a loop that is left ends at once.
        self._running: Callable[[], Generator[Any, None, None] | None] = lambda: None

    @property
    def seed(self) -> int:
        """What the random numbers of all shards depend on."""
        return self._progress.seed

    @property
    def step(self) -> int:
        """The number of the next step, counted from the start of the training."""
        return self._progress.step

    @property
    def count(self) -> int:
        """The number of shards of a step, on all ranks together."""
        return self._sums.tree.shards

    @property
    def own(self) -> range:
        """The shards of this rank."""
        group = self._reducer.group
        return self._sums.tree.share(group.rank, group.size)

    def state_dict(self) -> dict[str, Any]:
        """The seed and the number of steps; the same on all ranks, and for every number of ranks."""
        return {"shards": self.count, **asdict(self._progress)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the random numbers of the run whose state this is."""
        if state["shards"] != self.count:
            raise OptionError(
                "a run goes on with as many shards as it began with "
                f"(shards: {self.count}, in the state: {state['shards']})"
            )
        self._progress.seed, self._progress.step = int(state["seed"]), int(state["step"])

    def at_step(self, step: int) -> None:
        """Begin again with a step that was lost, or with a later one; a loop that is open ends."""
        if (running := self._running()) is not None:
            running.close()
        self._progress.step = step

    def share_buffers(self) -> None:
        """Give all ranks the module buffers that shard 0 has left, as the next forward would."""
        if self._buffers.any:
            self._reducer.context.end_buffer_watch()
            self._sync_buffers()
            self._reducer.context.begin_buffer_watch()

    def __call__(self, batch: Any) -> Iterator[Any]:
        """This rank's shards of one step.

        Args:
            batch: this rank's samples of the step, in any nest of containers. Tensors are cut along their
                first dimension, and so are lists with one entry per row; everything else goes to each shard
                as it is.
        """
        if (running := self._running()) is not None:
            if inspect.getgeneratorstate(running) == inspect.GEN_CREATED:
                raise StepError("one loop over shards at a time: another one was made, and has not begun yet")
            running.close()  # it was left before its end, and somebody holds it
        if self._reducer.finalizes_manually:
            raise UnsupportedError("manual finalization and shards exclude each other")
        pieces = cut(batch, len(self.own))
        run = self._run(pieces)
        self._running = weakref.ref(run)
        return run

    def _run(self, pieces: list[Any]) -> Generator[Any, None, None]:
        reducer = self._reducer
        number, ended_well, syncs = reducer.step_number, reducer.ended_well, reducer.syncs
        if not syncs:
            raise StepError("ddp.shards(batch) must not be inside no_sync(): its last shard syncs")
        older = self._set_grads_aside()
        is_over = False
        with _random_numbers_outside(self._device):
            try:
                yield from self._give(pieces)
                is_over = True
            finally:
                reducer.syncs = syncs
                self._end(number, is_over=is_over)
                if reducer.ended_well > ended_well:  # a lost step has no gradients left on any rank
                    self._add_older(older)

    def _give(self, pieces: list[Any]) -> Iterator[Any]:
        own, step = self.own, self._progress.step
        self._progress.step += 1
        self._sums.begin(own[-1])
        restore_buffers = self._keep_buffers() if len(own) > 1 else None
        for shard, piece in zip(reversed(own), reversed(pieces), strict=True):
            is_last = shard == own[0]
            if shard != own[-1] and restore_buffers is not None:
                restore_buffers()
            self._sums.expect(shard, is_last=is_last)
            self._reducer.syncs = is_last
            seed_all(self._progress.seed, step, shard, self._device)
            yield piece
            if not is_last:
                self._reducer.keep_shard()

    def _end(self, number: int, *, is_over: bool) -> None:
        """Take part in the step if no backward did; lose it on all ranks if the loop was left too early."""
        if self._reducer.step_number == number:
            if is_over:
                self._reducer.sync_last_shard()
            else:
                with contextlib.suppress(RuntimeError, OSError):  # there is an exception to raise already
                    self._reducer.give_up(
                        StepOutcome.ABANDONED, "left the loop over its shards before the last one was done"
                    )
        self._sums.begin(0)
        self._sums.expect(0, is_last=False)

    def _keep_buffers(self) -> Callable[[], None]:
        """Make module buffers equal on all ranks; returns what gives them these values again."""
        self._reducer.context.end_buffer_watch()
        if self._buffers.will_sync():
            self._sync_buffers()
            self._buffers.settings.required = False
        return self._buffers.keep_values()

    def _set_grads_aside(self) -> list[Tensor | None]:
        """Take off gradients of earlier steps, which the user accumulates."""
        parameters = self._reducer.context.parameters.local
        older = [parameter.grad for parameter in parameters]
        if not any(map(is_not, older, repeat(None))):
            return []
        for parameter in parameters:
            parameter.grad = None
        return older

    def _add_older(self, older: list[Tensor | None]) -> None:
        if not older:
            return
        with torch.no_grad():
            for parameter, gradient in zip(self._reducer.context.parameters.local, older, strict=True):
                if gradient is not None:
                    new = parameter.grad
                    parameter.grad = gradient if new is None else gradient + new


def agree_on_seed(group: Group, device: torch.device) -> int:
    """Rank 0's seed of torch's random numbers; every rank calls this at once."""
    own = torch.initial_seed() % 2**63
    if group.size == 1:
        return own
    return int.from_bytes(group.gather_bytes(own.to_bytes(8), device)[0])


def fix_threads() -> None:
    """Calculate with as many threads on every rank, whatever their number."""
    asked = os.environ.get(THREADS_VARIABLE, "1")
    if not asked.isdecimal() or int(asked) < 1:
        raise OptionError(
            f"the number of threads must be a positive whole number ({THREADS_VARIABLE}: {asked})"
        )
    threads = int(asked)
    if torch.get_num_threads() != threads:
        warnings.warn(
            f"shards: each rank calculates with {threads} thread{'s' * (threads > 1)}, here instead of "
            f"{torch.get_num_threads()}, so that the number of ranks changes no bit; the variable "
            f"{THREADS_VARIABLE} sets another number",
            stacklevel=3,
        )
        torch.set_num_threads(threads)


def seed_all(seed: int, step: int, shard: int, device: torch.device) -> None:
    """Seed torch on the CPU and on a device, Python's random numbers, and numpy's if it was imported."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, step, shard), digest_size=8).digest()
    mixed = int.from_bytes(digest) >> 1
    # torch.manual_seed takes 0.3 ms, because it notes where it was called for devices that nobody uses.
    torch.default_generator.manual_seed(mixed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(mixed)
    random.seed(mixed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(mixed & 0xFFFFFFFF)


@contextlib.contextmanager
def random_numbers_of_step(shards: Shards, device: torch.device) -> Iterator[None]:
    """While entered, random numbers depend on seed and step alone; afterwards they go on as before."""
    restore = keep_random_numbers(device, numpys=_set_numpys_aside)
    seed_all(shards.seed, shards.step, _NO_SHARD, device)
    try:
        yield
    finally:
        restore()


# The loops over shards that are open, and the random numbers outside of all of them.
_open_loops: list[object] = []
_outside: list[Callable[[], None]] = []


@contextlib.contextmanager
def _random_numbers_outside(device: torch.device) -> Iterator[None]:
    """At the end of the last of all loops, go on with the random numbers from before the first one."""
    loop = object()
    if not _open_loops:
        _outside[:] = [keep_random_numbers(device, numpys=_set_numpys_aside)]
    _open_loops.append(loop)
    try:
        yield
    finally:
        _open_loops.remove(loop)
        if not _open_loops:
            _outside.pop()()


def _keep_numpys(numpy: Any) -> Callable[[], None]:
    return partial(numpy.random.set_state, numpy.random.get_state())


# The generator of numpy's numbers inside of loops.
_numpys: list[Any] = []


def _set_numpys_aside(numpy: Any) -> Callable[[], None]:
    """As ``_keep_numpys``, by another generator meanwhile: to copy a state takes 0.3 ms.

    Of a pair of normal numbers that numpy has drawn, the second one is lost.
    """
    if not hasattr(numpy.random, "set_bit_generator"):  # before numpy 1.24
        return _keep_numpys(numpy)
    if not _numpys:
        _numpys.append(numpy.random.MT19937(0))
    outside = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(_numpys[0])
    return partial(numpy.random.set_bit_generator, outside)


def keep_random_numbers(
    device: torch.device, *, numpys: Callable[[Any], Callable[[], None]] = _keep_numpys
) -> Callable[[], None]:
    """Returns what goes on with the random numbers of now.

    Args:
        device: whose numbers, beside those of torch on the CPU, Python and numpy.
        numpys: keeps those of numpy.
    """
    on_cpu, in_python = torch.get_rng_state(), random.getstate()
    module = None if device.type == "cpu" else torch.get_device_module(device)
    on_device = None if module is None else module.get_rng_state()
    numpy = sys.modules.get("numpy")
    restore_numpys = None if numpy is None else numpys(numpy)

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        random.setstate(in_python)
        if module is not None:
            module.set_rng_state(on_device)
        if restore_numpys is not None:
            restore_numpys()

    return restore


def cut(batch: Any, shards: int) -> list[Any]:
    """Cut a rank's batch into its shards.

    Tensors are copied to memory of their own, also those of a rank's only shard: how a tensor lies in memory
    may change the last bits of what is calculated from it.
    """
    rows = {len(leaf) for leaf in structures.leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(rows) != 1:
        raise StructureError(
            "the tensors of a batch that is cut into shards must have the same number of rows "
            f"(rows: {sorted(rows)})"
        )
    [count] = rows
    if count < shards:
        raise StructureError(
            f"each shard needs a row (rows of this rank's batch: {count}, this rank's shards: {shards})"
        )
    return [_cut_out(batch, rows_of, count) for rows_of in split_rows(count, shards)]


def _cut_out(value: Any, rows: range, count: int) -> Any:
    if isinstance(value, Tensor):
        return value[rows.start : rows.stop].clone() if value.dim() else value
    if type(value) in (list, tuple) and len(value) == count and not _holds_tensors(value):
        return value[rows.start : rows.stop]
    container = structures.open_container(value)
    if container is None:
        return value
    return container.rebuild([_cut_out(child, rows, count) for child in container.children])


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in structures.leaves(value))
