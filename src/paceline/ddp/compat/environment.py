"""What the environment says about process groups and devices, for who looks for a mistake in it."""

import logging
import os

_LOG = logging.getLogger("paceline")
_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
_PREFIXES = ("GLOO_", "NCCL_", "PACELINE_", "TORCH_DISTRIBUTED_", "TORCH_NCCL_")


def relevant_environment() -> dict[str, str]:
    """The variables that are set and bear on how ranks find each other and talk."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def log_environment(what: str) -> None:
    """Write them to the log ``paceline`` at debug level."""
    if _LOG.isEnabledFor(logging.DEBUG):
        shown = " ".join(f"{name}={value}" for name, value in relevant_environment().items())
        _LOG.debug("%s in an environment of: %s", what, shown or "nothing that bears on it")
