"""The audit of replicas: every step, ranks compare a digest of a rotating part of parameters and optimizers.

Note [One audit]. Each rank hashes a part of its replica when it writes its step report, at the end of
backward: then all ranks are between the same two steps of their optimizers. The digest travels in the report,
so a step in which all ranks are equal has no collective more. If digests differ, all ranks know it, and tell
each other the hash of every tensor of the part.

Note [Names that not all ranks have]. Where optimizer state is sharded, each rank has other tensors. The
digest covers the names too. So ranks with other names find it out together, and leave out what not all of
them have. They try again later, at growing intervals: a rank may have been without state for one step only.
"""

import hashlib
import itertools
import struct
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.ddp.audit.buffer_watch import BufferWatch
from paceline.ddp.audit.catalogue import Catalogue, OptionEntry, not_on_all
from paceline.ddp.audit.equal_steps import EqualSteps
from paceline.ddp.audit.replica_part import Look, MissingTensorError, ReplicaPart
from paceline.ddp.audit.rotation import PARTS, plan_rotation
from paceline.ddp.audit.verdict import Difference, RankView, What, describe_differences, find_differences
from paceline.ddp.state.buffers import ModuleBuffers, broadcast_in_place
from paceline.errors import ReplicaError

AuditMode = Literal["warn", "raise", "heal", "heal-from-rank-0"]
# With more options than this, one in 16 is looked at per step.
_MOST_OPTIONS = 256
_FIRST_INTERVAL = 64


