"""``paceline.OuterLoop``: exact averages inside a host in every step, and outer steps between hosts."""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch

from paceline.comm.group import Group
from paceline.comm.host_groups import open_group_of, ranks_by_host, ranks_by_member
from paceline.comm.membership import own_membership
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import MeetingError, OptionError, StepError, UnsupportedError
from paceline.hooks.compressed import compressor_of, int4
from paceline.hooks.compressors import Compressor
from paceline.hooks.hook import Hook
from paceline.optim.wrapped_optimizer import StepsWithWrapper, trainable
from paceline.outer.fragment import OuterOptimizer
from paceline.outer.host_exchange import HostExchange, longest_wait
from paceline.outer.host_meeting import HostMeeting
from paceline.outer.host_ranks import BYTES_AT_ONCE, HostRanks
from paceline.outer.moves import Move
from paceline.outer.other_hosts import OtherHosts
from paceline.outer.repeated_warning import RepeatedWarning
from paceline.outer.rounds import Rounds
from paceline.outer.schedule import Schedule, cut_evenly
from paceline.watch.stall import shorten_names

_FRAGMENTS = 4
_LOOK_SECONDS = 1.0
_MEET_SECONDS = 60.0
_FINISHED, _CLOSED, _INTERRUPTED = "it has finished", "it was closed", "finish() was interrupted"
# Those of this process that may still be in use.
_loops: "weakref.WeakSet[OuterLoop]" = weakref.WeakSet()
# Of a wrapper that a loop has moved: the process group of all hosts, and the one of its host.
_moved_from: "weakref.WeakKeyDictionary[DistributedDataParallel, tuple[Any, Any]]" = (
    weakref.WeakKeyDictionary()
)
_T = TypeVar("_T")


class _MoveKind(IntEnum):
    """What a host's ranks do to a fragment."""

    NOTHING = 0
    MOVE = 1
    REPLACE = 2


