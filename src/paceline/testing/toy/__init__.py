"""A device for tests: type ``toy``, two indexes, its data in CPU memory.

Code for accelerators can be run without one: tensors on ``toy:0`` and ``toy:1`` mix with each other and with
CPU tensors as little as a GPU's do, each thread has its own current device and streams, and torch's autograd
engine gives each index its own thread. Once registered it is the process's accelerator for good, so register
it in a process of its own: ``run_ranks`` with one rank.
"""

import functools

from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from paceline.testing.toy.guard import Guard
from paceline.testing.toy.module import NAME, Event, ToyModule, ToyStream
from paceline.testing.toy.tensor import ToyTensor, register_kernels

__all__ = ["Event", "ToyModule", "ToyStream", "ToyTensor", "register"]


@functools.cache
def register() -> ToyModule:
    """Make ``toy`` this process's accelerator, and return its module; calling again changes nothing."""
    module = ToyModule()
    # torch 2.13: hosts a device in Python, as an experiment.
    _setup_privateuseone_for_python_backend(NAME, module)
    Guard(module).install()
    register_kernels()
    return module
