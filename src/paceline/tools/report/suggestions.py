"""Suggests what to change. Each suggestion comes with the figures that support it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.tools.formatting import byte_size, milliseconds, percent, plain_number, plural
from paceline.tools.report.step_parts import StepPart, place
from paceline.tools.report.stragglers import Straggler
from paceline.tools.report.wall_time import PauseCause, PauseSummary

_MIB = 1 << 20
# The share of a step that is worth a change.
_WORTH = 0.08
# The share of a step from which it is worth a look what the script does there.
_LARGE = 0.25
# The share of the wall time from which pauses are worth a change.
_LARGE_PAUSES = 0.1
_FEW_BUCKETS, _MANY_BUCKETS = 4, 16
_SMALL_BUCKET = _MIB // 2
_SMALLEST_CAP = _MIB // 4
# Enough buckets to communicate while backward runs, and few enough to cost little.
_GOOD_BUCKETS = 8
# Fewer steps may be what a gradient scaler skipped; if more have no optimizer, it is one that we do not see.
_LEAST_UNUSED, _MOST_UNUSED = 0.2, 0.95
_COMPRESSING = ("fp16", "bf16", "float16", "int8", "int4", "top_k", "power", "sgd", "quantiz", "compress")


@dataclass(frozen=True)
class RunFacts:
    """What suggestions are made from; times are milliseconds per step.

    Attributes:
        step: the whole step, without pauses.
        pauses: the pauses by cause.
        parts: where a step goes, on the average rank; with pauses.
        least: what the rank that spends least in a part spends there: all that a change of the part can save,
            because the other ranks also wait there.
        in_flight: how long a bucket is in flight.
        first_ready: when the first bucket is ready, as a share of backward.
        buckets: the bytes of each bucket.
        cap: how many bytes a bucket may hold.
        ranks: how many ranks there are.
        hosts: how many hosts they are on.
        transport: how gradients are sent.
        device: where the module is.
        exchange: how buckets are averaged.
        stragglers: the ranks that others wait for.
        lost: the share of steps that were lost, and not done again.
        without_inputs: the share of steps in which a rank had no inputs left.
        without_optimizer: the share of steps after which no optimizer stepped.
    """

    step: float
    pauses: Sequence[PauseSummary]
    parts: Mapping[StepPart, float]
    least: Mapping[StepPart, float]
    in_flight: float
    first_ready: float
    buckets: Sequence[int]
    cap: int
    ranks: int
    hosts: int
    transport: str
    device: str
    exchange: str
    stragglers: Sequence[Straggler]
    lost: float
    without_inputs: float
    without_optimizer: float

    @property
    def exposed(self) -> float:
        """Exposed communication, which does not include the wait for stragglers."""
        return self.parts[StepPart.EXPOSED_COMMUNICATION]

    @property
    def paused_share(self) -> float:
        """The share of the wall time that is pauses."""
        return sum(each.share for each in self.pauses)

    @property
    def large_pauses(self) -> Sequence[PauseSummary]:
        """If pauses are worth a change, the largest ones and all others that are a good part of them."""
        if self.paused_share < _LARGE_PAUSES:
            return []
        first, *others = self.pauses
        return [first, *(each for each in others if each.share >= _LARGE_PAUSES / 2)]

    @property
    def sees_optimizer(self) -> bool:
        """Whether an optimizer of torch stepped the wrapper's own parameters."""
        return self.without_optimizer <= _MOST_UNUSED

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        return sum(self.buckets)

    def is_worth(self, part: float) -> bool:
        """Whether a part of a step is large enough to change something."""
        return part >= _WORTH * self.step > 0

    @property
    def is_join_worth(self) -> bool:
        """Whether ranks tell each other for long who has inputs."""
        return self.ranks > 1 and self.is_worth(self.least[StepPart.JOIN])

    def is_large(self, part: float) -> bool:
        """Whether a part of a step that is the script's own is worth a look."""
        return part > _LARGE * self.step > 0

    def share(self, part: float) -> str:
        """A part of a step, as text."""
        return f"{milliseconds(part)} of {milliseconds(self.step)} ({percent(part / self.step)} of a step)"


@dataclass(frozen=True)
class Suggestion:
    """What to change, the figures that support it, and how many milliseconds per step it can save at most."""

    kind: str
    change: str
    evidence: str
    saves_at_most_ms: float


