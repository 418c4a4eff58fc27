"""What to change: each suggestion with the figure that supports it, and none without."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.tools.report.lateness import Late
from paceline.tools.report.parts import Part
from paceline.tools.report.words import milliseconds, size

_MIB = 1 << 20
# What part of a step is worth a change.
_WORTH = 0.08
_FEW_BUCKETS, _MANY_BUCKETS = 4, 16
_SMALL_BUCKET = _MIB // 2
_SMALLEST_CAP = _MIB // 4
# How many buckets are good: enough to send while backward goes on, too few to cost much.
_GOOD_BUCKETS = 8
_COMPRESSING = ("fp16", "bf16", "float16", "int8", "int4", "top_k", "power", "sgd", "quantiz", "compress")


@dataclass(frozen=True)
class Facts:
    """What suggestions are drawn from; times in milliseconds a step.

    Attributes:
        step: how long it is.
        parts: what of it goes where, on the average rank.
        under_way: how long some bucket is under way.
        first_ready: when in backward the first bucket is full, as a share of it.
        buckets: their bytes.
        cap: bytes that one may hold.
        ranks: how many there are.
        hosts: on how many hosts.
        transport: how gradients travel.
        device: where the module is.
        exchange: how they are averaged.
        late: who is late.
        lost: the share of steps that were given up.
        shadowed: the share in which some rank had nothing.
    """

    step: float
    parts: Mapping[Part, float]
    under_way: float
    first_ready: float
    buckets: Sequence[int]
    cap: int
    ranks: int
    hosts: int
    transport: str
    device: str
    exchange: str
    late: Sequence[Late]
    lost: float
    shadowed: float

    @property
    def exposed(self) -> float:
        """Communication that nothing hid, without waiting for late ranks."""
        return self.parts[Part.COMMUNICATION]

    @property
    def nbytes(self) -> int:
        """Of all gradients."""
        return sum(self.buckets)

    def is_worth(self, part: float) -> bool:
        """Whether a part of a step is large enough to change something."""
        return part >= _WORTH * self.step > 0

    def share(self, part: float) -> str:
        """Of a step, in words."""
        return f"{milliseconds(part)} of {milliseconds(self.step)} ({part / self.step:.0%} of a step)"


@dataclass(frozen=True)
class Suggestion:
    """What to change, why, and how many milliseconds a step it can save at most."""

    kind: str
    change: str
    figure: str
    saves_ms: float


Rule = Callable[[Facts], Iterator[Suggestion]]


def suggestions(facts: Facts) -> list[Suggestion]:
    """Those that the facts support, the most promising first."""
    found = [each for rule in _RULES for each in rule(facts)]
    return sorted(found, key=lambda each: -each.saves_ms)


def _late(facts: Facts) -> Iterator[Suggestion]:
    for late in facts.late[:3]:
        if late.until is None:
            where = {
                "": "see what else runs on its host",
                str(Part.BETWEEN): "look at its data loading",
                str(Part.OPTIMIZER): "look at what its optimizer step does that the others' does not",
            }.get(late.part or "", "look at its threads, its inputs' sizes and what else runs on its host")
            slow = f", {milliseconds(late.part_ms)} longer in {late.part}" if late.part else ""
            figure = (
                f"it comes {milliseconds(late.late_ms)} after the others, since step {late.since:,}{slow}"
            )
            yield Suggestion("late", f"Rank {late.rank} is late: {where}", figure, late.late_ms)


def _transport(facts: Facts) -> Iterator[Suggestion]:
    one_host = facts.hosts == 1 and facts.ranks > 1 and facts.device.startswith("cpu")
    if one_host and facts.transport == "c10d" and facts.is_worth(facts.under_way):
        under_way = facts.share(facts.under_way)
        figure = f"all {facts.ranks} ranks are on one host, and gradients are under way for {under_way}"
        change = (
            'transport="auto": ranks of one host average in its memory; if it is set, a warning says why not'
        )
        yield Suggestion("transport", change, figure, facts.exposed)


def _smaller_cap(facts: Facts) -> Iterator[Suggestion]:
    cap = max(_SMALLEST_CAP, facts.nbytes // _GOOD_BUCKETS)
    few = 0 < len(facts.buckets) <= _FEW_BUCKETS and max(facts.buckets) > 2 * cap
    if facts.ranks > 1 and few and cap < facts.cap and facts.is_worth(facts.exposed):
        figure = (
            f"after backward, communication goes on for {facts.share(facts.exposed)}; the largest "
            f"bucket has {size(max(facts.buckets))} of {size(facts.nbytes)}"
        )
        change = f"bucket_cap_mb={_megabytes(cap)}: smaller buckets leave earlier, while backward goes on"
        yield Suggestion("smaller cap", change, figure, min(facts.exposed, facts.parts[Part.BACKWARD]))


def _larger_cap(facts: Facts) -> Iterator[Suggestion]:
    cap = max(_MIB, facts.nbytes // _GOOD_BUCKETS)
    many = len(facts.buckets) >= _MANY_BUCKETS and facts.nbytes / len(facts.buckets) < _SMALL_BUCKET
    if many and cap > facts.cap and facts.is_worth(facts.under_way) and facts.is_worth(facts.exposed):
        each = facts.under_way / len(facts.buckets)
        figure = (
            f"{len(facts.buckets)} buckets of {size(facts.nbytes / len(facts.buckets))} on average take "
            f"{milliseconds(each)} each, and {facts.share(facts.exposed)} is communication after backward"
        )
        change = f"bucket_cap_mb={_megabytes(cap)}: fewer and larger buckets cost less to send"
        yield Suggestion("larger cap", change, figure, facts.exposed)


def _compress(facts: Facts) -> Iterator[Suggestion]:
    compressed = any(name in facts.exchange.lower() for name in _COMPRESSING)
    by_bytes = bool(facts.buckets) and facts.nbytes / len(facts.buckets) >= _SMALL_BUCKET
    if facts.hosts > 1 and not compressed and by_bytes and facts.under_way and facts.is_worth(facts.exposed):
        rate = facts.nbytes * 8 / (facts.under_way * 1e6)
        figure = (
            f"{facts.share(facts.exposed)} is communication between {facts.hosts} hosts after backward; "
            f"{size(facts.nbytes)} of gradients in {milliseconds(facts.under_way)} is {rate:.2g} Gbit/s"
        )
        change = (
            "ddp.register_comm_hook(None, paceline.hooks.int8()): a quarter of the bytes; or bf16(): half"
        )
        yield Suggestion("hook", change, figure, facts.exposed / 2)


def _more_work(facts: Facts) -> Iterator[Suggestion]:
    backward = facts.parts[Part.BACKWARD]
    if (
        facts.ranks > 1
        and facts.is_worth(facts.exposed)
        and facts.under_way - facts.parts[Part.WAITING] > backward
    ):
        figure = (
            f"buckets are under way for {milliseconds(facts.under_way)}, longer than backward takes "
            f"({milliseconds(backward)}): it cannot hide them, and {facts.share(facts.exposed)} is exposed"
        )
        change = "Larger batches, or several backwards in ddp.no_sync() for one that is averaged"
        yield Suggestion("more work", change, figure, facts.exposed / 2)


def _first_bucket(facts: Facts) -> Iterator[Suggestion]:
    if len(facts.buckets) > 1 and facts.first_ready > 0.6 and facts.is_worth(facts.exposed):
        figure = (
            f"the first bucket, of {size(facts.buckets[0])}, is full after {facts.first_ready:.0%} of "
            f"backward; then {facts.share(facts.exposed)} of communication is left when backward ends"
        )
        change = "bucket_cap_mb_list with a small first cap: let the first bucket leave sooner"
        yield Suggestion("first bucket", change, figure, facts.exposed)


def _buffers(facts: Facts) -> Iterator[Suggestion]:
    spent = facts.parts[Part.BUFFERS]
    if facts.is_worth(spent):
        change = (
            "forward_sync_buffers=False, if ranks may have their own; or leave buffers unchanged: those that "
            "no rank changes for three steps are not sent"
        )
        figure = f"module buffers are made equal in every forward, in {facts.share(spent)}"
        yield Suggestion("buffers", change, figure, spent)


def _data(facts: Facts) -> Iterator[Suggestion]:
    spent = facts.parts[Part.BETWEEN]
    if spent > 0.25 * facts.step > 0:
        change = "Load data ahead: more workers, pinned or cached batches; evaluate and log less often"
        figure = f"between the optimizer and the next forward goes {facts.share(spent)}"
        yield Suggestion("data", change, figure, spent)


def _uneven(facts: Facts) -> Iterator[Suggestion]:
    if facts.shadowed > 0.05:
        change = "Give ranks the same number of batches"
        figure = f"in {facts.shadowed:.0%} of the steps some rank had no inputs left"
        yield Suggestion("uneven", change, figure, facts.step * facts.shadowed / facts.ranks)
    if facts.lost:
        change = "See what the ranks raised"
        yield Suggestion("lost", change, f"{facts.lost:.1%} of the steps were given up", 0.0)


_RULES: Sequence[Rule] = (
    _late,
    _transport,
    _smaller_cap,
    _larger_cap,
    _compress,
    _more_work,
    _first_bucket,
    _buffers,
    _data,
    _uneven,
)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / _MIB:.0f}" if nbytes >= 2 * _MIB else f"{nbytes / _MIB:.2g}"
