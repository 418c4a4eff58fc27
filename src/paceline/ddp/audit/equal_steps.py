"""Past looks: when each part was last equal on all ranks, and a file for ``paceline audit``."""

from collections.abc import Sequence

from paceline.ddp.audit.verdict import What
from paceline.recording.audit_file import AuditWriter


class EqualSteps:
    """Remembers in which steps the ranks were equal.

    Args:
        writer: of the file, if the run is recorded.

    Attributes:
        writer: as given.
    """

    def __init__(self, writer: AuditWriter | None = None) -> None:
        self.writer = writer
        self._equal: dict[int, int] = {}
        self._last_equal: int | None = None

    def restart(self, parts: Sequence[Sequence[str]]) -> None:
        """Parts have other tensors from now on; gives their names."""
        self._equal.clear()
        if self.writer is not None:
            self.writer.write_layout(parts)

    def note_equal(self, step: int, part: int) -> None:
        """All ranks were equal in what they looked at in a step."""
        self._equal[part] = step
        self._last_equal = step

    def since(self, what: What, step: int, part: int) -> str:
        """When a difference that was found in a step may have begun."""
        if what is What.BUFFER:
            return f"before the forward of step {step}"
        equal = self._equal.get(part) if what is What.TENSOR else self._last_equal
        return f"in step {step} for the first time" if equal is None else f"since steps {equal} to {step}"
