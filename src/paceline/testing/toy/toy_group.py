"""A process group whose collectives of toy tensors are queued on streams, as NCCL's are.

A call returns at once, and so does the wait for it: it lets the current stream wait. Collectives run in the
order of their calls, on a stream of the group, by a gloo that nothing else uses. CPU tensors have another
gloo, so that the host and the queue do not get each other's messages.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from paceline.testing.toy.counts import count
from paceline.testing.toy.device_module import NAME, ToyModule, ToyStream
from paceline.testing.toy.queues import QueuePlace, raise_failure, wait_on_host
from paceline.testing.toy.toy_tensor import ToyTensor
from paceline.torch_private import tree_leaves, tree_map

BACKEND = "toy_gloo"
c10d: Any = distributed_c10d  # its type hints leave out much of what it has
_CPU = torch.device("cpu")
_GLOO = c10d.ProcessGroup.BackendType.GLOO


@functools.cache
def register_backend() -> None:
    """Make the backend known to ``init_process_group`` and ``new_group``."""
    c10d.Backend.register_backend(BACKEND, ToyGroup, devices=[NAME])


class ToyFuture(torch.futures.Future[Any]):
    """Has its value at once, and callbacks run at once: on a stream that waits for the value to be computed.

    Args:
        work: the collective, or what a callback has queued after it.
        value: the result.
    """

    def __init__(self, work: "ToyWork", value: object) -> None:
        super().__init__()
        self._work = work
        self.set_result(value)

    def wait(self) -> Any:
        """Let the current stream wait for the value, and return it."""
        self._work.wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Run a callback; its future can be waited for in the same way."""
        try:
            after, value = self._work.then(lambda: callback(self))
        except Exception as error:  # what torch's future does with it
            failed: torch.futures.Future[Any] = torch.futures.Future()
            failed.set_exception(error)
            return failed
        return ToyFuture(after, value)

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Run a callback."""
        self.then(callback)


class ToyWork(c10d.Work):  # type: ignore[misc]  # see above
    """A collective that is queued.

    Args:
        module: the module whose current streams wait for it.
        stream: the stream that it is queued on.
        callbacks: the stream for what futures' callbacks queue.
        outputs: its results.
    """

    def __init__(
        self, module: ToyModule, stream: ToyStream, callbacks: ToyStream, outputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self._module = module
        self._device = stream.device
        self._place = stream.queue.end
        self._callbacks = callbacks
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let what follows on the current stream wait, and not the host."""
        del timeout  # the host does not wait
        self._module.current_stream(self._device).queue.wait_for(self._place)
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the results are there."""
        return self._place.is_done

    def is_success(self) -> bool:
        """As ``is_completed``: the host gets an error when it reads."""
        return self.is_completed()

    def result(self) -> Sequence[torch.Tensor]:
        """The results."""
        return self._outputs

    def get_future(self) -> ToyFuture:
        """A future of the results."""
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None:
            # Called by C++, as by torch's own reducer, whose futures know nothing of our streams.
            self.wait()
        return ToyFuture(self, self._outputs)

    def then(self, callback: Callable[[], Any]) -> "tuple[ToyWork, Any]":
        """Call a function whose kernels wait for the results; returns these kernels, and what it returned."""
        self._callbacks.queue.wait_for(self._place)
        with self._module.stream(self._callbacks):
            value = callback()
        return ToyWork(self._module, self._callbacks, self._callbacks, ()), value


class ToyBarrierWork(ToyWork):
    """A barrier, for which the host waits, as for NCCL's."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the host wait for all ranks' streams."""
        del timeout  # gloo has the group's
        count("waits", "barrier")
        wait_on_host([self._place])
        raise_failure()
        return True


def _collective(name: str) -> Callable[..., Any]:
    """A method that runs a collective of gloo; its first argument has the results."""

    def call(self: "ToyGroup", *args: Any) -> Any:
        return self.run(name, args)

    return call


class ToyGroup(c10d.ProcessGroup):  # type: ignore[misc]  # see above
    """A process group for tensors of the toy device and of the CPU.

    Args:
        store: where its ranks meet.
        rank: this rank.
        size: the number of ranks.
        timeout: how long a collective may take.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._on_host, self._on_device = (
            c10d.ProcessGroupGloo(c10d.PrefixStore(f"{name}/", store), rank, size, timeout=timeout)
            for name in ("host", "device")
        )
        self._set_default_backend(_GLOO)
        self._register_backend(_CPU, _GLOO, self._on_host)
        self._module: ToyModule = torch.get_device_module(NAME)
        # By device: the stream of collectives, and that of callbacks.
        self._streams: dict[torch.device, tuple[ToyStream, ToyStream]] = {}
        self._last: QueuePlace | None = None

    def getBackendName(self) -> str:  # noqa: N802  # C++ looks for it by this name
        """The backend's name."""
        return BACKEND

    def get_group_store(self) -> Any:
        """Where the ranks meet."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, torch.device(NAME)]

    def _get_backend(self, _device: torch.device) -> Any:
        return self._on_host

    allreduce = _collective("allreduce")
    allreduce_coalesced = _collective("allreduce_coalesced")
    broadcast = _collective("broadcast")
    reduce = _collective("reduce")
    allgather = _collective("allgather")
    gather = _collective("gather")
    scatter = _collective("scatter")
    reduce_scatter = _collective("reduce_scatter")
    alltoall = _collective("alltoall")
    # torch 2.13 has new names for these.
    _allgather_base = all_gather_single = _collective("_allgather_base")
    _reduce_scatter_base = reduce_scatter_single = _collective("_reduce_scatter_base")
    alltoall_base = all_to_all_single = _collective("alltoall_base")

    def barrier(self, opts: Any = None) -> Any:
        """Let the host wait for all ranks, and for what their current streams have to do."""
        del opts  # torch's choice of a device, and a timeout
        device = torch.device(NAME, self._module.current_device())
        return self._launch(ToyBarrierWork, device, "barrier", ())

    def run(self, name: str, args: tuple[Any, ...]) -> Any:
        """Queue a collective of toy tensors, or begin one of CPU tensors."""
        devices = {leaf.device for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        if devices == {_CPU}:
            return getattr(self._on_host, name)(*args)
        if len(devices) != 1:
            raise ValueError(f"{name} needs tensors on one device (devices: {sorted(map(str, devices))})")
        return self._launch(ToyWork, devices.pop(), name, args)

    def _launch(self, kind: type[ToyWork], device: torch.device, name: str, args: tuple[Any, ...]) -> Any:
        stream, callbacks = self._streams_on(device)
        stream.queue.wait_for(self._module.current_stream(device).queue.end)
        if self._last is not None:  # it may be on another device's stream
            stream.queue.wait_for(self._last)
        call = functools.partial(getattr(self._on_device, name), *tree_map(_memory, args))
        stream.queue.put(f"{name} of rank {self.rank()}", lambda: call().wait())
        self._last = stream.queue.end
        outputs = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)]
        return kind(self._module, stream, callbacks, outputs)

    def _streams_on(self, device: torch.device) -> tuple[ToyStream, ToyStream]:
        if device not in self._streams:
            self._streams[device] = (self._module.Stream(device), self._module.Stream(device))
        return self._streams[device]


def _memory(leaf: Any) -> Any:
    return leaf.memory if isinstance(leaf, ToyTensor) else leaf


def new_group(ranks: Sequence[int] | None = None, timeout: timedelta | None = None) -> Any:
    """A new group of some ranks or of all, beside the default group; all ranks call this at once."""
    register_backend()
    return distributed.new_group(None if ranks is None else list(ranks), timeout, backend=BACKEND)
