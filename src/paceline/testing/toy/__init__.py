"""A device for tests: type ``toy``, two indexes, its data in CPU memory.

Code for accelerators can be run without one. As on a GPU, an operation on tensors of ``toy:0``, ``toy:1`` and
the CPU together is an error, each thread has its own current device and streams, and torch's autograd engine
has one thread per index. Operations are queued on streams, which threads work off: the host goes on at once,
and waits when it reads a value. Once registered it stays the process's accelerator, so register it in a
process of its own: ``run_ranks`` with one rank.

``hold`` stops the device, so that a test can show that the host does not wait for it. ``counting`` says how
often the host reads, waits, copies and allocates, and who does it::

    def step(rank):
        toy.register()
        net = nn.Linear(4, 2).to("toy:0")
        x = torch.ones(3, 4, device="toy:0")
        with toy.counting() as counts, toy.hold():
            net(x).sum().backward()
        assert counts.reads == 0

``new_group`` is a process group for tensors of the device. With ``run_ranks(step, world=2)``, each rank can
wrap its module: ``DistributedDataParallel(net, process_group=toy.new_group())``.
"""

import functools

from paceline.testing.toy.counts import Counts, counting
from paceline.testing.toy.device_guard import ToyDeviceGuard
from paceline.testing.toy.device_module import NAME, StreamOperation, ToyEvent, ToyModule, ToyStream
from paceline.testing.toy.queues import hold, set_latency, unfinished
from paceline.testing.toy.toy_group import ToyGroup, new_group
from paceline.testing.toy.toy_tensor import ToyTensor, register_kernels
from paceline.torch_private import register_device

__all__ = [
    "Counts",
    "StreamOperation",
    "ToyEvent",
    "ToyGroup",
    "ToyModule",
    "ToyStream",
    "ToyTensor",
    "counting",
    "hold",
    "new_group",
    "register",
    "set_latency",
    "unfinished",
]


@functools.cache
def register() -> ToyModule:
    """Make ``toy`` this process's accelerator, and return its module; calling again changes nothing."""
    module = ToyModule()
    register_device(NAME, module)
    ToyDeviceGuard(module).install()
    register_kernels()
    return module
