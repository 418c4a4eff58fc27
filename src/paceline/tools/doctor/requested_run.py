"""The run that the user wants to start: how many ranks and hosts, the rendezvous endpoint, the script."""

from dataclasses import dataclass
from enum import Enum


class TargetKind(Enum):
    """What each rank executes."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


@dataclass(frozen=True)
class Endpoint:
    """Where hosts meet for the rendezvous.

    Attributes:
        address: a host name or an IP address.
        port: 0 for any free port.
        is_here: whether this host is the one that listens.
        is_known: whether torch detects by itself that this host is the one that listens.
        option: the option that sets another port, with ``{port}`` in its place.
    """

    address: str
    port: int
    is_here: bool
    is_known: bool = True
    option: str = "--master-port {port}"

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class RequestedRun:
    """``ranks`` ranks on each of ``hosts`` hosts; ``target`` is the script, if one was given."""

    ranks: int = 2
    hosts: int = 1
    endpoint: Endpoint | None = None
    target: str | None = None
    kind: TargetKind = TargetKind.SCRIPT

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts together."""
        return self.ranks * self.hosts
