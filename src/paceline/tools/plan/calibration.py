"""Measures on this machine what a plan's hooks cost: the real hooks run alone, on buckets of recorded sizes.

The other hosts are a stand-in that answers each collective at once. It notes what was sent, and how long the
hook worked before. Nothing here opens a process group. Times are those of the CPU, so that other programs on
this machine do not count.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline import hooks
from paceline.comm.group import MESSAGE_CHUNK_BYTES, Group
from paceline.comm.shm.segment import CHUNK_BYTES
from paceline.ddp.buckets.plan import Slot
from paceline.ddp.exchange.between_hosts import SlotLeaders
from paceline.ddp.reducer.step_report import RankReport, ReportLayout
from paceline.errors import RecordingError
from paceline.hooks.compressors import Integers
from paceline.hooks.hook_cost import run_hook
from paceline.tools.plan.cluster import Cluster
from paceline.tools.plan.recorded_steps import BucketSizes, RecordedSteps
from paceline.tools.plan.simulation import BucketWork, HookStage, MessageRounds

_MAKE_HOOK: dict[str, Callable[[], hooks.Hook]] = {
    "fp16": hooks.fp16,
    "bf16": hooks.bf16,
    "int8": hooks.int8,
    "int4": hooks.int4,
    "power_sgd": lambda: hooks.power_sgd(start_step=0),
}
_REPEATS = 3
# Gradients repeat what is drawn: to draw all of them takes longer than most hooks.
_DRAWN = 1 << 16
# More elements take longer in proportion, and would not fit into every memory. In a host, those of all ranks.
_MOST_OUTER = 1 << 24
_MOST_IN_HOST = 1 << 26
# The same with reports of more ranks.
_MOST_REPORTED = 1 << 10


@dataclass(frozen=True)
class OuterCost:
    """What one outer exchange costs a host, as the thread of one rank does it.

    Attributes:
        seconds: to encode the difference of the parameters, and to decode those of all other hosts.
        nbytes: what the host sends to one other host.
    """

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class ReportCost:
    """What the step report costs; see ``step_report.py``.

    Attributes:
        seconds: how much longer a rank writes and reads it than when it recorded.
        nbytes: its size, with elements of float32.
    """

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class _Share:
    """A leader's share of a bucket, as a hook sees it."""

    numels: tuple[int, ...]

    @cached_property
    def gradients(self) -> Tensor:
        numel = sum(self.numels)
        return torch.randn(_DRAWN).repeat(-(-numel // _DRAWN))[:numel]

    @cached_property
    def views(self) -> list[Tensor]:
        parts = self.gradients.split(list(self.numels))
        return [part.view(_shape(part.numel())) for part in parts]

    @cached_property
    def parameters(self) -> list[Parameter]:
        return [Parameter(torch.empty_like(view)) for view in self.views]


@dataclass
class _Answer:
    """A collective whose result is made when it is waited for: that is no work of the hook's."""

    make: Callable[[], Tensor]

    def wait(self, on_slow: object) -> Tensor:  # noqa: ARG002  # it takes no time
        return self.make()

    def done(self) -> bool:
        return True


@dataclass
class _StandInHosts:
    """Stands for the leaders of the other hosts: each sends what this one sends.

    Attributes:
        size: the number of hosts.
        leaders: of each host, which send at the same time.
        rank: this host.
        exchanges: of each collective, what it is on the link.
    """

    size: int
    leaders: float
    rank: int = 0
    exchanges: list[Sequence[MessageRounds]] = field(default_factory=list)

    def all_gather(self, row: Tensor) -> _Answer:
        self.exchanges.append(
            [MessageRounds(self.size - 1, each * self.leaders) for each in _chunks(row.shape[1])]
        )
        return _Answer(lambda: row.expand(self.size, -1).contiguous())

    def all_to_all(self, rows: Tensor) -> _Answer:
        # To all others at once.
        sent = self.leaders * (self.size - 1)
        self.exchanges.append([MessageRounds(1, each * sent) for each in _chunks(rows.shape[1])])
        return _Answer(lambda: rows)

    def all_reduce(self, tensor: Tensor) -> _Answer:
        self.exchanges.append([ring(tensor.nbytes * self.leaders, self.size)])
        return _Answer(lambda: tensor.mul_(self.size))


class Calibration:
    """Measures each cost once.

    Args:
        recorded: has the buckets.
        cluster: how many ranks sum inside a host, and share a core.
    """

    def __init__(self, recorded: RecordedSteps, cluster: Cluster) -> None:
        self._buckets = recorded.buckets
        self._ranks = cluster.ranks_per_host
        self._recorded_ranks = recorded.ranks
        self._summing_ranks = recorded.summing_ranks
        self._share_of_core = 1 / cluster.ranks_per_core
        self._shares = _largest_shares(recorded.buckets, cluster.ranks_per_host)
        self._known: dict[tuple[object, ...], Any] = {}
        self._measured: list[dict[str, object]] = []

    def work(self, hook: str, hosts: int) -> list[BucketWork]:
        """What each bucket takes with a hook; with the hook "none", the plain average."""
        with _one_thread():
            if hook == "none" or hosts == 1:
                # The report travels behind the last bucket.
                tails = [0] * (len(self._buckets) - 1) + [self.report(hosts).nbytes]
                return [self._plain(*each, hosts) for each in zip(self._buckets, tails, strict=True)]
            pairs = zip(self._buckets, self._shares, strict=True)
            return [self._with_hook(hook, bucket, share, hosts) for bucket, share in pairs]

    def report(self, hosts: int) -> ReportCost:
        """What the reports of all ranks cost."""
        ranks = hosts * self._ranks
        with _one_thread():
            seconds = self._report_seconds(ranks) - self._report_seconds(self._recorded_ranks)
        return ReportCost(max(0.0, seconds) / self._share_of_core, 4 * self._layout(ranks).numel)

    def outer(self, hosts: int) -> OuterCost:
        """What an outer exchange costs."""
        numel = sum(bucket.nbytes for bucket in self._buckets) // 4
        if not numel:  # empty parameters
            return OuterCost(0.0, 0)
        with _one_thread():
            encode, decode, nbytes = self._once(("outer",), lambda: self._measure_outer(numel))
        return OuterCost((encode + (hosts - 1) * decode) / self._share_of_core, nbytes)

    @property
    def measured(self) -> list[dict[str, object]]:
        """What was measured here, in milliseconds of the CPU of one thread that has a core for itself."""
        return list(self._measured)

    def _plain(self, bucket: BucketSizes, tail: int, hosts: int) -> BucketWork:
        sum_seconds, spread_seconds = self._in_host(_slice(bucket, self._ranks), self._ranks)
        chunks = _cut(bucket.nbytes + tail, CHUNK_BYTES)
        stages = [HookStage(0.0, [ring(each, hosts) for each in chunks])] if hosts > 1 else []
        return BucketWork(sum_seconds, stages, 0.0, spread_seconds, self._recorded_in_host(bucket))

    def _with_hook(self, hook: str, bucket: BucketSizes, share: _Share, hosts: int) -> BucketWork:
        if not bucket.nbytes:  # empty parameters
            return self._plain(bucket, 0, hosts)
        sum_seconds, spread_seconds = self._in_host(sum(share.numels), self._ranks)
        leaders = bucket.nbytes / 4 / sum(share.numels)
        key = hook, hosts, share.numels
        stages, last = self._once(key, lambda: self._measure_hook(hook, share, hosts, leaders))
        slower = [HookStage(each.seconds / self._share_of_core, each.exchanges) for each in stages]
        recorded = self._recorded_in_host(bucket)
        return BucketWork(sum_seconds, slower, last / self._share_of_core, spread_seconds, recorded)

    def _in_host(self, numel: int, ranks: int) -> tuple[float, float]:
        """Seconds to sum one rank's part of a bucket inside a host, and to spread it."""
        if ranks == 1:
            return 0.0, 0.0
        key = "in host", numel, ranks
        sums, spreads = self._once(key, lambda: self._measure_in_host(numel, ranks))
        return sums / self._share_of_core, spreads / self._share_of_core

    def _recorded_in_host(self, bucket: BucketSizes) -> float:
        """Seconds that a recorded rank's own work contains for both."""
        return sum(self._in_host(_slice(bucket, self._summing_ranks), self._summing_ranks))

    def _measure_hook(
        self, hook: str, share: _Share, hosts: int, leaders: float
    ) -> tuple[list[HookStage], float]:
        # A copy: the tensors of all shares together may be larger than the memory.
        stages, last = _hook_stages(_MAKE_HOOK[hook](), _Share(share.numels), hosts, leaders)
        self._note(
            hook,
            sum(share.numels),
            hosts=hosts,
            stages=[1e3 * stage.seconds for stage in stages],
            last=1e3 * last,
        )
        return stages, last

    def _measure_in_host(self, numel: int, ranks: int) -> tuple[float, float]:
        sample = min(numel, max(1, _MOST_IN_HOST // ranks))
        factor = numel / max(1, sample)
        sums, spreads = (factor * each for each in _in_host_seconds(sample, ranks))
        self._note("in host", numel, ranks=ranks, sum=1e3 * sums, spread=1e3 * spreads)
        return sums, spreads

    def _measure_outer(self, numel: int) -> tuple[float, float, int]:
        encode, decode, nbytes = _outer_seconds(numel)
        self._note("outer", numel, encode=1e3 * encode, decode=1e3 * decode)
        return encode, decode, nbytes

    def _layout(self, ranks: int) -> ReportLayout:
        slots = sum(len(bucket.slots) for bucket in self._buckets)
        return ReportLayout(
            slots=slots, buckets=len(self._buckets), world=ranks, with_order=False, with_digests=True
        )

    def _report_seconds(self, ranks: int) -> float:
        """Seconds to write and read the reports of so many ranks."""
        sample = min(ranks, _MOST_REPORTED)
        seconds: float = self._once(("report", sample), lambda: self._measure_report(sample))
        return seconds * self._layout(ranks).numel / self._layout(sample).numel

    def _measure_report(self, ranks: int) -> float:
        layout = self._layout(ranks)
        seconds = _report_seconds(layout, ranks)
        self._note("report", layout.numel, ranks=ranks, write_and_read=1e3 * seconds)
        return seconds

    def _note(self, what: str, elements: int, **values: object) -> None:
        self._measured.append({"what": what, "elements": elements, **values})

    def _once(self, key: tuple[object, ...], measure: Callable[[], Any]) -> Any:
        if key not in self._known:
            try:
                self._known[key] = measure()
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
                    raise
                raise RecordingError(
                    f"this machine has too little memory to measure what hooks cost (measured: {key[0]})"
                ) from error
        return self._known[key]


def ring(nbytes: float, hosts: int) -> MessageRounds:
    """An all-reduce of gloo's: parts of the tensor go twice around all hosts."""
    return MessageRounds(2 * (hosts - 1), nbytes / hosts)


def _slice(bucket: BucketSizes, ranks: int) -> int:
    """The elements of a bucket that each of a host's ranks sums."""
    return -(-bucket.nbytes // 4 // ranks)


def _largest_shares(buckets: Sequence[BucketSizes], ranks: int) -> list[_Share]:
    """Of each bucket the largest share that one leader has: the others wait for it."""
    leaders = SlotLeaders(ranks)
    shares = []
    for bucket in buckets:
        own: list[list[int]] = [[] for _ in range(ranks)]
        slots = [
            Slot(index, "", numel, 4 * numel, "")
            for index, numel in zip(bucket.slots, bucket.numels, strict=True)
        ]
        for numel, leader in zip(bucket.numels, leaders.of(slots), strict=True):
            own[leader].append(numel)
        shares.append(_Share(tuple(max(own, key=sum))))
    return shares


def _hook_stages(
    hook: hooks.Hook, share: _Share, hosts: int, leaders: float
) -> tuple[list[HookStage], float]:
    """Run a hook some times: its stages, with the median of the seconds, and the seconds after the last."""
    others = _StandInHosts(hosts, leaders)
    group = cast("Group", others)
    hook.meet(group)
    runs = []
    for _ in range(1 + _REPEATS):
        others.exchanges.clear()
        runs.append(run_hook(hook, share, group, time.thread_time))
    *seconds, last = (statistics.median(times) for times in zip(*runs[1:], strict=True))
    return [HookStage(*each) for each in zip(seconds, others.exchanges, strict=True)], last


def _in_host_seconds(numel: int, ranks: int) -> tuple[float, float]:
    tensors = [torch.randn(numel) for _ in range(ranks)]
    part = torch.empty(numel)

    def add_up() -> None:
        torch.mul(tensors[0], 1 / ranks, out=part)
        for tensor in tensors[1:]:
            part.add_(tensor, alpha=1 / ranks)

    def spread() -> None:
        for tensor in tensors:
            tensor.copy_(part)

    return _seconds(add_up), _seconds(spread)


def _report_seconds(layout: ReportLayout, ranks: int) -> float:
    """Seconds to write one rank's report, and to read those of all, which say the usual things."""
    own, reports = torch.empty(layout.numel), torch.zeros(layout.numel)
    for rank in range(ranks):
        layout.write(own, rank, RankReport())
        reports += own

    def write_and_read() -> None:
        layout.write(own, 0, RankReport())
        layout.read(reports)
        layout.read_counts(reports)
        layout.read_digests(reports)

    return _seconds(write_and_read)


def _outer_seconds(numel: int) -> tuple[float, float, int]:
    """Seconds to encode all parameters, to decode one message, and the message's bytes."""
    sample = min(numel, _MOST_OUTER)
    compressor, values = Integers(4), _Share((sample,)).gradients.view(1, sample)
    message = compressor.encode(values)
    encode = _seconds(lambda: compressor.encode(values))
    decode = _seconds(lambda: compressor.decode(message, sample, torch.float32))
    factor = numel / sample
    return factor * encode, factor * decode, round(factor * message.nbytes)


def _seconds(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(1 + _REPEATS):
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return statistics.median(taken[1:])


def _shape(numel: int) -> tuple[int, ...]:
    """As square a matrix as there is: recordings do not have the shapes, which PowerSGD depends on."""
    rows = next((each for each in range(math.isqrt(numel), 1, -1) if numel % each == 0), 0)
    return (numel // rows, rows) if rows else (numel,)


def _chunks(nbytes: int) -> list[int]:
    return _cut(nbytes, MESSAGE_CHUNK_BYTES)


def _cut(nbytes: int, most: int) -> list[int]:
    """Bytes as chunks: how long each is."""
    return [min(most, nbytes - start) for start in range(0, nbytes, most)]


@contextmanager
def _one_thread() -> Iterator[None]:
    """As `paceline run` and torchrun start ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
