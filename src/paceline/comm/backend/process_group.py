"""The c10d backend "paceline": CPU tensors go through shared memory, everything else through torch's own.

Note [A group, not a backend]. torch 2.13 lets Python subclass ``ProcessGroup`` and not ``Backend``. It uses
such a group instead of its own, also for the other devices of the group. So each of our groups has a group of
torch's beside it, whose CPU backend is gloo. It gets everything that ours does not do itself: other devices,
sparse tensors, messages between two ranks, ranks that do not share memory.

Note [Calls from C++]. C++ finds Python's methods only for some collectives (``PyProcessGroup.hpp``). The
others go to the backends that are registered with our group, which are those of torch's group.
"""

import pickle
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from paceline.comm.backend import calls
from paceline.comm.backend.arguments import as_list, as_nested_list, is_plain, options_of
from paceline.comm.backend.reductions import Reduction
from paceline.comm.backend.work import WorkExecutor
from paceline.comm.shm.channel import Channel
from paceline.comm.shm.local_ranks import find_local_ranks
from paceline.comm.shm.segment import PAGE
from paceline.torch_private import backend_config_of, is_open

NAME = "paceline"
c10d: Any = distributed_c10d  # its type hints leave out much of what it has
_CPU = torch.device("cpu")
_GLOO = c10d.ProcessGroup.BackendType.GLOO


def register() -> None:
    """Make the backend known to ``init_process_group`` and ``new_group``."""
    c10d.Backend.register_backend(NAME, PacelineGroup, devices=["cpu"])