class Audit:
    """One wrapper's audit on one rank.

    Args:
        mode: what to do about a difference.
        catalogue: what belongs to the replica.
        watch: the module's buffers between forwards.
        buffers: the module's buffers, which say whether they are constant.
        equal_steps: past looks.
        device: where tensors can be sent from.
        bytes_at_once: bytes per broadcast.
    """

    def __init__(
        self,
        mode: AuditMode,
        catalogue: Catalogue,
        watch: BufferWatch,
        buffers: ModuleBuffers,
        equal_steps: EqualSteps,
        *,
        device: torch.device,
        bytes_at_once: int,
    ) -> None:
        self._mode = mode
        self._catalogue = catalogue
        self.watch = watch
        self._buffers = buffers
        self._equal_steps = equal_steps
        self._device = device
        self._bytes_at_once = bytes_at_once
        self._parts: list[ReplicaPart] = []
        self._last_options: tuple[Any, ...] = ()
        self._options_digest = b""
        self._seen: tuple[int, Look, frozenset[str]] | None = None
        self._next_try = self._interval = _FIRST_INTERVAL
        # For each name that was told of, from which step on to tell of it again, and the interval then.
        self._told: dict[str, tuple[int, int]] = {}
        self._is_off = False

    def digest(self, step: int, *, buffers_changed: bool) -> int:
        """A digest of this step's part of the replica; 0 if it cannot be looked at.

        Args:
            step: the step's number, the same on every rank.
            buffers_changed: whether a module buffer has other values than after the last broadcast.
        """
        if self._is_off:
            return 0
        try:
            with torch.no_grad():
                return self._look(step, buffers_changed=buffers_changed)
        except Exception as error:  # training does not depend on it
            self._is_off = True
            warnings.warn(
                f"the audit of replicas is switched off, because it failed ({type(error).__name__}: {error})",
                stacklevel=2,
            )
            return 0

    def compare(self, digests: Sequence[int], group: Group, step: int) -> None:
        """Find out what differs, and act on it; every rank of the group calls this.

        Args:
            digests: each rank's if they differ; one if they are equal; none if some rank told none.
            group: the ranks.
            step: the step's number.
        """
        part = step % PARTS
        if len(digests) == 1:
            self._equal_steps.note_equal(step, part)
        if len(digests) < 2:
            return
        views: list[RankView] = group.gather_objects(self._view(), self._device)
        if len({view.layout for view in views}) > 1:
            self._agree_on_names(group, step)
        differences = find_differences(views)
        if differences:
            self._act(differences, group, step)

    def forget_step(self) -> None:
        """The step is lost: what was seen in it on this rank was perhaps not seen on others."""
        self._seen = None
        self.watch.forget()

    def restart(self) -> None:
        """Begin anew, with other ranks."""
        self.forget_step()
        self._catalogue.excluded = frozenset()
        self._next_try = self._interval = _FIRST_INTERVAL
        self._told.clear()
        self._parts = []

    def _look(self, step: int, *, buffers_changed: bool) -> int:
        changed = frozenset(self.watch.changed)
        if buffers_changed and self._buffers.constant:
            changed |= self._buffers.changed_names() - self.watch.names
        self.watch.forget()
        self.watch.begin()
        self._renew(step)
        try:
            look = self._part(step).look()
        except MissingTensorError:
            self._build()
            look = self._part(step).look()
        self._seen = step, look, changed
        digest = self._combine(look, changed, self._digest_of_options(step))
        self._write(step, look, digest)
        return int.from_bytes(digest) or 1

    def _combine(self, look: Look, changed: frozenset[str], options: bytes) -> bytes:
        numbers = look.digest()
        content = struct.pack(f"<{len(numbers)}q", *map(_signed, numbers))
        names = "\n".join(sorted(changed)).encode()
        return hashlib.blake2b(self._catalogue.digest + options + content + names, digest_size=8).digest()

    def _renew(self, step: int) -> None:
        """See whether tensors have come or gone."""
        if self._catalogue.excluded and step >= self._next_try:
            self._catalogue.excluded = frozenset()
            self._parts = []
        is_first = step % PARTS == 0
        if not self._parts or not self._catalogue.is_as_before(thoroughly=is_first):
            self._build()

    def _build(self) -> None:
        self._catalogue.build()
        entries = self._catalogue.tensors
        planned = plan_rotation([entry.nbytes for entry in entries])
        parts = [ReplicaPart(entries, pieces) for pieces in planned]
        empty = ReplicaPart([], [])
        self._parts = [*parts, *itertools.repeat(empty, PARTS - len(parts))]
        self._last_options = ()
        self._equal_steps.restart([part.labels for part in self._parts])

    def _part(self, step: int) -> ReplicaPart:
        return self._parts[step % PARTS]

    def _options(self, step: int) -> list[OptionEntry]:
        options = self._catalogue.options
        return options if len(options) <= _MOST_OPTIONS else options[step % PARTS :: PARTS]

    def _digest_of_options(self, step: int) -> bytes:
        values = tuple([option.get() for option in self._options(step)])
        if values != self._last_options or not self._options_digest:
            self._last_options = values
            self._options_digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
        return self._options_digest

    def _view(self) -> RankView:
        assert self._seen is not None
        step, look, changed = self._seen
        part = self._part(step)
        return RankView(
            step=step,
            layout=self._catalogue.digest,
            tensors=dict(zip(part.names, part.hashes(look), strict=True)),
            options={option.name: option.get() for option in self._options(step)},
            changed=changed,
        )

    def _agree_on_names(self, group: Group, step: int) -> None:
        """See Note [Names that not all ranks have]."""
        described = group.gather_objects(self._catalogue.describe(), self._device)
        self._catalogue.excluded |= not_on_all(described)
        self._interval *= 2
        self._next_try = step + self._interval
        self._parts = []

    def _write(self, step: int, look: Look, digest: bytes) -> None:
        writer = self._equal_steps.writer
        if writer is not None:
            hashes = self._part(step).hashes(look) if writer.wants_hashes else ()
            part = step % PARTS
            writer.write_step(step, part, digest=digest, options=self._options_digest, hashes=hashes)

    def _act(self, differences: Sequence[Difference], group: Group, step: int) -> None:
        text = self._describe(differences, group, step)
        if self._equal_steps.writer is not None:
            self._equal_steps.writer.write_finding(text)
        if self._mode == "raise":
            raise ReplicaError(
                f"{text}; the step is lost on every rank, and its gradients are dropped "
                f"(here: rank {group.global_ranks[group.rank]})"
            )
        if self._mode != "warn":
            text += f"; {self._heal(differences, group)}"
        if new := [each for each in differences if self._is_due(each.name, step)]:
            if self._mode == "warn":
                text = self._describe(new, group, step)
            warnings.warn(f"{text} (here: rank {group.global_ranks[group.rank]})", stacklevel=2)

    def _describe(self, differences: Sequence[Difference], group: Group, step: int) -> str:
        def since(what: What) -> str:
            return self._equal_steps.since(what, step, step % PARTS)

        sentences = describe_differences(differences, since=since, global_ranks=group.global_ranks)
        return f"replicas differ: {'; '.join(sentences)}"

    def _is_due(self, name: str, step: int) -> bool:
        """Whether to tell of a difference: at first, and then at intervals that double."""
        next_step, interval = self._told.get(name, (0, _FIRST_INTERVAL))
        if self._mode == "warn" and step < next_step:
            return False
        self._told[name] = step + interval, 2 * interval
        return True

    def _heal(self, differences: Sequence[Difference], group: Group) -> str:
        """Give all ranks the value of the majority, or rank 0's; says what was done."""
        entries = {entry.name: entry for entry in self._catalogue.tensors}
        options = {option.name: option for option in self._catalogue.options}
        done = []
        for each in differences:
            source = 0 if self._mode == "heal-from-rank-0" or not each.majority else each.majority[0]
            if each.what is What.TENSOR and (tensor := entries[each.name].get()) is not None:
                self._send(tensor, group, source)
            elif each.what is What.OPTION:
                (value,) = [value for value, ranks in each.ranks_by_value if source in ranks]
                options[each.name].set(value)
            else:
                continue
            done.append(f"{each.name} from rank {group.global_ranks[source]}")
        return f"all ranks have taken over {', '.join(done)}" if done else "buffers are not healed"

    def _send(self, tensor: Tensor, group: Group, source: int) -> None:
        tensor = tensor.detach()
        sent = tensor.to(self._device).contiguous()
        broadcast_in_place(group, [sent], source=source, bytes_at_once=self._bytes_at_once)
        if sent is not tensor:
            with torch.no_grad():
                tensor.copy_(sent)


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
