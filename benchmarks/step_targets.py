"""What benchmarks/ddp.py has measured, compared with torch's wrapper, with the floor and with targets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from targets import Row

from paceline.tools.bench.measure import Size, Timing, ratio, timing
from paceline.tools.bench.models import MODELS, TINY_PARAMETERS
from paceline.tools.bench.sides import ALONE, FLOOR, HOST, PLAIN, STEP_SIDES, TORCH, Side
from paceline.tools.bench.step_times import StepTimes

WORLD = 2
# paceline's step, divided by torch's: on two ranks, and with more ranks or busy cores.
STEP_TARGET, CROWDED_STEP_TARGET = 1.0, 0.9
# What paceline adds to a step, divided by what torch adds on gloo.
ADDED_TARGETS = {"tiny-layers": 0.2, "parameters-5000": 0.25, "transformer": 0.35, "mlp": 0.4, "conv": 0.3}
# The same for CPU time, of each model.
CPU_ADDED_TARGET = 0.4
# What paceline adds to a step, divided by what the floor adds.
FLOOR_TARGET = 1.3
# The step of a HostOptimizer divided by that of the module alone, on two ranks, by model. Of others: its step
# divided by that of paceline's wrapper with a plain optimizer.
HOST_ALONE_TARGETS = {"mlp": 0.9}
HOST_TARGET = 1.0
# paceline's peak memory, divided by that of torch with views.
MEMORY_TARGET = 1.0
# What paceline adds per parameter, in microseconds.
PARAMETER_TARGET = 1.5
# How many seconds paceline may take to wrap so many parameters.
BUILD_TARGET, BUILD_PARAMETERS = 3.0, 100_000
WAITING = "waiting for the slower rank"


@dataclass(frozen=True)
class Conditions:
    """How many ranks there are, how many processes keep the cores busy, and which optimizer steps."""

    world: int = WORLD
    busy: int = 0
    optimizer: str = "sgd"

    def __str__(self) -> str:
        ranks = f"{self.world} ranks with one thread each"
        busy = f", beside {self.busy} busy processes" if self.busy else ""
        return f"{ranks}{busy}{'' if self.optimizer == 'sgd' else f', with {self.optimizer}'}"

    @property
    def are_crowded(self) -> bool:
        """Whether there are more ranks than usual, or busy cores."""
        return (self.world, self.busy) != (WORLD, 0)

    @property
    def figures_name(self) -> str:
        """The name under which figures are kept."""
        optimizer = "" if self.optimizer == "sgd" else f"_{self.optimizer}"
        world = f"_world_{self.world}" if self.world != WORLD else ""
        return f"ddp{optimizer}{world}{f'_busy_{self.busy}' if self.busy else ''}"

    def case(self, name: str, quantity: str) -> dict[str, str | int]:
        """What was measured, for programs."""
        about: dict[str, str | int] = {"quantity": quantity, "model": name, "label": MODELS[name].what}
        return about | {"world": self.world, "busy": self.busy, "optimizer": self.optimizer}


def comparisons(sides: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Each side with each of torch's on gloo, or with the module alone if there is none of those."""
    bases = [side for side in sides if side.is_baseline]
    others = [side for side in sides if not side.is_baseline]
    return [(side, base) for side in others or bases for base in (bases if others and bases else [ALONE])]


def added_comparisons(sides: Sequence[Side]) -> list[tuple[Side, Side]]:
    """Each side with each of torch's on gloo, and each of paceline's with the floor."""
    with_torch = [(side, base) for side, base in comparisons(sides) if base.is_baseline]
    floors = [side for side in sides if side == FLOOR]
    return with_torch + [(side, floor) for side in sides if side.wrapper == "paceline" for floor in floors]


def is_judged(side: Side) -> bool:
    """Whether what a side adds has targets: paceline's wrapper in shared memory."""
    return (side.wrapper, side.through) == ("paceline", None)


def step_rows(name: str, times: StepTimes, sides: Sequence[Side], conditions: Conditions) -> list[Row]:
    """Whole steps and their CPU time, and what synchronisation adds to both."""
    model, crowded = MODELS[name].what, conditions.are_crowded
    added = {str(side): times.added(side) for side in sides} | {WAITING: times.waiting}
    cpu_added = {str(side): times.cpu_added(side) for side in sides}
    return [
        *whole_rows(
            f"step of {model}",
            times.of,
            sides,
            conditions.case(name, "step"),
            target=CROWDED_STEP_TARGET if crowded else STEP_TARGET,
        ),
        *added_rows(
            f"what synchronisation adds to a step of {model}",
            added,
            sides,
            conditions.case(name, "added"),
            target=None if crowded else ADDED_TARGETS.get(name),
            floor_target=None if crowded else FLOOR_TARGET,
        ),
        *whole_rows(f"CPU time of a step of {model}", times.cpu, sides, conditions.case(name, "cpu")),
        *added_rows(
            f"CPU time that synchronisation adds to a step of {model}",
            cpu_added,
            sides,
            conditions.case(name, "cpu added"),
            target=None if crowded else CPU_ADDED_TARGET,
        ),
    ]


