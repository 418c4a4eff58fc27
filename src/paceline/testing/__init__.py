"""Public helpers for tests: run a function on real ranks, from a test or a program.

For example::

    def total(rank):
        ones = torch.ones(3)
        torch.distributed.all_reduce(ones)
        return ones

    def test_total():
        assert run_ranks(total, world=2)[0].tolist() == [2, 2, 2]

``run_ranks`` starts fresh ranks for one call; a ``RankPool`` keeps its ranks for many.
"""

from paceline.errors import RankDiedError, RanksError, RemoteError
from paceline.testing.rank_pool import RankPool, run_ranks

__all__ = ["RankDiedError", "RankPool", "RanksError", "RemoteError", "run_ranks"]
