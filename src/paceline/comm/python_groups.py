"""Process groups that are written in Python: what they say of themselves, and what can be done with them.

Such a group is a subclass of torch's ``ProcessGroup``. It need not be known to ``torch.distributed``, so it
may have no name, no store and no options. It has to implement ``allreduce``, ``broadcast`` and ``allgather``,
each with lists of tensors. What else is needed is made of these.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from paceline.comm.pending import WorkPending
from paceline.torch_private import timeout_of

_c10d: Any = distributed_c10d  # its type hints leave out much of what it has
_ProcessGroup: Any = distributed.ProcessGroup
_names: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()
_nameless = itertools.count()


def has_own(process_group: Any, method: str) -> bool:
    """Whether a class in Python implements this method."""
    return getattr(type(process_group), method) is not getattr(_ProcessGroup, method)


def is_in_python(process_group: Any) -> bool:
    """Whether its collectives are written in Python."""
    return has_own(process_group, "allreduce")


def may_change(process_group: Any) -> bool:
    """Whether its ranks may be others in each step, as those of torchft's groups are.

    These are made as groups of one rank, and count their ranks anew whenever they are asked. What they say of
    this rank is wrong.
    """
    return (
        has_own(process_group, "size")
        and not has_own(process_group, "rank")
        and _ProcessGroup.size(process_group) == 1
    )


def name_of(process_group: Any) -> str:
    """The group's name; a number if it has none, in the order in which this process first asks."""
    try:
        return str(process_group.group_name)
    except (RuntimeError, ValueError):  # torch's, and torchft's
        if process_group not in _names:
            _names[process_group] = f"nameless {next(_nameless)}"
        return _names[process_group]


def all_gather(process_group: Any, row: Tensor, rows: Tensor) -> Any:
    """Begin to fill ``rows`` with the row of every rank."""
    return process_group.allgather([list(rows.split(1))], [row], _c10d.AllgatherOptions())


def broadcast(process_group: Any, tensors: Sequence[Tensor], *, source: int, bytes_at_once: int) -> None:
    """Make tensors equal to those of one rank, many in one message."""
    options = _c10d.BroadcastOptions()
    options.rootRank = source
    for together in _batches(tensors, bytes_at_once):
        flat = torch.cat([tensor.reshape(-1) for tensor in together])
        work = process_group.broadcast([flat], options)
        WorkPending(work, flat, partial(timeout_of, process_group)).wait(lambda: None)
        for tensor, part in zip(together, flat.split([each.numel() for each in together]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _batches(tensors: Sequence[Tensor], nbytes: int) -> Iterator[list[Tensor]]:
    """Tensors of one type and device, at most so many bytes at a time but at least one tensor."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        together = kinds.setdefault((tensor.dtype, tensor.device), [])
        if together and sum(each.nbytes for each in together) + tensor.nbytes > nbytes:
            yield [*together]
            together.clear()
        together.append(tensor)
    yield from kinds.values()