class OuterLoop(StepsWithWrapper):
    """Trains hosts that are far apart, with little traffic between them (DiLoCo).

    ::

        ddp = paceline.DistributedDataParallel(net)
        outer = paceline.OuterLoop(ddp)
        optimizer = torch.optim.AdamW(ddp.parameters())
        for x, y in batches:
            loss_of(ddp(x), y).backward()
            optimizer.step()
            outer.step()
            optimizer.zero_grad()
        outer.finish()

    From here on the wrapper averages gradients among the ranks of a host only. Every ``period`` steps, hosts
    average how far their parameters have moved, and step from there with Nesterov momentum. The parameters
    are in fragments, whose exchanges are spread over the period and run in a thread beside training.

    A host that does not come within the grace period is left out, and nobody waits for it. When it is back,
    it takes the state of the others and goes on with them. After ``finish`` all hosts have the same model.

    Bytes sent per host and step for n parameters, to each other host: ``n / (2 period)`` with ``int4``, and
    3.1% for its scales, where exact averages take ``8 n (H-1)/H`` with H hosts. Error: hosts train apart for
    up to ``period + overlap`` steps. What compression leaves out is sent with the next change.

    Make it after the wrapper and before optimizers of ``paceline``. Every rank makes it at once, and calls
    ``step`` and ``finish`` at once with the other ranks of its host.

    Args:
        ddp: the wrapper.
        inner: which ranks average in every step: "host" for those of a host, or a process group.
        period: steps from one exchange of a parameter to its next.
        fragments: how many fragments the parameters are in; 4 by default, or fewer if there are fewer
            parameters.
        overlap: steps from sending a fragment until its result is used; by default ``period // fragments``.
            A result that comes later is used when it comes.
        compressor: what changes are sent as: a compressor, or a hook that has one. By default ``int4``.
        lr: the learning rate of outer steps.
        momentum: their Nesterov momentum.
        grace: seconds after which a silent host is left out; more than it takes to exchange a fragment.
        meet: "host:port" if each host is a job of its own: there the first host listens, and the others join
            it, at any time. Each host's wrapper then has the ranks of that host only.
    """

    _called = "outer loop"

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *,
        inner: Literal["host"] | Any = "host",
        period: int = 64,
        fragments: int | None = None,
        overlap: int | None = None,
        compressor: Compressor | Hook | None = None,
        lr: float = 0.7,
        momentum: float = 0.9,
        grace: float = 10.0,
        meet: str | None = None,
    ) -> None:
        super().__init__()
        _check(ddp, lr=lr, momentum=momentum, grace=grace)
        if meet is not None and inner != "host":
            raise OptionError(
                "if hosts meet, each is a job of its own, and all of its ranks average in every step: leave "
                f"inner out (meet: {meet}, inner: {inner})"
            )
        self._wrapper = ddp
        self._meet = None if meet is None else HostMeeting.parse(meet)
        self._refuse_second_loop_at_meeting()
        # Of empty ones there is nothing to send, and compressors need at least one element.
        parameters = [parameter for parameter in trainable(ddp) if parameter.numel()]
        count = min(_FRAGMENTS, len(parameters), period) if fragments is None else fragments
        if count > len(parameters):
            raise OptionError(
                "a fragment needs a parameter of its own "
                f"(fragments: {fragments}, parameters that are trained: {len(parameters)})"
            )
        usual = min(period // max(count, 1), period - 1)
        self._schedule = Schedule(period, count, usual if overlap is None else overlap)
        ranges = cut_evenly([parameter.numel() for parameter in parameters], count)
        self._parameters = [[parameters[index] for index in part] for part in ranges]
        self._others = OtherHosts(
            ddp,
            self._parameters,
            schedule=self._schedule,
            compressor=compressor_of(int4() if compressor is None else compressor),
            optimizer=OuterOptimizer(lr, momentum),
            grace=grace,
            meeting=self._meet,
        )
        self._flat = self._others.flat
        self._ranks = HostRanks(ddp)
        self._moves = 0  # how many moves this rank has made
        self._is_alone = False
        self._over = ""  # why this loop makes no more steps
        self._sharing: list[int] = []  # the fragments that are moved in this step and have not been
        self._failure: Exception | None = None  # of the exchange, which all ranks of the host have to know
        self._steps = 0
        self._group = ddp._group
        self._meet_seconds = _MEET_SECONDS
        self._grace = grace
        if (membership := own_membership()) is not None:
            self._prepare_for_healing(membership.lost_after)
        elif self._meet is None:
            self._open_among_hosts(inner)
            self._group = ddp._group
        else:
            self._meet_for_host(ddp._group)
        _loops.add(self)

    def _refuse_second_loop_at_meeting(self) -> None:
        """Two loops of this host would join each other, and average two modules."""
        if self._meet is not None and any(
            other._meet == self._meet and not other._over for other in _loops.copy()
        ):
            raise OptionError(
                "another outer loop of this process meets there: give each loop a port of its own, the same "
                f"on all hosts, or finish the other one first (meet: {self._meet.address}:{self._meet.port})"
            )

    @property
    def hosts(self) -> list[int]:
        """The other hosts that are there; empty on ranks that do not talk to them."""
        return [] if self._exchange is None else self._exchange.present()

    @property
    def _exchange(self) -> HostExchange | None:
        return self._others.exchange

    @property
    def _number(self) -> int | None:
        return None if self._others.known_as is None else self._others.known_as.number

    # The start.

    def _open_among_hosts(self, inner: Any) -> None:
        """All hosts are in the wrapper's group, or were before an earlier loop moved it."""
        group = self._group_of_all_hosts()
        hosts = [[0]]
        if group.size > 1:
            hosts = ranks_by_host(group) if isinstance(inner, str) else ranks_by_member(group, inner)
        [own] = [ranks for ranks in hosts if group.rank in ranks]
        self._is_alone = len(hosts) == 1
        has_to_move = not self._is_alone and not self._is_wrapper_in(group, own, inner)
        if has_to_move and self._wrapper._host_parameters is not None:
            raise UnsupportedError("make the OuterLoop before the HostOptimizer: it moves the wrapper")
        self._others.open_among(group, hosts)
        if has_to_move:
            self._move_wrapper(group, open_group_of(group, own) if isinstance(inner, str) else inner)

    def _group_of_all_hosts(self) -> Group:
        ddp = self._wrapper
        everyone, host = _moved_from.get(ddp, (None, None))
        return Group(everyone) if everyone is not None and ddp.process_group is host else ddp._group

    def _is_wrapper_in(self, group: Group, own: Sequence[int], inner: Any) -> bool:
        """Whether the wrapper averages among the ranks of this host already, after an earlier loop."""
        if not isinstance(inner, str):
            return inner is self._wrapper.process_group
        current = self._wrapper._group
        return current.name_ranks(range(current.size)) == group.name_ranks(own)

    def _move_wrapper(self, group: Group, inner: Any) -> None:
        """Average among the ranks of this host from now on."""
        ddp = self._wrapper
        ddp._go_on_in(inner, step=ddp._reducer.step_number)
        _moved_from[ddp] = (group.process_group, inner)

    def _prepare_for_healing(self, lost_after: float) -> None:
        """Until the first step each rank is alone, so that none can talk for its host: see _regroup."""
        if self._meet is None:
            raise UnsupportedError(
                "with `paceline run --heal`, ranks can be replaced in one host's job only: run a job on each "
                'host, and name where hosts meet, OuterLoop(ddp, meet="host:port")'
            )
        if longest_wait(self._grace) >= lost_after:
            raise OptionError(
                "a step may wait for other hosts for 2 * grace + 1 seconds, and the launcher takes a rank "
                "for lost that others wait for as long: take a smaller grace, or a larger --lost-after "
                f"(grace: {self._grace}, --lost-after: {lost_after})"
            )
        self._meet_seconds = min(_MEET_SECONDS, lost_after / 2)  # or the launcher takes this rank for lost

    # Training.

    def step(self) -> None:
        """A step is done: exchange what is due, and use what has come; every rank of the host calls this.

        Call it once for each step, after ``optimizer.step()``.
        """
        self._note_step()
        if self._over:
            raise StepError(f"this outer loop is over, because {self._over}: make another one to go on")
        if self._is_alone:
            return
        self._follow_group()
        self._check_trained()
        moves: Mapping[int, Move] = {}
        self._share(self._of_exchange(lambda exchange: exchange.after_step(), otherwise=moves))

    def _of_exchange(self, ask: Callable[[HostExchange], _T], *, otherwise: _T) -> _T:
        """What the exchange says, if this rank has one; if it fails, all ranks of the host are told next."""
        if self._exchange is None or self._failure is not None:
            return otherwise
        try:
            return ask(self._exchange)
        except Exception as error:
            self._failure = error
            return otherwise

    def _check_trained(self) -> None:
        """Raise if parameters are trained that are not exchanged."""
        self._steps += 1
        if self._steps % self._schedule.period == 0:
            known = {id(parameter) for part in self._parameters for parameter in part}
            trained = {id(each) for each in trainable(self._wrapper) if each.numel()}
            names = [
                name for name, each in self._wrapper.module.named_parameters() if id(each) in trained - known
            ]
            if names:
                raise StepError(
                    "parameters are trained that hosts do not exchange: make the OuterLoop when all that is "
                    f"trained requires gradients (parameters: {shorten_names(names)})"
                )

    def _share(self, moves: Mapping[int, Move]) -> None:
        """Have every rank of the host make the moves that its speaker has, by fragment."""
        kinds = [_kind_of(moves.get(number)) for number in range(len(self._flat))]
        told = self._ranks.tell(kinds, failure=self._failure)
        self._sharing = [number for number, kind in enumerate(told) if kind]
        shared = self._wrapper._host_parameters
        for number in [*self._sharing]:
            flat = self._flat[number]
            value = moves[number].by if number in moves else torch.empty(flat.numel, dtype=flat.dtype)
            self._ranks.spread(value)
            with contextlib.nullcontext() if shared is None else shared.writing():
                (flat.replace if told[number] == _MoveKind.REPLACE else flat.move)(value)
            self._moved(number)

    def _moved(self, number: int) -> None:
        """This rank has made the move of a fragment, or has got the parameters of one that has."""
        self._moves += 1
        self._sharing.remove(number)
        if self._exchange is not None:
            self._exchange.used(number)

    def _follow_group(self) -> None:
        """If the host's ranks are others now, agree on who talks to other hosts, and on the parameters."""
        if self._wrapper._group is not self._group:
            self._group = self._wrapper._group
            with self._ranks.waiting():
                self._regroup(self._group)

    def _regroup(self, group: Group) -> None:
        others = self._others
        own = (self._exchange is not None, self._moves, others.known_as)
        everyone = [own] if group.size == 1 else group.gather_objects(own)
        speakers = [rank for rank, (speaks, _, _) in enumerate(everyone) if speaks]
        self._ranks.speaker = speakers[0] if speakers else 0
        others.known_as = next((known_as for _, _, known_as in everyone if known_as is not None), None)
        counts = [moves for _, moves, _ in everyone]
        for number in self._sharing[: max(counts) - self._moves]:
            self._moved(number)
        if len({*counts}) > 1:  # a rank was lost while others moved their parameters
            for flat in self._flat:
                value = flat.read()
                group.broadcast([value], source=counts.index(max(counts)), bytes_at_once=BYTES_AT_ONCE)
                flat.replace(value)
        self._moves = max(counts)
        if not speakers and self._meet is not None:
            self._meet_for_host(group)
        others.forget_saved()

    def _meet_for_host(self, group: Group) -> None:
        """Have one rank meet the other hosts; the others keep its name, in case that it is lost."""
        failure: Exception | None = None
        if group.rank == self._ranks.speaker:
            try:
                self._others.meet(seconds=self._meet_seconds)
            except Exception as error:  # the other ranks have to know
                failure = error
        own = (self._others.known_as, "" if failure is None else repr(failure))
        everyone = [own] if group.size == 1 else group.gather_objects(own)
        self._others.known_as, words = everyone[self._ranks.speaker]
        if failure is not None:
            raise failure
        if words:
            raise MeetingError(f"rank {self._ranks.speaker} could not meet the other hosts: {words}")

    # The end, and checkpoints.

    def finish(self) -> None:
        """Training is over: wait for the other hosts, and have the same model as they; every rank calls this.

        A host that has fewer steps than others waits for them, as long as they are there.
        """
        if self._over == _INTERRUPTED:
            raise StepError(f"this outer loop is over, because {self._over}: the hosts have different models")
        if self._over == _FINISHED:
            return
        self._over = _INTERRUPTED
        try:
            if not self._is_alone:
                self._finish()
        except BaseException:
            self._others.close()
            raise
        self._over = _FINISHED

    def _finish(self) -> None:
        self._follow_group()
        nothing: Mapping[int, Move] = {}
        # Only when all ranks of this host are here may other hosts wait for it.
        self._ranks.tell([], failure=self._failure)
        self._of_exchange(lambda exchange: exchange.finish(), otherwise=None)
        self._wait_for(lambda rounds, now: rounds.can_end(now))
        first = self._of_exchange(lambda exchange: exchange.skip_to_last(), otherwise=0)
        self._wait_for(lambda rounds, _: rounds.decided >= first)
        last = self._of_exchange(lambda exchange: exchange.send_last(), otherwise=0)
        self._wait_for(lambda rounds, _: rounds.decided >= last)
        self._wait_for(lambda rounds, now: rounds.all_decided(now))
        self._share(self._of_exchange(lambda exchange: exchange.common_values(), otherwise=nothing))
        self._share_buffers()
        self._warn_of_missing_hosts()
        self._others.close()

    def _warn_of_missing_hosts(self) -> None:
        if self._exchange is None:
            return
        self._exchange.warn_if_alone(stacklevel=5)
        if away := self._exchange.away():
            warnings.warn(
                "hosts are away at the end of training, so they have another model than this one "
                f"(hosts: {away}, here: host {self._number})",
                stacklevel=4,
            )

    def _wait_for(self, is_so: Callable[[Rounds, float], bool]) -> None:
        """Wait until something is so on the speaker."""
        self._wait_until(lambda exchange: exchange.wait_for(is_so, _LOOK_SECONDS))

    def _wait_until(self, is_so: Callable[[HostExchange], bool]) -> None:
        """Wait until something is so on the speaker; it says every second that it still waits."""
        is_over = False
        warning = RepeatedWarning(self._grace)
        while not is_over:
            is_now = self._of_exchange(is_so, otherwise=False)
            if self._exchange is not None and not is_now:
                warning.tell(self._whom_it_waits_for)
            own = [float(self._exchange is not None), float(is_now)]
            has_speaker, is_reached = self._ranks.tell(own, failure=self._failure)
            is_over = bool(is_reached or not has_speaker)  # without a speaker nobody would ever say so

    def _whom_it_waits_for(self) -> str:
        assert self._exchange is not None
        unfinished = self._exchange.unfinished()
        if not unfinished:
            return f"host {self._number} waits in finish() for hosts that have finished to send all"
        rounds = ", ".join(f"host {host}: {count} rounds" for host, count in unfinished.items())
        return (
            f"host {self._number} waits in finish() for hosts {[*unfinished]}, which have not finished "
            f"({rounds}, here: {self._exchange.rounds.decided} rounds)"
        )

    def _share_buffers(self) -> None:
        """Have the module buffers of the present host of the lowest number."""
        buffers = [*self._wrapper.module.buffers()]
        if not buffers:
            return
        content = torch.cat([each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in buffers])
        own = content.numpy().tobytes()
        self._wait_until(lambda exchange: exchange.share_buffers(own, _LOOK_SECONDS))
        if self._exchange is not None:
            received = self._exchange.buffers
            if received is None:
                warnings.warn(
                    "the module buffers of the first host have not come, so this host keeps its own "
                    f"(here: host {self._number})",
                    stacklevel=4,
                )
            else:
                content = torch.frombuffer(bytearray(received), dtype=torch.uint8)
        self._ranks.spread(content)
        parts = content.split([buffer.nbytes for buffer in buffers])
        with torch.no_grad():
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def close(self) -> None:
        """Leave the other hosts; this host keeps the parameters that it has."""
        self._over = self._over or _CLOSED
        self._others.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """This host's outer state; empty on ranks that do not talk to other hosts.

        Save it with the model, by the first rank of each host. Any rank may call this alone.
        """
        return self._others.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; ranks that do not talk to other hosts ignore it.

        Hosts that load states of different steps agree: those that are behind take over the state of the
        others.
        """
        self._others.load_state_dict(state)


def _kind_of(move: Move | None) -> _MoveKind:
    if move is None:
        return _MoveKind.NOTHING
    return _MoveKind.REPLACE if move.replaces else _MoveKind.MOVE


def _check(ddp: object, *, lr: float, momentum: float, grace: float) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise OptionError(
            f"an OuterLoop needs paceline's wrapper: OuterLoop(ddp) (given: {type(ddp).__name__})"
        )
    if not (lr > 0 and 0 <= momentum < 1 and 0 < grace < float("inf")):
        raise OptionError(
            "lr and grace must be positive, and momentum at least 0 and less than 1 "
            f"(lr: {lr}, momentum: {momentum}, grace: {grace})"
        )
