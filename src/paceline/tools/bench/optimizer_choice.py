"""Which optimizer to take for a model: by the time of a step, and by the memory of all ranks together."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.tools.bench.sides import PLAIN, Side

# Steps that are slower than the fastest by no more than this factor count as equally fast.
EQUALLY_FAST = 1.05


@dataclass(frozen=True)
class OptimizerChoice:
    """The side to take, and why."""

    side: Side
    why: str

    def __str__(self) -> str:
        return f"take {_name(self.side)}: {self.why}"


def choose_optimizer(seconds: Mapping[Side, float], memory: Mapping[Side, float]) -> OptimizerChoice:
    """The side that needs the least memory of those with the fastest steps.

    Args:
        seconds: the time of a step, of the plain optimizer and of those that did not refuse the model.
        memory: the memory of each of them.
    """
    fast = [side for side in seconds if seconds[side] <= EQUALLY_FAST * min(seconds.values())]
    taken = min(fast, key=lambda side: memory[side])

    def ratios(side: Side) -> tuple[str, str]:
        return f"{seconds[side] / seconds[PLAIN]:.2f}", f"{memory[side] / memory[PLAIN]:.2f}"

    if taken != PLAIN:
        step, held = ratios(taken)
        return OptimizerChoice(taken, f"{step} of the plain wrapper's step, {held} of its memory")
    others = [
        "{} takes {} of its step, {} of its memory".format(_name(side), *ratios(side))
        for side in seconds
        if side != PLAIN
    ]
    return OptimizerChoice(PLAIN, "; ".join(others) or "no other takes the model")


def _name(side: Side) -> str:
    return side.optimizer or "the plain optimizer"
