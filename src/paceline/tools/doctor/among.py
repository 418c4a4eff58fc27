"""What is wrong among ranks, from what they wrote down."""

from collections.abc import Sequence
from typing import Any

from paceline.tools.doctor import clocks, pairs, reach
from paceline.tools.doctor.asked import Asked
from paceline.tools.doctor.finding import Finding, fault, ok
from paceline.tools.doctor.report import MEETING, Report

RANKS, VERSIONS, DTYPES = "ranks", "versions", "types of element"
COMPARED = ("torch", "paceline", "python")


def judge(report: Report, asked: Asked) -> list[Finding]:
    """Everything that the report says, in the order in which ranks found it out."""
    facts = [*report.facts, *[None] * (asked.world - len(report.facts))]
    hosts = _hosts(facts)
    findings = [*_problems(report.problems, asked), *_silent(report, asked), *_versions(facts)]
    if report.reached:
        findings += reach.judge(report.reached, report.places, hosts)
    if report.looks:
        findings += clocks.judge(report.looks, hosts)
    findings += _dtypes(report.dtypes)
    if seen := [each for found in report.measured for each in found or ()]:
        findings += pairs.judge(seen, [fact["host_id"] if fact else "" for fact in facts])
    return findings


def _hosts(facts: Sequence[Any]) -> list[str]:
    """How each rank's host is called: by its name, and by its address where several have that name."""
    names = {(fact["host"], fact["address"]) for fact in facts if fact}
    return [_host(fact, [name for name, _ in names]) for fact in facts]


def _host(fact: Any, names: Sequence[str]) -> str:
    if fact is None:
        return "an unknown host"
    return f"{fact['host']} ({fact['address']})" if names.count(fact["host"]) > 1 else str(fact["host"])


def _problems(problems: Sequence[Any], asked: Asked) -> list[Finding]:
    """What stopped ranks; one finding for all that say the same on one host."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            alike.setdefault((problem["host"], problem["stage"], problem["words"]), []).append(rank)
    return [_stopped(*key, ranks, asked) for key, ranks in alike.items()]


def _stopped(host: str, stage: str, words: str, ranks: list[int], asked: Asked) -> Finding:
    fix = "export TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_CPP_LOG_LEVEL=INFO"
    if stage == MEETING:
        # The first host has told the others a name of its own that means nothing to them, or something else.
        address = "localhost" if asked.endpoint is None else asked.endpoint.address
        fix = f"paceline run --local-addr {address} …    # on the first host"
    found = f"ranks {ranks} on {host} were stopped while {stage} ({words})"
    return fault(RANKS, found, fix, ranks=ranks, stage=stage)


def _silent(report: Report, asked: Asked) -> list[Finding]:
    """Ranks that others have waited for in vain, and that have not said why."""
    stopped = {rank for rank, problem in enumerate(report.problems) if problem is not None}
    stages = (report.facts, report.places, report.reached, report.looks, report.dtypes, report.measured)
    missing = {rank for told in stages for rank, words in enumerate(told) if words is None}
    if not report.facts and not stopped:
        missing = set(range(asked.world))
    silent = sorted(missing - stopped)
    if not silent:
        return []
    found = f"ranks said nothing (ranks: {silent})"
    return [fault(RANKS, found, "paceline doctor …    # on their hosts", ranks=silent)]


def _versions(facts: Sequence[Any]) -> list[Finding]:
    known = [(rank, fact) for rank, fact in enumerate(facts) if fact is not None]
    if not known:
        return []
    findings = []
    for name in COMPARED:
        by_version: dict[str, list[int]] = {}
        for rank, fact in known:
            by_version.setdefault(fact[name], []).append(rank)
        if len(by_version) > 1:
            findings.append(_differs(name, by_version))
    if not findings:
        findings.append(
            ok(VERSIONS, "all ranks have the same torch, paceline and python", **_same(known[0][1]))
        )
    return findings


def _differs(name: str, by_version: dict[str, list[int]]) -> Finding:
    words = "; ".join(f"{version} on ranks {ranks}" for version, ranks in by_version.items())
    wanted = max(by_version, key=lambda version: len(by_version[version]))
    fix = f"pip install '{name}=={wanted}'    # on all hosts"
    if name == "python":
        fix = f"paceline run …    # with python {wanted} on all hosts"
    return fault(VERSIONS, f"ranks have different {name} ({words})", fix, **{name: by_version})


def _same(fact: Any) -> dict[str, str]:
    return {name: fact[name] for name in COMPARED}


def _dtypes(everyone: Sequence[Any]) -> list[Finding]:
    """A backend takes what it takes on every rank."""
    told = [each for each in everyone if each is not None]
    findings = []
    for backend in told[0] if told else ():
        names = told[0][backend]
        refused = [name for name in names if any(each[backend][name] is not None for each in told)]
        taken = [name for name in names if name not in refused]
        words = f"{backend} adds up {', '.join(taken)}" + (f"; not {', '.join(refused)}" if refused else "")
        findings.append(ok(DTYPES, words, backend=backend, taken=taken, refused=refused))
    return findings