def optimizer_rows(name: str, times: StepTimes, sides: Sequence[Side], conditions: Conditions) -> list[Row]:
    """Whole steps with AdamW and their CPU time, by who steps which parameters."""
    measured = {"step": times.of, "cpu": times.cpu}
    titles = {"step": "step", "cpu": "CPU time of a step"}
    rows = []
    for quantity, seconds in measured.items():
        what = f"{titles[quantity]} of {MODELS[name].what} with AdamW"
        timings = {side: timing(of) for side, of in seconds.items()}
        for side, base in optimizer_comparisons(sides):
            value, spread = ratio(seconds[str(side)], seconds[str(base)])
            target = optimizer_target(name, side, base, conditions) if quantity == "step" else None
            case = conditions.case(name, quantity)
            rows.append(Row(what, timings, f"{side} / {base}", value, target, spread=spread, case=case))
    return rows


def optimizer_comparisons(sides: Sequence[Side]) -> list[tuple[Side, Side]]:
    """The HostOptimizer with all others, and these with torch's wrapper that has a plain optimizer."""
    ours = [(HOST, base) for base in (*sides, ALONE) if base != HOST] if HOST in sides else []
    others = [side for side in sides if side not in (HOST, TORCH)]
    return ours + [(side, TORCH) for side in others if TORCH in sides]


def optimizer_target(name: str, side: Side, base: Side, conditions: Conditions) -> float | None:
    if side == HOST and base == ALONE and not conditions.are_crowded:
        return HOST_ALONE_TARGETS.get(name)
    if side == HOST and base == PLAIN and name not in HOST_ALONE_TARGETS:
        return HOST_TARGET
    return None


def whole_rows(
    what: str,
    seconds: Mapping[str, Sequence[float]],
    sides: Sequence[Side],
    case: Mapping[str, str | int],
    *,
    target: float | None = None,
) -> list[Row]:
    timings = {side: timing(of) for side, of in seconds.items()}
    rows = []
    for side, base in comparisons(sides):
        value, spread = ratio(seconds[str(side)], seconds[str(base)])
        own = target if side.wrapper == "paceline" and base.is_baseline else None
        rows.append(Row(what, timings, f"{side} / {base}", value, own, spread=spread, case=case))
    return rows


def added_rows(
    what: str,
    added: Mapping[str, Sequence[float]],
    sides: Sequence[Side],
    case: Mapping[str, str | int],
    *,
    target: float | None,
    floor_target: float | None = None,
) -> list[Row]:
    timings = {name: timing(values) for name, values in added.items()}
    rows = []
    for side, base in added_comparisons(sides):
        value, spread = added_ratio(timings[str(side)], timings[str(base)])
        own = (floor_target if base == FLOOR else target) if is_judged(side) else None
        rows.append(Row(what, timings, f"{side} / {base}", value, own, spread=spread, case=case))
    return rows


def added_ratio(ours: Timing, theirs: Timing) -> tuple[float, tuple[float, float] | None]:
    """The ratio of the medians, and our quartiles divided by their median; NaN if theirs is noise."""
    base = theirs.median
    if base <= 0:
        return math.nan, None
    return ours.median / base, (ours.low / base, ours.high / base)


def parameter_rows(
    measured: Mapping[str, StepTimes], sides: Sequence[Side], conditions: Conditions
) -> list[Row]:
    """What each side adds per parameter, at each number of parameters."""
    rows = []
    for side in sides:
        counts = {TINY_PARAMETERS[name]: of for name, of in measured.items() if str(side) in of.of}
        added = {count: timing(of.added(side, parts=count)) for count, of in counts.items()}
        rows += per_parameter(f"what {side} adds per parameter", added, side, conditions)
        cpu = {
            count: timing(of.cpu_added(side, parts=count * conditions.world)) for count, of in counts.items()
        }
        rows += per_parameter(f"CPU time that {side} adds per parameter and rank", cpu, side, conditions)
    return rows


def per_parameter(what: str, by_count: Mapping[int, Timing], side: Side, conditions: Conditions) -> list[Row]:
    timings = {f"of {count:,}": each for count, each in by_count.items()}
    target = PARAMETER_TARGET if is_judged(side) and not conditions.are_crowded else None
    return [
        Row(
            what,
            timings,
            f"us, of {count:,}",
            1e6 * each.median,
            target,
            spread=(1e6 * each.low, 1e6 * each.high),
            case={"quantity": "added per parameter", "side": str(side)},
        )
        for count, each in by_count.items()
    ]


def build_rows(name: str, seconds: Mapping[Side, Timing], conditions: Conditions) -> list[Row]:
    """How long it takes to wrap a model."""
    timings = {str(side): each for side, each in seconds.items()}
    target = (
        BUILD_TARGET if TINY_PARAMETERS[name] == BUILD_PARAMETERS and not conditions.are_crowded else None
    )
    return [
        Row(
            f"wrapping {MODELS[name].what}",
            timings,
            f"{side}, s",
            each.median,
            target if is_judged(side) else None,
            spread=(each.low, each.high),
            case=conditions.case(name, "build"),
        )
        for side, each in seconds.items()
    ]


def memory_rows(name: str, peaks: Mapping[Side, Size], conditions: Conditions) -> list[Row]:
    """The peak of what all ranks hold together."""
    what, shown = f"peak memory of {MODELS[name].what}", {str(side): held for side, held in peaks.items()}
    rows = []
    for side, base in comparisons([side for side in peaks if side != ALONE]):
        target = MEMORY_TARGET if side.wrapper == "paceline" and base == STEP_SIDES["torch-views"] else None
        value, case = peaks[side].median / peaks[base].median, conditions.case(name, "memory")
        rows.append(Row(what, shown, f"{side} / {base}", value, target, case=case))
    return rows
