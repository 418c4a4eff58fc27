"""Takes the hook that is predicted to be fastest on the links and the processors that there are.

Note [Decisions of auto]. What is measured differs from rank to rank, and every rank must run the same hook.
So ranks gather each other's numbers, and each decides by all of them, in pure code (choice.py). A decision is
taken between two steps and holds from the next step on.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import Group
from paceline.errors import OptionError
from paceline.hooks.choice import Choice, HookCost
from paceline.hooks.compressed import bf16, fp16, int4, int8, top_k, with_error_feedback
from paceline.hooks.grad_bucket import GradBucket
from paceline.hooks.hook import Hook, Reduction, average, averaged
from paceline.hooks.hook_cost import measure_cost
from paceline.hooks.power_sgd import power_sgd

# Each hook with the bound of its relative error in one step, the most precise first.
_KNOWN: Mapping[str, tuple[float, Callable[[], Hook]]] = {
    "average": (0.0, average),
    "fp16": (2**-11, lambda: with_error_feedback(fp16())),
    "bf16": (2**-8, lambda: with_error_feedback(bf16())),
    "int8": (1 / 254, int8),
    "int4": (1 / 14, int4),
    "top_k": (math.inf, top_k),
    # Plain averages in its first steps would be measured instead of it.
    "power_sgd": (math.inf, lambda: power_sgd(start_step=0)),
}
_BY_DEFAULT = ("average", "bf16")


def auto(*, max_error: float | None = None) -> "Auto":
    """Takes the hook that is predicted to make steps shortest, among those whose error is small enough.

    When it is registered, ranks measure the links between hosts and what each hook costs on their processors.
    It says in one line which hook it took, and why; ``paceline report`` says so too. If steps show that the
    links have become twice as fast or half as fast, ranks measure again. Unless you chose bucket caps, it
    also tries a cap that is predicted to be faster, and keeps it only if steps become shorter.

    Bytes: those of the hook in force, and for a measurement about a second of messages per pair of hosts at
    10 Mbit/s or more; on slower links longer, such as 5 s at 1 Mbit/s.
    Error of one step, as a part of the values (for int8 and int4, of the largest in the same 256): at most
    ``max_error``. 0 is ``average``, 2^-8 adds ``bf16`` with error feedback, 1/254 adds ``int8``, 1/14 adds
    ``int4``, and infinity adds ``top_k`` and ``power_sgd``, which have no bound. With three hosts or more
    these bounds are twice as large, because the hooks round the sum too. By default there are ``average`` and
    ``bf16``, however many hosts there are. From 2^-11 to less than 2^-8 there is ``fp16`` with error feedback
    instead of ``bf16``. It is more precise, but makes gradients beyond 65504 infinite, and those below 6e-5
    lose precision; ``bf16`` has the range of float32.
    When it changes from one hook to another, one step is averaged as it is, together with what the first hook
    has left out; of a parameter that no rank uses in this step, that is dropped. On one host, and on
    accelerators, there is nothing to choose.

    Args:
        max_error: the largest error that a hook may make in one step; by default that of ``bf16``.
    """
    return Auto(max_error)


def _check(max_error: object) -> None:
    is_number = isinstance(max_error, int | float) and not isinstance(max_error, bool)
    if max_error is not None and (not is_number or not cast("float", max_error) >= 0):
        raise OptionError(
            "max_error must be a number that is not negative: 0 for no compression, math.inf for any "
            f"(max_error: {max_error!r})"
        )


class Auto(Hook):
    """See ``auto``.

    Attributes:
        choice: the last decision; None until there is one, and where there is nothing to choose from.
        group: the ranks among which it runs; None if this rank sends nothing to other hosts.
    """

    between_hosts = True

    def __init__(self, max_error: float | None) -> None:
        _check(max_error)
        self._max_error = max_error
        self.choice: Choice | None = None
        self._hook_name = "average"
        self._hook = average()
        self._leaving: Hook | None = None
        self.group: Group | None = None

    @property
    def name(self) -> str:
        """The name of the hook in force, if there is something to choose from."""
        return "auto" if self.choice is None else f"auto: {self.choice.name}"

    @property
    def description(self) -> str:
        """The decision and its reasons."""
        return self.name if self.choice is None else f"auto: {self.choice}"

    @property
    def signature(self) -> str:
        """The error that it may make."""
        return "auto()" if self._max_error is None else f"auto(max_error={float(self._max_error)})"

    @property
    def averages_plainly(self) -> bool:
        """Whether the next step is a plain average: that was chosen, and nothing left out is to be sent."""
        is_chosen = self.choice is not None and self.choice.name == "average"
        return is_chosen and self._hook_name == "average" and self._leaving is None

    def allowed(self, members: int) -> list[str]:
        """The hooks whose error is small enough, the most precise first.

        Args:
            members: the number of ranks, or of hosts, among which a hook would run. Among more than two,
                hooks round what each sends, and the sum.
        """
        if self._max_error is None:
            return [*_BY_DEFAULT]
        times = 2 if members > 2 else 1
        names = [name for name, (bound, _) in _KNOWN.items() if times * bound <= self._max_error]
        # As many bytes as bf16, and a smaller range: see ``auto``.
        return [name for name in names if name != "fp16" or "bf16" not in names]

    def measure_costs(self, gradients: Sequence[Tensor], members: int) -> dict[str, HookCost]:
        """What each allowed hook costs on this rank, per byte of gradients of these shapes and types."""
        return {name: measure_cost(_KNOWN[name][1](), gradients, members) for name in self.allowed(members)}

    def take(self, choice: Choice | None) -> None:
        """Use the chosen hook from the next step on; every rank has made the same choice.

        Args:
            choice: the decision; None if there is nothing to choose from.
        """
        self.choice = choice

    def meet(self, group: Group) -> None:
        """The hook runs among these ranks from now on."""
        self.group = group
        self._hook.meet(group)

    def begin(self, weight: float | None) -> None:
        """A step begins: change to another hook, if one was chosen."""
        # Without a decision all ranks average, whatever each of them did before.
        wanted = "average" if self.choice is None else self.choice.name
        if wanted != self._hook_name:
            # A step that was lost has sent nothing of what an earlier hook left out.
            if self._leaving is None and self._hook_name != "average":
                self._leaving = self._hook
            self._hook_name = wanted
            self._hook = _KNOWN[self._hook_name][1]()
            if self.group is not None:
                self._hook.meet(self.group)
        for hook in filter(None, (self._leaving, self._hook)):
            hook.begin(weight)

    def reduce(self, bucket: GradBucket, group: Group) -> Reduction:
        """Run the hook in force; after a change, average with what the one before has left out."""
        if self._leaving is None:
            return (yield from self._hook.reduce(bucket, group))
        self._leaving.add_left_out(bucket)
        return (yield from averaged(bucket.buffer(), group))

    def finish(self, parameters: Sequence[Parameter], used: Sequence[int], total: float | None) -> None:
        """Keep what the hook in force has left out in this step."""
        self._leaving = None
        self._hook.finish(parameters, used, total)

    def add_left_out(self, bucket: GradBucket) -> None:
        """Add what the hook in force has left out."""
        self._hook.add_left_out(bucket)