Rule = Callable[[RunFacts], Iterator[Suggestion]]


def suggestions(facts: RunFacts) -> list[Suggestion]:
    """The suggestions that the facts support, those that can save most first."""
    found = [each for rule in _RULES for each in rule(facts)]
    return sorted(found, key=lambda each: -each.saves_at_most_ms)


_STRAGGLER_ADVICE = {
    "": "see what else runs on its host",
    **dict.fromkeys(map(str, (StepPart.DATA, StepPart.LOADER)), "look at its data loading"),
    str(StepPart.OPTIMIZER): "see what its optimizer step does that the others' does not",
    **{
        str(part): f"see what its code does {place(part)}"
        for part in (StepPart.LOSS, StepPart.BEFORE_OPTIMIZER, StepPart.AFTER_OPTIMIZER)
    },
}


def _stragglers(facts: RunFacts) -> Iterator[Suggestion]:
    for straggler in facts.stragglers[:3]:
        if straggler.last_step is None:
            slow = straggler.slow_part
            advice = _STRAGGLER_ADVICE.get(
                slow or "",
                "look at its threads, at the sizes of its inputs and at what else runs on its host",
            )
            more = f", with {milliseconds(straggler.slow_part_ms)} more {place(slow)}" if slow else ""
            evidence = (
                f"it has been {milliseconds(straggler.late_ms)} behind the other ranks since step "
                f"{straggler.first_step:,}{more}"
            )
            change = f"Rank {straggler.rank} is a straggler: {advice}"
            yield Suggestion("straggler", change, evidence, straggler.late_ms)


def _transport(facts: RunFacts) -> Iterator[Suggestion]:
    one_host = facts.hosts == 1 and facts.ranks > 1 and facts.device.startswith("cpu")
    if one_host and facts.transport == "c10d" and facts.is_worth(facts.in_flight):
        evidence = (
            f"all {facts.ranks} ranks are on one host, and buckets are in flight for "
            f"{facts.share(facts.in_flight)}"
        )
        change = (
            'Set transport="auto": ranks of one host average in shared memory; if it is set already, '
            "a warning says why they do not"
        )
        yield Suggestion("transport", change, evidence, facts.exposed)


