"""Module buffers between forwards, when nothing should change them.

Note [Buffers differ by right]. The statistics of a batch norm are each rank's own from its forward on, until
rank 0's are broadcast before the next one. So they cannot be compared across ranks. But between the end of a
step and the next forward they do not change, unless all ranks change them, as by loading a checkpoint. What
changes then on some ranks only is told. A change in backward is not looked for: there a checkpoint runs a
part of forward again.
"""

from collections.abc import Collection, Iterator
from functools import partial

from torch import Tensor, nn

from paceline.ddp.audit.catalogue import TensorEntry, can_hash, describe_tensor
from paceline.ddp.audit.replica_part import MissingTensorError, SmallTensors
from paceline.tensors.dtensor import is_dtensor, local_of
from paceline.torch_private import buffers_of

# All buffers that are watched together: they are copied twice per step.
_MOST_BYTES = 1024 * 1024
_LOOKS_BETWEEN_SEARCHES = 64


class BufferWatch:
    """Watches the small buffers of a module.

    Args:
        module: whose buffers.
        ignored: names to leave alone.

    Attributes:
        changed: names of those that have changed when they should not, since the last report.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._watched: list[SmallTensors] = []
        self._looks = 0
        self._copies: list[Tensor] | None = None
        self.changed: set[str] = set()

    def begin(self) -> None:
        """From now on buffers should not change."""
        if self._looks % _LOOKS_BETWEEN_SEARCHES == 0:
            self._search()
        self._looks += 1
        try:
            self._copies = [each.copy() for each in self._watched]
        except MissingTensorError:
            self._search()
            self._copies = None

    def end(self) -> None:
        """From now on buffers may change: note what has changed already."""
        before, self._copies = self._copies, None
        if not before:
            return
        try:
            for watched, then in zip(self._watched, before, strict=True):
                now = watched.copy()
                if not now.equal(then):
                    self.changed.update(watched.differing(now, then))
        except MissingTensorError as gone:
            self.changed.add(str(gone))

    @property
    def names(self) -> frozenset[str]:
        """The buffers that are watched."""
        return frozenset(name for each in self._watched for name in each.names)

    def forget(self) -> None:
        """Buffers may have changed by right; also forgets what was noted."""
        self._copies = None
        self.changed.clear()

    def _search(self) -> None:
        by_size: dict[int, list[TensorEntry]] = {}
        watched = 0
        for entry in sorted(self._entries(), key=lambda each: each.nbytes):
            watched += entry.nbytes
            if watched <= _MOST_BYTES:
                by_size.setdefault(min(entry.itemsize, 8), []).append(entry)
        self._watched = [SmallTensors(each) for each in by_size.values()]

    def _entries(self) -> Iterator[TensorEntry]:
        listed: set[int] = set()
        for prefix, layer in self._module.named_modules():
            buffers = buffers_of(layer)
            for name, buffer in (buffers or {}).items():
                full = f"{prefix}.{name}" if prefix else name
                if full in self._ignored or id(buffer) in listed or not can_hash(buffer):
                    continue
                listed.add(id(buffer))
                local = local_of(buffer)
                if local.device.type == "cpu":
                    get = partial(_local_buffer if is_dtensor(buffer) else dict.get, buffers, name)
                    yield TensorEntry(full, describe_tensor(local), local.nbytes, local.element_size(), get)


def _local_buffer(buffers: dict[str, Tensor | None], name: str) -> Tensor | None:
    found = buffers.get(name)
    return None if found is None else local_of(found)
