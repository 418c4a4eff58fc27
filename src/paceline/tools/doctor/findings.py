"""What a check reports: a severity, what was found, and the command that fixes it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Severity(Enum):
    """How bad a finding is: a fault breaks or slows a run, a notice is worth knowing."""

    OK = "ok"
    NOTICE = "notice"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: the check's name.
        severity: how bad it is.
        found: a sentence for people.
        fix: a command to copy that fixes it; empty if there is none.
        data: the same for programs, as JSON values.
    """

    check: str
    severity: Severity
    found: str
    fix: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The entry that ``--json`` prints."""
        return {
            "check": self.check,
            "severity": self.severity.value,
            "found": self.found,
            "fix": self.fix,
            "data": dict(self.data),
        }


def ok(check: str, found: str, **data: Any) -> Finding:
    """A finding that needs no action."""
    return Finding(check, Severity.OK, found, data=data)


def notice(check: str, found: str, fix: str = "", **data: Any) -> Finding:
    """A finding that is worth knowing; a run can go on with it."""
    return Finding(check, Severity.NOTICE, found, fix, data)


def fault(check: str, found: str, fix: str, **data: Any) -> Finding:
    """A finding that must be fixed."""
    return Finding(check, Severity.FAULT, found, fix, data)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Faults, then notices, then the rest; within a severity the order does not change."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: -order.index(finding.severity))


def has_faults(findings: Iterable[Finding]) -> bool:
    """Whether anything must be fixed."""
    return any(finding.severity is Severity.FAULT for finding in findings)