def _smaller_cap(facts: RunFacts) -> Iterator[Suggestion]:
    cap = max(_SMALLEST_CAP, facts.nbytes // _GOOD_BUCKETS)
    few = 0 < len(facts.buckets) <= _FEW_BUCKETS and max(facts.buckets) > 2 * cap
    if facts.ranks > 1 and few and cap < facts.cap and facts.is_worth(facts.exposed):
        evidence = (
            f"{facts.share(facts.exposed)} is exposed communication; the largest bucket has "
            f"{byte_size(max(facts.buckets))} of {byte_size(facts.nbytes)}"
        )
        change = f"Set bucket_cap_mb={_megabytes(cap)}: smaller buckets are launched earlier in backward"
        yield Suggestion("smaller cap", change, evidence, min(facts.exposed, facts.parts[StepPart.BACKWARD]))


def _larger_cap(facts: RunFacts) -> Iterator[Suggestion]:
    cap = max(_MIB, facts.nbytes // _GOOD_BUCKETS)
    many = len(facts.buckets) >= _MANY_BUCKETS and facts.nbytes / len(facts.buckets) < _SMALL_BUCKET
    if many and cap > facts.cap and facts.is_worth(facts.in_flight) and facts.is_worth(facts.exposed):
        each = facts.in_flight / len(facts.buckets)
        evidence = (
            f"{len(facts.buckets)} buckets of {byte_size(facts.nbytes / len(facts.buckets))} on average take "
            f"{milliseconds(each)} each, and {facts.share(facts.exposed)} is exposed communication"
        )
        change = f"Set bucket_cap_mb={_megabytes(cap)}: fewer, larger buckets cost less to reduce"
        yield Suggestion("larger cap", change, evidence, facts.exposed)


def _compress(facts: RunFacts) -> Iterator[Suggestion]:
    compressed = any(name in facts.exchange.lower() for name in _COMPRESSING)
    by_bytes = bool(facts.buckets) and facts.nbytes / len(facts.buckets) >= _SMALL_BUCKET
    if facts.hosts > 1 and not compressed and by_bytes and facts.in_flight and facts.is_worth(facts.exposed):
        rate = facts.nbytes * 8 / (facts.in_flight * 1e6)
        evidence = (
            f"{facts.share(facts.exposed)} is exposed communication between {facts.hosts} hosts; "
            f"{byte_size(facts.nbytes)} of gradients in {milliseconds(facts.in_flight)} are "
            f"{plain_number(rate)} Gbit/s"
        )
        change = (
            "Compress gradients: ddp.register_comm_hook(None, paceline.hooks.int8()) sends a quarter of the "
            "bytes, bf16() half of them"
        )
        yield Suggestion("hook", change, evidence, facts.exposed / 2)


def _more_work(facts: RunFacts) -> Iterator[Suggestion]:
    backward = facts.parts[StepPart.BACKWARD]
    exceeds_backward = facts.in_flight - facts.parts[StepPart.WAITING] > backward
    if facts.ranks > 1 and facts.is_worth(facts.exposed) and exceeds_backward:
        evidence = (
            f"buckets are in flight for {milliseconds(facts.in_flight)}, longer than backward takes "
            f"({milliseconds(backward)}), and {facts.share(facts.exposed)} is exposed communication"
        )
        change = "Use larger batches, or accumulate several backward passes in ddp.no_sync() per averaged one"
        yield Suggestion("more work", change, evidence, facts.exposed / 2)


def _unused(facts: RunFacts) -> Iterator[Suggestion]:
    unused = facts.without_optimizer
    if facts.ranks > 1 and _LEAST_UNUSED <= unused <= _MOST_UNUSED and facts.is_worth(facts.in_flight):
        change = (
            "Put backward passes whose averages no optimizer uses in ddp.no_sync(): all but the last of an "
            "accumulation, or those that train another model through this one"
        )
        evidence = (
            f"no optimizer stepped after {percent(unused)} of the averaged backward passes, and buckets are "
            f"in flight for {facts.share(facts.in_flight)}"
        )
        saved = facts.exposed + facts.parts[StepPart.GRAD_ASSIGNMENT]
        yield Suggestion("unused averages", change, evidence, unused * saved)


def _first_bucket(facts: RunFacts) -> Iterator[Suggestion]:
    if (
        facts.ranks > 1
        and len(facts.buckets) > 1
        and facts.first_ready > 0.6
        and facts.is_worth(facts.exposed)
    ):
        evidence = (
            f"the first bucket ({byte_size(facts.buckets[0])}) is ready after {percent(facts.first_ready)} "
            f"of backward, and {facts.share(facts.exposed)} is exposed communication"
        )
        change = "Set bucket_cap_mb_list with a small first cap: the first bucket is launched sooner"
        yield Suggestion("first bucket", change, evidence, facts.exposed)


def _buffers(facts: RunFacts) -> Iterator[Suggestion]:
    least = facts.least[StepPart.BUFFERS]
    if facts.is_worth(least):
        change = (
            "Set forward_sync_buffers=False if ranks may have different buffers; or leave buffers unchanged: "
            "they stop being broadcast after three unchanged steps"
        )
        spent = facts.share(facts.parts[StepPart.BUFFERS])
        evidence = f"synchronising module buffers in every forward takes {spent}"
        yield Suggestion("buffers", change, evidence, least)


def _data(facts: RunFacts) -> Iterator[Suggestion]:
    least = facts.least[StepPart.LOADER]
    if facts.is_large(least):
        change = "Load data ahead: more workers for the DataLoader, pinned or cached batches"
        evidence = f"{facts.share(facts.parts[StepPart.LOADER])} is spent in the DataLoader"
        yield Suggestion("data", change, evidence, least)


def _between_steps(facts: RunFacts) -> Iterator[Suggestion]:
    least, between = (
        each[StepPart.DATA] + each[StepPart.AFTER_OPTIMIZER] for each in (facts.least, facts.parts)
    )
    if not facts.is_large(least):
        return
    besides = ", besides the DataLoader" if facts.parts[StepPart.LOADER] else ""
    if facts.sees_optimizer:
        change = "See what your code does between steps: loading data, logging, schedulers"
        evidence = f"{facts.share(between)} is spent between the optimizer and the next forward{besides}"
    else:
        change = "See what your code does between steps: your optimizer, loading data, logging"
        evidence = (
            f"{facts.share(between)} is spent between backward and the next forward{besides}; "
            "no optimizer of torch stepped the wrapper's parameters"
        )
    yield Suggestion("between steps", change, evidence, least)


def _before_optimizer(facts: RunFacts) -> Iterator[Suggestion]:
    least = facts.least[StepPart.BEFORE_OPTIMIZER]
    if facts.is_large(least):
        change = (
            "See what your code does before the optimizer, or between optimizers: clipping, looking at "
            "gradients, logging"
        )
        spent = facts.share(facts.parts[StepPart.BEFORE_OPTIMIZER])
        evidence = f"{spent} is spent between averaged gradients and the optimizer's step"
        yield Suggestion("before optimizer", change, evidence, least)


def _loss(facts: RunFacts) -> Iterator[Suggestion]:
    least = facts.least[StepPart.LOSS]
    if facts.is_large(least):
        change = (
            "See what your code does between forward and backward: the loss, modules outside of the wrapper, "
            "metrics, logging"
        )
        spent = facts.share(facts.parts[StepPart.LOSS])
        evidence = f"{spent} is spent between the module's forward and the first gradient"
        yield Suggestion("loss", change, evidence, least)


def _join(facts: RunFacts) -> Iterator[Suggestion]:
    if facts.is_join_worth:
        change = "Leave join out"
        if facts.without_inputs:
            change = "Give all ranks the same number of batches, and leave join out"
        spent = facts.share(facts.parts[StepPart.JOIN])
        evidence = f"telling each other in every forward who has inputs takes {spent}"
        yield Suggestion("join", change, evidence, facts.least[StepPart.JOIN])


_PAUSE_ADVICE = {
    PauseCause.EVALUATION: "Evaluate less often, or a part of the data on each rank",
    PauseCause.CHECKPOINT: "Save less often, or beside the training, from a copy in another thread",
    PauseCause.OTHER_WRAPPER: "Look at the other wrapper's steps: they are most of the pauses of this one",
    PauseCause.OTHER_MODEL: "Another model is trained between these steps: look at its time",
    PauseCause.DATA: "Keep the DataLoader ready: persistent_workers=True, more workers",
    PauseCause.CODE: "See what your code does there: evaluation, logging, loading data, waiting for others",
    PauseCause.HEALING: "Look at why ranks were lost",
    PauseCause.LOST: "Look at why the others waited in vain: a rank raised an error, ended or stopped",
}


def _pauses(facts: RunFacts) -> Iterator[Suggestion]:
    for pauses in facts.large_pauses:
        wait = ", while other ranks wait" if pauses.others_wait else ""
        evidence = (
            f"{plural(pauses.count, 'pause')} for {pauses}, {_lengths(pauses)}{wait}: "
            f"{percent(pauses.share)} of the wall time"
        )
        change = _PAUSE_ADVICE[PauseCause(pauses.cause)]
        yield Suggestion(f"pauses: {pauses.cause}", change, evidence, pauses.step_ms)


def _lengths(pauses: PauseSummary) -> str:
    """How long pauses are, which may differ."""
    after = f"after step {pauses.longest_step:,}"
    if pauses.count == 1:
        return f"{_seconds(pauses.longest_ms)} {after}"
    return f"{_seconds(pauses.total_ms)} together, the longest {_seconds(pauses.longest_ms)} {after}"


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms >= 1000 else milliseconds(ms)


def _uneven(facts: RunFacts) -> Iterator[Suggestion]:
    if facts.without_inputs > 0.05 and not facts.is_join_worth:
        change = "Give all ranks the same number of batches"
        evidence = f"in {percent(facts.without_inputs)} of the steps a rank had no inputs left"
        yield Suggestion("uneven", change, evidence, facts.step * facts.without_inputs / facts.ranks)
    if facts.lost and PauseCause.LOST not in [each.cause for each in facts.large_pauses]:
        change = "Look at why steps were lost: a rank raised an error, ended or stopped"
        evidence = f"{percent(facts.lost)} of the steps were lost: they ended without averaged gradients"
        yield Suggestion("lost", change, evidence, 0.0)


_RULES: Sequence[Rule] = (
    _stragglers,
    _transport,
    _smaller_cap,
    _larger_cap,
    _compress,
    _more_work,
    _unused,
    _first_bucket,
    _buffers,
    _data,
    _between_steps,
    _before_optimizer,
    _loss,
    _join,
    _pauses,
    _uneven,
)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / _MIB:.0f}" if nbytes >= 2 * _MIB else f"{nbytes / _MIB:.2g}"
