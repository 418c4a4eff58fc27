"""The CPU in the place of two GPUs, for tests that ask for GPUs but exercise the wrapper.

Only the test files see these: they get a ``torch`` of their own, in which ``cuda`` has two devices that are
the CPU. torch itself, and the wrapper under test, see the machine as it is. What cannot be given to the test
files alone (methods of tensors and modules, one function that tests import when they run) is replaced for
the whole rank.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed.device_mesh
from suite import common_distributed, distributed_test

# As many as any test of the wrapper asks for; each is the CPU, so it does not matter that ranks use fewer.
DEVICES = 4
# A GPU's share of work: one test convolves hundreds of pictures of a million pixels. A convolution takes any
# size, so small ones tell the same, in seconds on a CPU core.
LARGE_SIDE, SMALL_SIDE = 1000, 32
# A test says where a tensor is to be by one of these functions' argument ``device``.
FACTORIES = ("empty", "ones", "rand", "randn", "tensor", "zeros")


def install(rank: int) -> None:
    """Put the stand-ins in place, on a rank."""
    standing_in = _torch_with_two_devices(rank)
    # The decorators that count GPUs look through common_distributed when the test is called.
    common_distributed.torch = standing_in
    common_distributed.TEST_CUDA = True
    distributed_test.torch = standing_in
    # CUDA's autocast and scaler switch themselves off on a machine without CUDA.
    distributed_test.autocast = functools.partial(torch.amp.autocast, "cpu")
    distributed_test.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
    # torch 2.15 has no such file.
    if hasattr(distributed_test, "_rank_temp_file"):
        distributed_test._rank_temp_file = _kept_until_all_have_read(distributed_test._rank_temp_file)
    _replace_methods()
    _replace_device_mesh()


def on_cpu(device: object) -> object:
    """The CPU for a CUDA device, however it is given; anything else unchanged."""
    is_cuda = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    is_index = isinstance(device, int) and not isinstance(device, bool)
    return torch.device("cpu") if is_cuda or is_index else device


def _kept_until_all_have_read(
    rank_temp_file: Callable[[], AbstractContextManager[str]],
) -> Callable[[], AbstractContextManager[str]]:
    """torch's temporary file, which rank 0 removes as soon as it is done itself, whoever still reads it."""

    @contextmanager
    def until_all_have_read() -> Iterator[str]:
        with rank_temp_file() as name:
            yield name
            torch.distributed.barrier()

    return until_all_have_read


def _torch_with_two_devices(rank: int) -> ModuleType:
    standing_in = _ModuleOver(torch)
    standing_in.cuda = _cuda(rank)
    standing_in.accelerator = _accelerator()
    standing_in.device = lambda *args, **kwargs: on_cpu(kwargs.get("type", args[0] if args else None))
    for name in FACTORIES:
        setattr(standing_in, name, _with_device_on_cpu(getattr(torch, name)))
    return standing_in


class _ModuleOver(ModuleType):
    """A module that has what is set on it, and the rest of another module's names."""

    def __init__(self, below: ModuleType) -> None:
        super().__init__(below.__name__)
        self._below = below

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def _cuda(rank: int) -> ModuleType:
    cuda = _ModuleOver(torch.cuda)
    cuda.is_available = lambda: True
    cuda.device_count = lambda: DEVICES
    cuda.current_device = lambda: rank
    # The CPU has one queue of work, which is always done: nothing to choose and nothing to wait for.
    cuda.set_device = cuda.synchronize = cuda.manual_seed = _nothing
    cuda.device = cuda.stream = lambda *_, **__: nullcontext()
    cuda.Stream = cuda.current_stream = cuda.Event = _Queue
    return cuda


def _accelerator() -> ModuleType:
    """What the decorators of torch 2.15 count, where those before count ``torch.cuda``."""
    accelerator = _ModuleOver(torch.accelerator)
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: DEVICES
    return accelerator


def _nothing(*_: object, **__: object) -> None: ...


class _Queue:
    """A stream, or an event on one."""

    def __init__(self, *_: object, **__: object) -> None: ...

    record = wait = synchronize = wait_stream = wait_event = _nothing

    def query(self) -> bool:
        return True


def _with_device_on_cpu(factory: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(factory)
    def make(*args: object, device: object = None, **kwargs: object) -> object:
        return factory(*_small_picture(args), device=on_cpu(device), **kwargs)

    return make


def _small_picture(size: tuple[object, ...]) -> tuple[object, ...]:
    return (*size[:2], SMALL_SIDE, SMALL_SIDE) if size[2:] == (LARGE_SIDE, LARGE_SIDE) else size


def _replace_methods() -> None:
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = _to_cpu(kind.to)


def _to_cpu(to: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(to)
    def move(self: object, *args: object, **kwargs: object) -> object:
        kwargs = {name: on_cpu(value) if name == "device" else value for name, value in kwargs.items()}
        return to(self, *(on_cpu(arg) for arg in args), **kwargs)

    return move


def _replace_device_mesh() -> None:
    make = torch.distributed.device_mesh.init_device_mesh

    @functools.wraps(make)
    def on_cpu_mesh(device_type: str, *args: object, **kwargs: object) -> object:
        return make(str(on_cpu(device_type)), *args, **kwargs)

    torch.distributed.device_mesh.init_device_mesh = on_cpu_mesh
