"""``paceline.Run``: trains step by step, and does a step again that was lost with a rank."""

import enum
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.comm.group import is_default
from paceline.comm.membership import own_membership
from paceline.comm.roster import Roster
from paceline.data.batch_sampler import ShardedBatchSampler
from paceline.ddp.shard_loop import keep_random_numbers, random_numbers_of_step
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import OptionError, StalledError, StepError, UnsupportedError
from paceline.recording.healings import Healing, write_healing
from paceline.recording.ledger import LedgerWriter, ledger_from_environment
from paceline.recording.recorder import folder_from_environment
from paceline.training import checkpoints
from paceline.training.regrouping import BROKEN, NEW, Regrouping
from paceline.training.state import Stateful, TrainingState
from paceline.watch.stall import shorten_names


class _Outcome(enum.Enum):
    """How far the current step is."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    LOST = enum.auto()


class Run:
    """A training, step by step.

    ::

        run = paceline.Run(ddp, optimizer, loader, scheduler=scheduler)
        for step in run:
            with step:
                for x, y in step.shards():
                    loss_of(ddp(x), y).backward()
                optimizer.step()
                scheduler.step()

    Under ``paceline run --heal``, a rank that is killed is replaced: the block ends on the other ranks, all
    of them go on from one state, and the step comes again. Under ``paceline run --checkpoint``, the state is
    saved every few steps, and the same command goes on from it. The result has the same bits in each case.

    Gradients are reset at the start of each block. What a step changes belongs inside the block, after
    ``optimizer.step()``, and no collective belongs there. Code after the block also runs for a step that was
    lost: look at ``step.is_done``.

    Args:
        ddp: the wrapper, with ``shards``.
        optimizer: the optimizer of its parameters, or several.
        loader: a ``DataLoader`` whose ``batch_sampler`` is a ``ShardedBatchSampler``.
        epochs: how many epochs the training has, from its very beginning.
        others: what else has a state: ``scheduler=...``, ``scaler=...``; each has ``state_dict`` and
            ``load_state_dict``.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer | Sequence[Optimizer],
        loader: "DataLoader[Any]",
        *,
        epochs: int = 1,
        **others: Stateful,
    ) -> None:
        self._ddp = ddp
        self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._loader = loader
        self._epochs = epochs
        self._sampler = _sampler_of(loader, ddp)
        _check_optimizers(ddp, self._optimizers)
        # The sampler's state at the start of the current step.
        self._position = self._sampler.state_dict()
        self._state = TrainingState(ddp, self._optimizers, sampler=_Position(self), **others)
        self._state.check_copyable()
        self._checkpoints = checkpoints.from_environment(self._state)
        self._regrouping = _regrouping(ddp, self._state, self._checkpoints)
        self._generation = 0
        self._ledger: LedgerWriter | None = None
        self._batches: Iterator[Any] | None = None
        self._batch: Any = None
        self._outcome = _Outcome.WAITING
        self._number = self._ended_well = 0
        self._has_stepped = False
        self._restore: Callable[[], None] = lambda: None
        self._is_over = False
        for each in self._optimizers:
            each.register_step_pre_hook(self._before_optimizer)

    @property
    def steps(self) -> int:
        """How many steps were done since the start of the training, in all runs."""
        return self._ddp.shards.step

    def __iter__(self) -> "Iterator[RunStep]":
        if self._is_over:
            return
        self._begin()
        self._ledger = ledger_from_environment(
            rank=self._ddp._group.global_rank, epoch_samples=self._sampler.epoch_samples
        )
        try:
            while not self._is_over:
                if self._take_batch():
                    yield RunStep(self, epoch=self._sampler.epoch, number=self.steps, batch=self._batch)
                    self._after_block()
                else:
                    self._end()
        finally:
            self._leave()

    def _begin(self) -> None:
        if self._regrouping is not None:
            self._regroup(NEW)
        elif self._checkpoints is not None:
            self._checkpoints.load()
            steps = self._ddp._group.gather_objects(self.steps) if self._ddp._group.size > 1 else [self.steps]
            if len({*steps}) > 1:
                raise OptionError(f"ranks found different checkpoints (steps of each rank: {steps})")

    def _take_batch(self) -> bool:
        """Have the batch of the current step; False if there are no more steps."""
        while self._batch is None and self._sampler.epoch < self._epochs:
            with random_numbers_of_step(self._ddp.shards, self._ddp.join_device):
                if self._batches is None:
                    self._batches = iter(self._loader)
                self._batch = next(self._batches, None)
            if self._batch is None:
                self._batches = None
                self._sampler.set_epoch(self._sampler.epoch + 1)
                self._position = self._sampler.state_dict()
        return self._batch is not None

    def _after_block(self) -> None:
        outcome, self._outcome = self._outcome, _Outcome.WAITING
        if outcome is _Outcome.LOST:
            self._restore()  # once more: code after the block may have drawn random numbers
            self._regroup(BROKEN if self._has_stepped else self.steps)
        elif outcome is not _Outcome.DONE:
            raise StepError("train inside `with step:`, once for each step of the run")

    def _end(self) -> None:
        """All steps are done here. If a rank is lost before they are on every rank, go on."""
        if self._checkpoints is not None and self._ddp._group.rank == 0:
            self._checkpoints.write_last()
        self._is_over = self._regrouping is None or self._regrouping.membership.end()
        if not self._is_over:
            self._regroup(self.steps)

    def _leave(self) -> None:
        """The loop over the steps has ended, perhaps by ``break``, or by an exception."""
        if self._outcome is _Outcome.LOST:
            warnings.warn(
                f"the loop was left though step {self._number} was lost, and has to be done again; look at "
                "step.is_done before `break`",
                stacklevel=2,
            )
        elif self._regrouping is not None and not self._is_over:
            self._regrouping.membership.leave()
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _regroup(self, steps: int) -> None:
        """Go on with the ranks of the next generation."""
        assert self._regrouping is not None
        shards = self._sampler.shards
        roster = self._regrouping.go_on(steps)
        self._generation = roster.generation
        rank = roster.members.index(self._regrouping.membership.member)
        self._sampler.share_among(len(roster.members), rank)
        if self._sampler.shards != shards:
            self._go_to(self._position)
        if roster.lost and rank == 0:
            _record(roster, self.steps)

    def _go_to(self, position: Mapping[str, Any]) -> None:
        """Take the next batch from this position of the sampler."""
        self._position = dict(position)
        self._sampler.load_state_dict(self._position)
        self._batches = self._batch = None

    def _begin_block(self) -> None:
        if self._outcome is not _Outcome.WAITING:
            raise StepError("a step of a run has one block: `with step:`")
        self._outcome = _Outcome.RUNNING
        self._has_stepped = False
        self._number = self.steps
        self._ended_well = self._ddp._reducer.ended_well
        if self._regrouping is not None:
            self._restore = self._keep()
        if self._ledger is not None:
            self._ledger.took(
                epoch=self._sampler.epoch,
                step=self._number,
                generation=self._generation,
                samples=self._sampler.given_samples(),
            )
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def _keep(self) -> Callable[[], None]:
        """Returns what makes this rank as it is now, unless an optimizer has stepped."""
        restore_buffers = self._ddp._module_buffers.keep_values()
        restore_random_numbers = keep_random_numbers(self._ddp.join_device)

        def restore() -> None:
            self._ddp.shards.at_step(self._number)
            restore_buffers()
            restore_random_numbers()

        return restore

    def _before_optimizer(self, _: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        if self._outcome is not _Outcome.RUNNING or self._regrouping is None:
            return
        if any(map(callable, (*arguments, options.get("closure")))):
            raise UnsupportedError(
                "with `paceline run --heal`, optimizers step without a closure: after a rank was lost inside "
                "of it, no rank would have a whole state"
            )
        self._share_buffers()
        self._has_stepped = True

    def _share_buffers(self) -> None:
        """Have what shard 0 has left on all ranks, in case that rank 0 is lost; see Note [Whose state]."""
        if self._regrouping is not None:
            self._ddp.shards.share_buffers()

    def _end_block(self, error: BaseException | None) -> bool:
        """The block has ended; whether its error is due to a lost rank, so that the step comes again."""
        if error is not None:
            return isinstance(error, Exception) and self._lose(error)
        try:
            self._check_averaged()
            if not self._has_stepped:
                self._share_buffers()
        except Exception as raised:
            if not self._lose(raised):
                raise
        else:
            self._complete()
        return False

    def _check_averaged(self) -> None:
        """Raise if the step was lost, and the block has caught the error."""
        reducer = self._ddp._reducer
        has_begun = self.steps > self._number
        if self._regrouping is not None and has_begun and reducer.ended_well == self._ended_well:
            raise StalledError(
                f"the gradients of step {self._number} were not averaged, and the block has gone on; let "
                "errors of backward end the block"
            )

    def _lose(self, error: Exception) -> bool:
        """Give up the step if its error is due to a lost rank."""
        if self._regrouping is None or not self._regrouping.is_because_of_lost_rank(error):
            return False
        self._restore()
        self._outcome = _Outcome.LOST
        return True

    def _complete(self) -> None:
        self._outcome = _Outcome.DONE
        self._ddp.shards.at_step(self._number + 1)  # also if the block has had no loop over shards
        if self._ledger is not None:
            self._ledger.counted(step=self._number, generation=self._generation)
        self._batch = None
        self._position = self._sampler.state_dict()
        if self._regrouping is not None:
            self._regrouping.membership.stepped()
        if self._checkpoints is not None and self._ddp._group.rank == 0:
            self._checkpoints.after_step(self.steps)


class RunStep:
    """One step of a run: train in ``with step:``.

    Attributes:
        epoch: the epoch.
        number: the number of the step since the start of the training.
        batch: this rank's samples.
    """

    def __init__(self, run: Run, *, epoch: int, number: int, batch: Any) -> None:
        self.epoch = epoch
        self.number = number
        self.batch = batch
        self._run = run

    @property
    def is_done(self) -> bool:
        """Whether its block has ended well; if not, the step was lost, and comes again."""
        return self._run.steps > self.number

    def shards(self) -> Iterator[Any]:
        """This rank's shards of the batch, one after the other."""
        return self._run._ddp.shards(self.batch)

    def __enter__(self) -> Self:
        self._run._begin_block()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._run._end_block(error)


class _Position:
    """The sampler's state at the start of the current step, as a part of the training's state."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        return self._run._position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._run._go_to(state)


def _sampler_of(loader: Any, ddp: DistributedDataParallel) -> ShardedBatchSampler:
    """The sampler of a loader that can go on from any step, with any number of ranks."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, ShardedBatchSampler):
        raise OptionError(
            "the loader cannot be resumed: it must be a DataLoader with "
            f"batch_sampler=ShardedBatchSampler(...) (loader: {type(loader).__name__}, batch_sampler: "
            f"{type(sampler).__name__})"
        )
    shards = getattr(ddp, "shards", None)
    if shards is None:
        raise OptionError("a run needs shards: DistributedDataParallel(net, shards=...)")
    if shards.count != sampler.all_shards:
        raise OptionError(
            "wrapper and sampler must have as many shards "
            f"(wrapper: {shards.count}, sampler: {sampler.all_shards})"
        )
    return sampler


def _check_optimizers(ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
    """Raise if a parameter is trained by an optimizer that the run does not know."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    known = {id(parameter) for group in groups for parameter in group["params"]}
    missing = [
        name
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and id(parameter) not in known
    ]
    if missing:
        raise OptionError(
            "no optimizer of the run trains some parameters: give all optimizers to Run, or call "
            f"requires_grad_(False) on parameters that are not trained (parameters: {shorten_names(missing)})"
        )


def _regrouping(
    ddp: DistributedDataParallel, state: TrainingState, saved: checkpoints.Checkpoints | None
) -> Regrouping | None:
    membership = own_membership()
    if membership is None:
        return None
    if not is_default(ddp.process_group):
        raise OptionError("with `paceline run --heal`, the wrapper needs the default process group")
    if not membership.is_alone:
        raise OptionError(
            "with `paceline run --heal`, a script opens its process group by paceline.init(), and makes one "
            "Run"
        )
    return Regrouping(membership, ddp, state, saved)


def _record(roster: Roster, step: int) -> None:
    """Note that the run was healed."""
    if (folder := folder_from_environment()) is not None:
        lost = [(each.rank, each.why) for each in roster.lost]
        seconds = max(0.0, time.time() - roster.at)
        healing = Healing(roster.generation, step, len(roster.members), lost, int(roster.at * 1e9), seconds)
        write_healing(folder, healing)
