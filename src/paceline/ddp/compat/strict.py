"""Strict mode: raises where torch's reducer raises, for code that must run there too.

paceline needs none of these limits. They are kept so that PyTorch's own tests of them hold, which is why the
messages have the words that those look for.
"""

import os
from collections.abc import Sequence

from paceline.ddp.buckets.plan import Slot
from paceline.errors import StrictError

_UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. "
    "This error indicates that "
)
_UNUSED = (
    "your module has parameters that were not used in producing loss. Outside strict mode that is no error; "
    "torch wants to be told by passing the keyword argument `find_unused_parameters=True`, and that all "
    "`forward` function outputs participate in calculating loss. "
)
_CHANGED = (
    "your training graph has changed in this iteration, e.g., one parameter is used in first iteration, "
    "but then got unused in the second iteration. this is not compatible with static_graph set to True.\n"
)
_DEBUG = "To see their names, set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL. "


class Strict:
    """What torch's reducer insists on.

    Args:
        slots: every slot.
        trainable: those that a backward must reach, by index.
        rank: this rank.
        finds_unused: whether ``find_unused_parameters`` was given.
        skips_unused: whether ``skip_all_reduce_unused_params`` was given.

    Attributes:
        static: whether the graph was said never to change.
        error: the last refusal in words.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        trainable: Sequence[int],
        *,
        rank: int,
        finds_unused: bool,
        skips_unused: bool,
    ) -> None:
        self._slots = slots
        self._trainable = trainable
        self._rank = rank
        self._finds_unused = finds_unused
        self.skip_unused = skips_unused
        self.static = False
        self.error: str | None = None
        self._fired: dict[int, int] = {}
        self._first: dict[int, int] | None = None

    def mark(self, slot: int) -> None:
        """A gradient arrived."""
        count = self._fired[slot] = self._fired.get(slot, 0) + 1
        where = f"(parameter {slot}: {self._slots[slot].name!r}, rank {self._rank})"
        if not self.static:
            if count > 1:
                raise self._refusal(f"Expected to mark a variable ready only once. {where}")
        elif self._first is not None and count > self._first.get(slot, 0):
            raise self._refusal(f"Your training graph has changed in this iteration {where}")

    def begin(self) -> None:
        """A new iteration begins: the one before must have been whole."""
        fired, self._fired = self._fired, {}
        if not fired:
            return
        if self.static:
            self._first = self._first or fired
            if missing := [slot for slot in self._first if slot not in fired]:
                raise self._refusal(f"{_UNFINISHED}{_CHANGED}{self._name(missing)}")
        elif not self._finds_unused and (missing := [slot for slot in self._trainable if slot not in fired]):
            raise self._refusal(f"{_UNFINISHED}{_UNUSED}{self._name(missing)}")

    def _refusal(self, message: str) -> StrictError:
        self.error = f"StrictError: {message}"
        return StrictError(message)

    def _name(self, missing: list[int]) -> str:
        shown = " ".join(map(str, missing))
        indices = f"Parameter indices which did not receive grad for rank {self._rank}: {shown}"
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "OFF":
            return f"{indices}\n{_DEBUG}"
        names = ", ".join(self._slots[slot].name for slot in missing)
        return f"Parameters which did not receive grad for rank {self._rank}: {names}\n{indices}"
