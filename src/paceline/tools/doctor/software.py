"""torch, paceline and the backends that there are."""

import platform
from dataclasses import dataclass

import torch

import paceline
from paceline.comm.probing import available_backends
from paceline.tools.doctor.finding import Finding, fault, notice, ok

CHECK = "software"
# The torch that paceline is made for; elsewhere its use of torch's private parts has not been tried.
TRIED_TORCH = "2.13"


@dataclass(frozen=True)
class Software:
    """What is installed here."""

    python: str
    torch: str
    paceline: str
    backends: dict[str, bool]


def gather() -> Software:
    """Look at what is installed."""
    return Software(platform.python_version(), torch.__version__, paceline.__version__, available_backends())


def judge(software: Software) -> Finding:
    """Say what there is, and whether it is what paceline needs."""
    there = [name for name, is_there in software.backends.items() if is_there]
    data = {**vars(software)}
    if "gloo" not in there:
        fix = f"pip install 'torch=={TRIED_TORCH}.*'"
        return fault(CHECK, f"this torch has no gloo (torch: {software.torch})", fix, **data)
    if not software.torch.startswith(f"{TRIED_TORCH}."):
        fix = f"pip install 'torch=={TRIED_TORCH}.*'"
        found = f"paceline was tried with torch {TRIED_TORCH} alone (torch: {software.torch})"
        return notice(CHECK, found, fix, **data)
    found = (
        f"torch {software.torch}, paceline {software.paceline}, python {software.python}, "
        f"backends {', '.join(there)}"
    )
    return ok(CHECK, found, **data)
