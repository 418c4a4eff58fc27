"""What a wrapper was asked for: frozen values that validate themselves."""

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import OptionError
from paceline.torch_private import HAS_FORWARD_SYNC_BUFFERS

_MIB = 1024 * 1024
DEFAULT_CAP_MB = 25
AUDIT_MODES = ("warn", "raise", "heal", "heal-from-rank-0", "off")


@dataclass(frozen=True)
class CapOptions:
    """How large buckets may become.

    Attributes:
        cap_mb: MiB per bucket; None for the default of 25.
        caps_mb: MiB of each bucket in turn; overrides ``cap_mb``.
        first_bytes: cap of the first bucket, in bytes, when the user chose none: small, so that the first
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
        """Whether the user chose no cap."""
        return self.cap_mb is None and not self.caps_mb

    @property
    def listed(self) -> list[int]:
        """Bytes of each bucket in turn, if the user listed them."""
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
        """``sizes`` before the first backward has shown the order of gradients: one bucket, unless listed."""
        return tuple(self.listed) or (sys.maxsize,)


@dataclass(frozen=True, kw_only=True)
class WrapperOptions:
    """The arguments of ``DistributedDataParallel`` that are plain values, and what follows from them.

    Attributes that are not listed here are described at the wrapper.

    Attributes:
        caps: from ``bucket_cap_mb`` and ``bucket_cap_mb_list``.
        delayed: names of the parameters that are reduced last, from ``delay_all_reduce_named_params`` and
            ``param_to_hook_all_reduce``.
        strict: whether to raise where torch's wrapper raises, see ``strict_mode``.
        hook: what ranks compare of the argument, see ``hook_signature``.
    """

    caps: CapOptions
    delayed: Sequence[str] = ()
    dim: int = 0
    init_sync: bool = True
    broadcast_buffers: bool | None = None
    forward_sync_buffers: bool | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    mixed_precision: Any = None
    skip_all_reduce_unused_params: bool = False
    batched_grad_copy: bool = False
    lazy_bucket_allocation: bool = False
    rebuild_plan: bool = True
    strict: bool = False
    share_attributes: bool = False
    transport: Literal["auto", "c10d"] = "auto"
    audit: Literal["warn", "raise", "heal", "heal-from-rank-0", "off"] | None = None
    shards: int | None = None
    hook: str | None = None

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "c10d"):
            raise OptionError(f'transport must be "auto" or "c10d" (transport: {self.transport!r})')
        if self.audit not in (None, *AUDIT_MODES):
            raise OptionError(f"audit must be one of {AUDIT_MODES} (audit: {self.audit!r})")
        if self.check_reduction:
            _warn_deprecated("`check_reduction` is deprecated and has no effect")
        if self.broadcast_buffers is not None and HAS_FORWARD_SYNC_BUFFERS:
            ignored = self.forward_sync_buffers is not None
            _warn_deprecated(
                "`broadcast_buffers` is deprecated in favour of `forward_sync_buffers`; its value is "
                f"{'ignored, because `forward_sync_buffers` is given' if ignored else 'used'}. "
                "`forward_sync_buffers=False` still makes buffers equal at the start, "
                "`broadcast_buffers=False` does not"
            )

    def syncs_buffers_in_forward(self, *, ranks_change: bool) -> bool:
        """Whether each forward makes module buffers equal.

        Args:
            ranks_change: whether the group may have other ranks in each step. Then rank 0 may be one that has
                just come, and buffers are made equal only if the user asked for it.
        """
        if self.forward_sync_buffers is not None:
            return self.forward_sync_buffers
        return not ranks_change if self.broadcast_buffers is None else self.broadcast_buffers

    @property
    def syncs_buffers_at_start(self) -> bool:
        """Whether module buffers are made equal when the module is wrapped."""
        return self.forward_sync_buffers is not None or self.broadcast_buffers is not False

    @property
    def rebuilds_plan(self) -> bool:
        """Whether the order of gradients in the first backward decides the buckets."""
        # torch keeps its first buckets when it looks for unused parameters, and its tests compare them.
        return self.rebuild_plan and not (self.strict and self.find_unused_parameters)

    @property
    def may_share_memory(self) -> bool:
        """Whether ranks of one host may reduce in shared memory."""
        return self.transport == "auto"

    def to_compare(self) -> list[tuple[str, str]]:
        """Name and value of each option that must be equal on all ranks."""
        return [
            ("the bucket caps", repr(self.caps.sizes)),
            ("the bucket caps of the first step", repr(self.caps.first_sizes)),
            ("default bucket caps", repr(self.caps.is_default)),
            ("rebuild_plan", repr(self.rebuild_plan)),
            ("lazy_bucket_allocation", repr(self.lazy_bucket_allocation)),
            ("delayed parameters", repr(self.delayed)),
            ("mixed precision", repr(self.mixed_precision)),
            ("the transport", repr(self.transport)),
            ("the audit", repr(self.audit)),
            ("shards", repr(self.shards)),
            ("the hook", str(self.hook)),
        ]


def hook_signature(hook: Any, hook_class: type) -> str | None:
    """What ranks compare of their argument ``hook``; raises unless it is one that there can be.

    Args:
        hook: the argument.
        hook_class: the class of hooks.
    """
    if hook is None:
        return None
    is_known = isinstance(hook, hook_class)
    if not is_known:
        raise OptionError(
            'hook must be "auto", or one of paceline.hooks, such as paceline.hooks.int8(); register torch\'s '
            f"hooks by register_comm_hook (hook: {hook!r})"
        )
    return str(hook.signature)


def strict_mode(*, asked: bool | None) -> bool:
    """Whether to raise where torch's wrapper raises: the argument, or else ``PACELINE_STRICT``."""
    return os.environ.get("PACELINE_STRICT", "0") == "1" if asked is None else asked


def _warn_deprecated(text: str) -> None:
    # Past this function, __post_init__, the dataclass's __init__ and the wrapper's: where the user wraps.
    warnings.warn(text, FutureWarning, stacklevel=5)
