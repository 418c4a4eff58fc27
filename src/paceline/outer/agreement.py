"""What all hosts of an outer loop must have in common, and what its ranks begin with."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.errors import MismatchError
from paceline.outer.fragment import FlatParameters

_FROZEN_SAMPLES = 1024


def digest_of_shapes(parts: Sequence[Sequence[Tensor]]) -> str:
    """A fingerprint of the shapes and types of parameters."""
    kinds = [[(tuple(each.shape), str(each.dtype)) for each in part] for part in parts]
    return hashlib.sha256(repr(kinds).encode()).hexdigest()[:16]


def digest_of_values(parts: Sequence[Sequence[Tensor]]) -> str:
    """A fingerprint of the values of parameters."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(FlatParameters(part).read().numpy().tobytes())
    return digest.hexdigest()[:16]


def digest_of_frozen(module: nn.Module, ignored: Sequence[str]) -> str:
    """A fingerprint of what is not exchanged: of some values of each frozen parameter."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and name not in ignored and parameter.numel():
            flat = FlatParameters([parameter]).read()
            digest.update(flat[:: -(-len(flat) // _FROZEN_SAMPLES)].numpy().tobytes())
    return digest.hexdigest()[:16]


def new_token(fingerprint: str) -> str:
    """What only hosts of one new loop have; it tells the loop's settings too."""
    return f"{fingerprint}, loop {secrets.token_hex(16)}"


def is_of_equal_loop(token: object, fingerprint: str) -> bool:
    """Whether a token is of a loop with these settings, this one or another."""
    return isinstance(token, str) and token.rpartition(", loop ")[0] == fingerprint


def check_equal(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise if ranks have different loops, or begin with different parameters."""
    for what in ("settings", "values"):
        for rank, theirs in enumerate(everyone):
            if theirs[what] != everyone[0][what]:
                raise MismatchError(
                    f"ranks have different outer loops: their {what} differ "
                    f"(rank 0: {everyone[0][what]}, rank {rank}: {theirs[what]})"
                )
