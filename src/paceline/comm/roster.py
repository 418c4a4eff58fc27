"""Who trains in a run whose ranks may be replaced: rosters, and the keys under which the store has them.

Note [Generations]. ``paceline run --heal`` starts *members*: one process per rank, each with a name of its
own. A roster lists the members in the order of their ranks. When a member is lost, the launcher writes the
next roster, and this is the next generation. In each generation the members that are in the roster meet, open
a new process group, and go on from the state of the one that has come furthest.

The roster is one value in the store of the run. Whoever writes it compares it with the one that he has read.
So either the members end the run, or the launcher begins another generation, and never both.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ROSTER_KEY = "paceline/heal/roster"
# The member that a process is. Its presence says that the run is healed.
MEMBER_VARIABLE = "PACELINE_MEMBER"
# After how many seconds a rank that others wait for counts as lost.
LOST_AFTER_VARIABLE = "PACELINE_LOST_AFTER"


@dataclass(frozen=True)
class LostRank:
    """A rank that was lost, and why, such as SIGKILL."""

    rank: int
    why: str


@dataclass(frozen=True)
class Roster:
    """The members of one generation.

    Attributes:
        generation: counts from 0.
        members: their names, in the order of their ranks.
        lost: the ranks that are not here any more, since the last generation in which members have trained.
        at: when the first of them was missed, in seconds since the epoch.
        is_over: whether the members have ended the training.
    """

    generation: int
    members: tuple[str, ...]
    lost: tuple[LostRank, ...] = ()
    at: float = 0.0
    is_over: bool = False

    def to_json(self) -> str:
        """The same text for the same roster."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Roster":
        """What ``to_json`` has written."""
        fields: Mapping[str, Any] = json.loads(text)
        return cls(
            generation=fields["generation"],
            members=tuple(fields["members"]),
            lost=tuple(LostRank(**each) for each in fields["lost"]),
            at=fields["at"],
            is_over=fields["is_over"],
        )


def here_key(generation: int, member: str) -> str:
    """Set when a member has come to meet the others of a generation."""
    return f"paceline/heal/{generation}/here/{member}"


def done_key(generation: int, member: str) -> str:
    """Set when a member has done all steps."""
    return f"paceline/heal/{generation}/done/{member}"


def again_key(generation: int) -> str:
    """Set when the members of a generation could not open their group, though nobody need be lost."""
    return f"paceline/heal/{generation}/again"


def opened_key(generation: int) -> str:
    """Set when the members of a generation have gone on together."""
    return f"paceline/heal/{generation}/opened"


def stepped_key(member: str) -> str:
    """Set when a member has done its first step."""
    return f"paceline/heal/stepped/{member}"


def host_key(host: int) -> str:
    """What the launcher of a host says of its members."""
    return f"paceline/heal/host/{host}"


FAILED_KEY = "paceline/heal/failed"  # set when a rank has raised, with words: the run ends on all hosts


def stalled_key(member: str) -> str:
    """Set when another host's ranks have waited for this member for too long."""
    return f"paceline/heal/stalled/{member}"


def first_member(environment: Mapping[str, str]) -> str:
    """The name of the first process of a rank: its host, its place there, and a number."""
    return f"{environment['GROUP_RANK']}.{environment['LOCAL_RANK']}.0"
