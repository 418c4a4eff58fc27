"""Describes the cluster that a plan is for: hosts, ranks, the link of each host, hooks (pure)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import OptionError

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
# From exact to coarse: the order in which a plan prefers them where they are about equally fast.
HOOKS = ("none", "fp16", "bf16", "int8", "int4", "power_sgd", "outer")
# TCP over Ethernet: of each frame of 1514 bytes, 1448 are data.
_DATA_PER_FRAME = 1448 / 1514
# Beyond these, numbers are mistakes, and what is simulated takes too long or becomes infinite.
_MOST_HOSTS, _MOST_RANKS, _MOST_CORES = 10_000, 1_000, 10_000
_MOST_BITS, _MOST_SECONDS = 1e18, 3600.0


@dataclass(frozen=True)
class Cluster:
    """What a plan is for.

    Args:
        hosts: the numbers of hosts to predict for, in ascending order.
        ranks_per_host: the number of ranks on each host.
        link: bits per second that each host can send, and receive at the same time.
        latency: seconds that a message takes from one host to another, beside those for its bytes.
        cores_per_host: the cores that the ranks of a host share; None if each rank has its own.
    """

    hosts: Sequence[int]
    ranks_per_host: int
    link: float
    latency: float
    cores_per_host: int | None = None

    def __post_init__(self) -> None:
        given = ",".join(map(str, self.hosts))
        if not self.hosts or min(self.hosts) < 1:
            raise OptionError(f"a cluster has one host or more (hosts: {given})")
        if max(self.hosts) > _MOST_HOSTS:
            raise OptionError(f"a plan is for {_MOST_HOSTS:,} hosts at most (hosts: {given})")
        if self.ranks_per_host < 1:
            raise OptionError(f"a host has one rank or more (ranks per host: {self.ranks_per_host})")
        if self.ranks_per_host > _MOST_RANKS:
            raise OptionError(
                f"a host has {_MOST_RANKS:,} ranks at most (ranks per host: {self.ranks_per_host})"
            )
        if self.cores_per_host is not None and self.cores_per_host < 1:
            raise OptionError(f"a host has one core or more (cores per host: {self.cores_per_host})")
        if self.cores_per_host is not None and self.cores_per_host > _MOST_CORES:
            raise OptionError(
                f"a host has {_MOST_CORES:,} cores at most (cores per host: {self.cores_per_host})"
            )
        if not 1 <= self.link <= _MOST_BITS:
            raise OptionError(f"a link has a rate of 1 bit/s to 1,000,000 Tbit/s (link: {self.link:g} bit/s)")
        if not 0 <= self.latency <= _MOST_SECONDS:
            raise OptionError(f"a latency is an hour at most (latency: {self.latency:g} s)")

    @property
    def ranks_per_core(self) -> float:
        """How many ranks share a core; 1 if each has its own."""
        return max(1.0, self.ranks_per_host / (self.cores_per_host or self.ranks_per_host))

    @property
    def bytes_per_second(self) -> float:
        """What the link carries of the ranks' own data."""
        return self.link / 8 * _DATA_PER_FRAME


def parse_hosts(text: str) -> tuple[int, ...]:
    """Numbers of hosts, such as ``2,8,64``, in ascending order."""
    try:
        return tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError:
        raise OptionError(
            f"hosts must be whole numbers with commas between them, such as 2,8,64 (hosts: {text})"
        ) from None


def parse_count(what: str, text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{what} must be a whole number ({what}: {text})") from None


def parse_hooks(text: str) -> tuple[str, ...]:
    """Names of hooks, such as ``none,int8``, from exact to coarse."""
    given = [each.strip() for each in text.split(",")]
    unknown = [each for each in given if each not in HOOKS]
    if unknown:
        raise OptionError(f"a plan does not know this hook (hook: {unknown[0]}; known: {', '.join(HOOKS)})")
    return tuple(each for each in HOOKS if each in given)


def parse_link(text: str) -> float:
    """Bits per second, from text such as ``10Gbit``."""
    return _parse("link", text, _RATES, "bit, kbit, Mbit, Gbit, Tbit", "10Gbit")


def parse_latency(text: str) -> float:
    """Seconds, from text such as ``50us``."""
    return _parse("latency", text, _TIMES, "ns, us, ms, s", "50us")


def _parse(what: str, text: str, units: Mapping[str, float], known: str, example: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = "" if match is None else match[2].lower()
    if match is None or unit not in units:
        raise OptionError(
            f"a {what} must be a number with a unit, such as {example} ({what}: {text}; units: {known})"
        )
    return float(match[1]) * units[unit]
