"""Functions run on ranks: once on fresh ranks, or many times on kept ones."""

from collections.abc import Callable
from enum import Enum, auto
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from paceline.testing import forkserver
from paceline.testing.ranks import Ranks, deadline_in
from paceline.testing.remote import Call

T = TypeVar("T")


def run_ranks(
    fn: Callable[..., T],
    world: int = 2,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 60.0,
    backend: str | None = "gloo",
) -> list[T]:
    """Call ``fn(rank, *args)`` on ``world`` fresh ranks, and return what each returned, in rank order.

    Each rank is a process of its own, with a process group open and one torch thread.

    Args:
        fn: A function at the top level of a module, or of a program guarded by ``if __name__ == "__main__"``.
        world: How many ranks.
        args: What ``fn`` gets after its rank; pickled by value, as is what it returns.
        timeout: After so many seconds every rank's stacks are collected and the ranks are killed.
        backend: The process group's backend; None for no process group.

    Raises:
        RanksError: A rank raised, died, or did not finish in time.
    """
    with RankPool(world, timeout=timeout, backend=backend) as pool:
        return pool.run(fn, *args)


class PoolState(Enum):
    """Whether a pool takes calls."""

    OPEN = auto()
    CLOSED = auto()


class RankPool:
    """Ranks that are kept, with their process group, from one call to the next.

    They are started at the first call. A call that fails costs the pool its ranks, which may be out of
    step with each other by then; the next call starts new ones. The arguments are those of ``run_ranks``.
    """

    def __init__(self, world: int = 2, *, timeout: float = 60.0, backend: str | None = "gloo") -> None:
        if world < 1:
            raise ValueError(f"world must be positive (world: {world})")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive (timeout: {timeout})")
        self._world = world
        self._timeout = timeout
        self._backend = backend
        self._state = PoolState.OPEN
        self._ranks: Ranks | None = None

    def run(self, fn: Callable[..., T], *args: Any) -> list[T]:
        """Call ``fn(rank, *args)`` on every rank, and return what each returned, in rank order."""
        if self._state is PoolState.CLOSED:
            raise RuntimeError("the pool is closed: open a new one")
        call = Call.of(fn, args)
        # Its start is not on the call's time: torch's import can take long on a cold machine.
        server = forkserver.current()
        deadline = deadline_in(self._timeout)
        # The ranks are put back only if the call succeeds.
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            ranks = Ranks(self._world, backend=self._backend, server=server, deadline=deadline)
        results = ranks.call(call, deadline)
        self._ranks = ranks
        return cast("list[T]", results)

    def close(self) -> None:
        """End the ranks; a second time does nothing."""
        self._state = PoolState.CLOSED
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
