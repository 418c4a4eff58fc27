"""A device for tests: type ``toy``, two indexes, its data in CPU memory.

Code for accelerators can be run without one. As on a GPU, an operation on tensors of ``toy:0``, ``toy:1`` and
the CPU together is an error, each thread has its own current device and streams, and torch's autograd engine
has one thread per index. Once registered it stays the process's accelerator, so register it in a process of
its own: ``run_ranks`` with one rank.
"""

import functools

from paceline.testing.toy.device_guard import ToyDeviceGuard
from paceline.testing.toy.device_module import NAME, StreamOperation, ToyModule, ToyStream
from paceline.testing.toy.toy_tensor import ToyTensor, register_kernels
from paceline.torch_private import register_device

__all__ = ["StreamOperation", "ToyModule", "ToyStream", "ToyTensor", "register"]


@functools.cache
def register() -> ToyModule:
    """Make ``toy`` this process's accelerator, and return its module; calling again changes nothing."""
    module = ToyModule()
    register_device(NAME, module)
    ToyDeviceGuard(module).install()
    register_kernels()
    return module
