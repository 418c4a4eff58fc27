"""What a wrapper is asked to do: frozen values that check themselves."""

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import OptionError

_MIB = 1024 * 1024
DEFAULT_CAP_MB = 25


@dataclass(frozen=True)
class CapOptions:
    """How large buckets may become.

    Attributes:
        cap_mb: MiB a bucket; None for the default of 25.
        caps_mb: MiB of each bucket in turn, instead.
        first_bytes: what the first bucket may hold when nothing was chosen: small, so that the first
            reduction starts early.
    """

    cap_mb: float | None
    caps_mb: Sequence[float] | None
    first_bytes: int

    def __post_init__(self) -> None:
        for cap in (self.cap_mb, *(self.caps_mb or ())):
            if cap is not None and not cap >= 0:
                raise OptionError(f"a bucket cap must not be negative (bucket_cap_mb: {cap})")

    @property
    def is_default(self) -> bool:
        """Whether the user left the choice to us."""
        return self.cap_mb is None and not self.caps_mb

    @property
    def listed(self) -> list[int]:
        """Bytes of each bucket in turn, if they were listed."""
        return [int(cap * _MIB) for cap in self.caps_mb or ()]

    @property
    def cap(self) -> int:
        """Bytes of the largest bucket."""
        return (
            max(self.listed)
            if self.listed
            else int((DEFAULT_CAP_MB if self.cap_mb is None else self.cap_mb) * _MIB)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the first bucket, of the second, and so on."""
        if self.listed:
            return tuple(self.listed)
        return (self.first_bytes, self.cap) if self.is_default else (self.cap,)

    @property
    def first_sizes(self) -> tuple[int, ...]:
        """The same while the order of arrival is not known: all in one, unless listed."""
        return tuple(self.listed) or (sys.maxsize,)


@dataclass(frozen=True)
class Transport:
    """How gradients travel: "auto" or "c10d"."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in ("auto", "c10d"):
            raise OptionError(f'transport must be "auto" or "c10d" (transport: {self.name!r})')

    @property
    def may_share(self) -> bool:
        """Whether shared memory may be used."""
        return self.name == "auto"


def strict_mode(*, asked: bool | None) -> bool:
    """Whether to raise where torch's wrapper raises: as asked, else as the environment says."""
    return os.environ.get("PACELINE_STRICT", "0") == "1" if asked is None else asked


def buffer_options(*, broadcast: bool | None, forward_sync: bool | None) -> tuple[bool, bool]:
    """Whether buffers are synced before each forward, and whether they are at the start."""
    if broadcast is not None:
        ignored = (
            "is ignored, because `forward_sync_buffers` is given" if forward_sync is not None else "is kept"
        )
        warnings.warn(
            f"`broadcast_buffers` is deprecated in favour of `forward_sync_buffers`; its value {ignored}. "
            "`forward_sync_buffers=False` still makes buffers equal at the start, "
            "`broadcast_buffers=False` does not",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync is not None:
        return forward_sync, True
    return broadcast is not False, broadcast is not False
