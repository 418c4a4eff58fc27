"""Public helpers for tests: run a function on real ranks, or against ranks that are a script.

For example::

    def total(rank):
        ones = torch.ones(3)
        torch.distributed.all_reduce(ones)
        return ones

    def test_total():
        assert run_ranks(total, world=2)[0].tolist() == [2, 2, 2]

``run_ranks`` starts fresh ranks for one call; a ``RankPool`` keeps its ranks for many. A ``ScriptedGroup``
needs no processes: its other ranks do what a function says.
"""

from paceline.errors import RankDiedError, RanksError, RemoteError
from paceline.testing.rank_pool import RankPool, run_ranks
from paceline.testing.scripted_group import NEVER, ScriptedCall, ScriptedGroup, ScriptedReply

__all__ = [
    "NEVER",
    "RankDiedError",
    "RankPool",
    "RanksError",
    "RemoteError",
    "ScriptedCall",
    "ScriptedGroup",
    "ScriptedReply",
    "run_ranks",
]
