"""Starts the ranks that look at each other, as any ranks are started."""

import sys
import tempfile
from pathlib import Path

from paceline.tools.doctor import among
from paceline.tools.doctor import rank as in_rank
from paceline.tools.doctor.asked import Asked
from paceline.tools.doctor.finding import Finding, fault
from paceline.tools.doctor.report import read
from paceline.tools.run import agent, worker
from paceline.tools.run.failures import verdict

# What each rank runs.
COMMAND = (sys.executable, "-u", worker.__file__, "--module", in_rank.__name__)


def examine(job: agent.Job, asked: Asked) -> tuple[list[Finding], int | None]:
    """Start ranks, and judge what they found out; also the signal that ended them, if one did."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        # Standard output is for the findings.
        ending = agent.run(job, Path(folder), stdout=sys.stderr, stderr=sys.stderr)
        report = read(Path(folder))
    findings = _ending(ending, asked)
    # Ranks that could not be started, or failed, have said nothing, and that is told already.
    if report.facts or report.problems or not findings:
        findings += among.judge(report, asked)
    return findings, ending.signal


def _ending(ending: agent.Ending, asked: Asked) -> list[Finding]:
    """What kept ranks from being started, or from ending well."""
    if ending.error is not None:
        words = f"{type(ending.error).__name__}: {ending.error}".partition("\n")[0]
        if asked.hosts > 1:
            found = f"hosts did not meet in time (hosts: {asked.hosts}, at: {asked.endpoint}, {words})"
            return [fault(among.RANKS, found, "paceline doctor …    # on every host, with the same options")]
        return [fault(among.RANKS, f"ranks could not be started ({words})", "paceline doctor --no-ranks")]
    told = verdict(ending.failures)
    if told is None or ending.signal is not None:
        return []
    # A signal came from outside; otherwise the first thing that can fail is what a rank imports.
    is_signal = told.first.exit_code < 0
    fix = "sudo dmesg | tail" if is_signal else f"{sys.executable} -c 'import {in_rank.__name__}'"
    return [fault(among.RANKS, f"a rank failed ({told})", fix)]
