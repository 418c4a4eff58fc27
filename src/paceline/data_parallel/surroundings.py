"""What holds in one thread, and must hold in the threads that work for it."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from paceline.tensors import devices as dev


@dataclass(frozen=True)
class Surroundings:
    """Grad mode, inference mode, autocast, default device, and how many threads an operation may use."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_device: torch.device
    threads: int

    @classmethod
    def of_caller(cls) -> "Surroundings":
        """Those of the calling thread."""
        kinds = {"cpu", dev.accelerator_type() or "cpu"}
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
            threads=torch.get_num_threads(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make them hold in the calling thread, which must be a new one."""
        # OpenMP and MKL keep this number for each thread, and a new thread starts with the machine's.
        torch.set_num_threads(self.threads)
        with contextlib.ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            yield

    def restore(self) -> None:
        """Undo what ran in the thread that they are of did to grad mode and autocast outside any context."""
        torch.set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)

    def _contexts(self) -> Iterator[AbstractContextManager[object]]:
        # Only what differs from a new thread's own: each context costs time in every replica.
        if self.inference:
            yield torch.inference_mode()
        yield torch.set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            if enabled:
                yield torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache)
        if self.default_device != dev.CPU:
            yield self.default_device
