"""Which run a host is looked at for."""

from dataclasses import dataclass
from enum import Enum


class Target(Enum):
    """What ranks would run."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


@dataclass(frozen=True)
class Endpoint:
    """Where hosts meet.

    Attributes:
        address: a name or an address.
        port: 0 for any that is free.
        is_here: whether this host is the one that listens.
        is_known: whether torch finds out by itself that it is.
        option: how another port is given, with ``{port}`` in its place.
    """

    address: str
    port: int
    is_here: bool
    is_known: bool = True
    option: str = "--master-port {port}"

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Asked:
    """The run that is asked for: so many ranks on each of so many hosts, that meet somewhere."""

    ranks: int = 2
    hosts: int = 1
    endpoint: Endpoint | None = None
    target: str | None = None
    kind: Target = Target.SCRIPT

    @property
    def world(self) -> int:
        """How many ranks there are in all."""
        return self.ranks * self.hosts
