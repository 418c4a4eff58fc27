"""What a check has to say."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Severity(Enum):
    """How bad it is: a fault breaks a run or spoils it, a notice is worth knowing."""

    OK = "ok"
    NOTICE = "notice"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: the check's name.
        severity: how bad it is.
        found: what was found, in words.
        fix: a line to copy that mends it.
        data: the same for programs: what JSON can hold.
    """

    check: str
    severity: Severity
    found: str
    fix: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """What ``--json`` prints of it."""
        return {
            "check": self.check,
            "severity": self.severity.value,
            "found": self.found,
            "fix": self.fix,
            "data": dict(self.data),
        }


def ok(check: str, found: str, **data: Any) -> Finding:
    """All is well."""
    return Finding(check, Severity.OK, found, data=data)


def notice(check: str, found: str, fix: str = "", **data: Any) -> Finding:
    """Worth knowing."""
    return Finding(check, Severity.NOTICE, found, fix, data)


def fault(check: str, found: str, fix: str, **data: Any) -> Finding:
    """Breaks a run, or spoils it."""
    return Finding(check, Severity.FAULT, found, fix, data)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Faults, then notices, then the rest; otherwise in the order in which they were found."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: -order.index(finding.severity))


def has_faults(findings: Iterable[Finding]) -> bool:
    """Whether anything must be mended."""
    return any(finding.severity is Severity.FAULT for finding in findings)