class PacelineGroup(c10d.ProcessGroup):  # type: ignore[misc]  # see above
    """A process group whose collectives of CPU tensors go over shared memory.

    Args:
        store: where its ranks meet.
        rank: this rank.
        size: the number of ranks.
        timeout: how long to wait for others.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        # Made at once, because that takes all ranks, and a message between two ranks only those.
        self._gloo = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo/", store), rank, size, timeout=timeout)
        self._gloo._set_sequence_number_for_group()
        self._torch_group = c10d.ProcessGroup(store, rank, size)
        for group in (self, self._torch_group):
            group._set_default_backend(_GLOO)
            group._register_backend(_CPU, _GLOO, self._gloo)
        self._other_devices: Any = None
        self._is_making_others = False
        channel = _open_channel(self._gloo, rank, size, timeout)
        self._executor = None if channel is None else WorkExecutor(channel)
        if self._executor is not None:
            weakref.finalize(self, self._executor.abort).atexit = False

    # What torch needs of a group besides collectives.

    def getBackendName(self) -> str:  # noqa: N802  # C++ looks for it by this name
        """The backend's name."""
        return NAME

    def get_group_store(self) -> Any:
        """Where the ranks meet."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._backends()]

    def _get_backend(self, device: torch.device) -> Any:
        # A backend that is being made may ask the default group for that group's own, as "fake" does.
        if self._is_making_others:
            return self._gloo
        self._ensure_backend(device)
        return self._torch_group._get_backend(device)

    def _set_group_name(self, name: Any) -> None:
        super()._set_group_name(name)
        self._torch_group._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._torch_group._set_group_desc(desc)

    def shutdown(self) -> None:
        """Finish what is in flight, and close the group."""
        if self._executor is not None:
            self._executor.close()
        if self._other_devices is not None and is_open(self._other_devices):
            distributed.destroy_process_group(self._other_devices)
        self._torch_group.shutdown()

    def abort(self) -> None:
        """Close the group without waiting for anyone."""
        if self._executor is not None:
            self._executor.abort()
        self._torch_group.abort()

    # Collectives. torch has several signatures for each, and new names for some; of torch's own groups only
    # the old names are called, because torch 2.10 has no others.

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Any:
        """Combine tensors over the ranks."""
        tensors = as_list(tensors)
        options = options_of(c10d.AllreduceOptions, opts, timeout=timeout, reduceOp=op)
        if len(tensors) == 1 and (reduction := self._reduction(options, tensors)):
            return self._launch(options, calls.all_reduce, tensors, reduction)
        return self._torch_group_for(tensors).allreduce(tensors, options)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Combine several tensors over the ranks."""
        options = options_of(c10d.AllreduceCoalescedOptions, opts)
        one_type = len({tensor.dtype for tensor in tensors}) == 1
        if one_type and (reduction := self._reduction(options, tensors)):
            return self._launch(options, calls.all_reduce, tensors, reduction)
        return self._torch_group_for(tensors).allreduce_coalesced(tensors, options)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Any:
        """Combine a tensor over the ranks, for one of them."""
        tensors = as_list(tensors)
        options = options_of(c10d.ReduceOptions, opts, timeout=timeout, reduceOp=op, rootRank=root)
        if len(tensors) == 1 and (reduction := self._reduction(options, tensors)):
            return self._launch(options, calls.reduce, tensors[0], reduction, root=options.rootRank)
        return self._torch_group_for(tensors).reduce(tensors, options)

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Any:
        """Give all ranks one rank's tensors."""
        tensors = as_list(tensors)
        options = options_of(c10d.BroadcastOptions, opts, timeout=timeout, rootRank=root)
        if self._is_ours(tensors):
            return self._launch(options, calls.broadcast, tensors, root=options.rootRank)
        return self._torch_group_for(tensors).broadcast(tensors, options)

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        """Give all ranks every rank's tensor."""
        outputs, inputs = as_nested_list(output_tensors), as_list(input_tensors)
        options = options_of(c10d.AllgatherOptions, opts, timeout=timeout)
        if self._is_ours(inputs, *outputs) and len(inputs) == len(outputs) == 1:
            return self._launch(options, calls.all_gather, outputs[0], inputs[0])
        return self._torch_group_for(inputs).allgather(outputs, inputs, options)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> Any:
        """Give all ranks every rank's tensors, in a list for each rank."""
        options = options_of(c10d.AllgatherOptions, opts)
        if self._is_ours(input_list, *output_lists) and len(output_lists) == self.size():
            by_tensor = [list(each) for each in zip(*output_lists, strict=True)]
            return self._launch(options, calls.all_gather_many, by_tensor, input_list)
        return self._torch_group_for(input_list).allgather_coalesced(output_lists, input_list, options)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002
        """Give all ranks every rank's tensor, one behind the other."""
        options = options_of(c10d.AllgatherOptions, opts)
        if self._is_ours([output, input]):
            return self._launch(options, calls.all_gather_flat, [output], [input])
        return self._torch_group_for([input])._allgather_base(output, input, options)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """As ``all_gather_single``, for several tensors."""
        options = options_of(c10d.AllgatherOptions, opts)
        if self._is_ours(outputs, inputs):
            return self._launch(options, calls.all_gather_flat, outputs, inputs)
        return self._torch_group_for(inputs).allgather_into_tensor_coalesced(outputs, inputs, options)

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Any:
        """Give one rank every rank's tensor."""
        outputs, inputs = as_nested_list(output_tensors), as_list(input_tensors)
        options = options_of(c10d.GatherOptions, opts, timeout=timeout, rootRank=root)
        if self._is_ours(inputs, *outputs) and len(inputs) == 1 and len(outputs) <= 1:
            own = outputs[0] if outputs else []
            return self._launch(options, calls.gather, own, inputs[0], root=options.rootRank)
        return self._torch_group_for(inputs).gather(outputs, inputs, options)

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Any:
        """Give each rank one of one rank's tensors."""
        outputs, inputs = as_list(output_tensors), as_nested_list(input_tensors)
        options = options_of(c10d.ScatterOptions, opts, timeout=timeout, rootRank=root)
        if self._is_ours(outputs, *inputs) and len(outputs) == 1 and len(inputs) <= 1:
            own = inputs[0] if inputs else []
            return self._launch(options, calls.scatter, outputs[0], own, root=options.rootRank)
        return self._torch_group_for(outputs).scatter(outputs, inputs, options)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Any:
        """Combine every rank's tensors; each rank gets one."""
        outputs, inputs = as_list(output_tensors), as_nested_list(input_tensors)
        options = options_of(c10d.ReduceScatterOptions, opts, timeout=timeout, reduceOp=op)
        reduction = self._reduction(options, outputs, *inputs)
        if reduction and len(outputs) == len(inputs) == 1:
            return self._launch(options, calls.reduce_scatter, outputs[0], inputs[0], reduction)
        return self._torch_group_for(outputs).reduce_scatter(outputs, inputs, options)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002
        """As ``reduce_scatter``, of tensors that lie behind each other."""
        options = options_of(c10d.ReduceScatterOptions, opts)
        if reduction := self._reduction(options, [output, input]):
            return self._launch(options, calls.reduce_scatter_flat, [output], [input], reduction)
        return self._torch_group_for([output])._reduce_scatter_base(output, input, options)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """As ``reduce_scatter_single``, for several tensors."""
        options = options_of(c10d.ReduceScatterOptions, opts)
        one_type = len({tensor.dtype for tensor in outputs}) == 1
        if one_type and (reduction := self._reduction(options, outputs, inputs)):
            return self._launch(options, calls.reduce_scatter_flat, outputs, inputs, reduction)
        return self._torch_group_for(outputs).reduce_scatter_tensor_coalesced(outputs, inputs, options)

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> Any:
        """Give rank i the i-th tensor."""
        options = options_of(c10d.AllToAllOptions, opts)
        if self._is_ours(output_tensors, input_tensors):
            return self._launch(options, calls.all_to_all, output_tensors, input_tensors)
        return self._torch_group_for(input_tensors).alltoall(output_tensors, input_tensors, options)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Any:
        """Give rank i the i-th share of the rows."""
        options = options_of(c10d.AllToAllOptions, opts, timeout=timeout)
        splits = (output_split_sizes, input_split_sizes)
        if self._is_ours([output, input]):
            return self._launch(options, calls.all_to_all_flat, output, input, *splits)
        return self._torch_group_for([input]).alltoall_base(output, input, *splits, options)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Wait for all ranks."""
        options = options_of(c10d.BarrierOptions, opts, timeout=timeout)
        device = options.device or _CPU
        if self._executor is not None and device.type == "cpu":
            return self._launch(options, calls.barrier)
        self._ensure_backend(device)
        return self._torch_group.barrier(options)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages between two ranks, and what only gloo has.

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Any:  # noqa: N803  # torch's names
        """Send tensors to a rank."""
        return self._torch_group_for(tensors).send(tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Any:  # noqa: N803
        """Receive tensors from a rank."""
        return self._torch_group_for(tensors).recv(tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Receive tensors from whoever sends some."""
        return self._torch_group_for(tensors).recv_anysource(tensors, tag)

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    ) -> None:
        """Wait for all ranks; raises an error that names those that do not come."""
        self._torch_group.monitored_barrier(timeout, wait_all_ranks)

    # Which calls are ours, and which are torch's.

    def _launch(
        self, options: Any, build: Callable[..., calls.BackendCall], *args: Any, **kwargs: Any
    ) -> Any:
        assert self._executor is not None
        timeout = options.timeout.total_seconds()
        if timeout < 0:
            timeout = self._gloo.options._timeout.total_seconds()
        return self._executor.launch(build, args, kwargs, timeout=timeout, is_async=options.asyncOp)

    def _is_ours(self, *lists: Sequence[Tensor]) -> bool:
        return self._executor is not None and all(is_plain(tensor) for each in lists for tensor in each)

    def _reduction(self, options: Any, *lists: Sequence[Tensor]) -> Reduction | None:
        return Reduction.of(options.reduceOp, lists[0][0].dtype) if self._is_ours(*lists) else None

    def _torch_group_for(self, tensors: Sequence[Tensor]) -> Any:
        if tensors and not tensors[0].is_cpu:
            self._ensure_backend(tensors[0].device)
        return self._torch_group

    def _backends(self) -> dict[str, str]:
        """The name of each device's backend, as given when the group was made."""
        config = backend_config_of(self, f"cpu:{NAME}")
        return dict(pair.split(":") for pair in config.split(","))

    def _ensure_backend(self, device: torch.device) -> None:
        """Make the backends of other devices, which torch did not make because it uses this group instead.

        They are made when first needed, on every rank, as is the collective that needs them.
        """
        if self._other_devices is not None or device.type == "cpu":
            return
        others = {name: backend for name, backend in self._backends().items() if name != "cpu"}
        if device.type not in others:
            return
        self._is_making_others = True
        try:
            self._other_devices = distributed.new_group(
                distributed.get_process_group_ranks(self),
                timeout=self._gloo.options._timeout,
                backend=",".join(f"{name}:{backend}" for name, backend in others.items()),
                use_local_synchronization=True,
            )
        finally:
            self._is_making_others = False
        for name, backend in others.items():
            made = self._other_devices._get_backend(torch.device(name))
            kind = c10d.Backend.backend_type_map[backend]
            for group in (self, self._torch_group):
                group._register_backend(torch.device(name), kind, made)


class _GlooGatherer:
    """Gathers objects over gloo, before the group exists."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        self._gloo = gloo
        self.rank = rank
        self._size = size

    def gather_objects(self, own: object) -> list[Any]:
        """Every rank's object."""
        mine = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        lengths = [int(length) for length in self._gather(torch.tensor([mine.numel()]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        everyone = zip(self._gather(padded), lengths, strict=True)
        return [pickle.loads(bytes(theirs[:length].tolist())) for theirs, length in everyone]  # noqa: S301  # of our own ranks

    def _gather(self, own: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(own) for _ in range(self._size)]
        self._gloo.allgather([everyone], [own]).wait()
        return everyone


def _open_channel(gloo: Any, rank: int, size: int, timeout: timedelta) -> Channel | None:
    """A channel of all ranks of a group; None if they do not all share memory."""
    gatherer = _GlooGatherer(gloo, rank, size)
    local_ranks = find_local_ranks(gatherer) if size > 1 else None
    if local_ranks is None or len(local_ranks.hosts) > 1:
        return None
    return local_ranks.open_channel(gatherer, nbytes=PAGE, timeout=timeout.total_seconds())
