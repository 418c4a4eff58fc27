"""Starts ranks that examine each other, and judges the facts that they gathered."""

import sys
from collections.abc import Sequence
from typing import Any

from paceline.tools.doctor import rank_program
from paceline.tools.doctor.connections import judge_connections
from paceline.tools.doctor.findings import Finding, fault, ok
from paceline.tools.doctor.rank_measurements import judge_clocks, judge_pairs
from paceline.tools.doctor.rank_program import RENDEZVOUS, RankFacts, load_facts
from paceline.tools.doctor.requested_run import RequestedRun
from paceline.tools.run import agent, worker
from paceline.tools.run.processes import guarded_folder

RANKS_CHECK, VERSIONS_CHECK, DTYPES_CHECK = "ranks", "versions", "dtypes"
COMPARED_VERSIONS = ("torch", "paceline", "python")
RANK_COMMAND = (sys.executable, "-u", worker.__file__, "--module", rank_program.__name__)


def check_ranks(job: agent.Job, run: RequestedRun) -> tuple[list[Finding], int | None]:
    """Start ranks and judge what they found; also the signal that stopped them, if one did."""
    with guarded_folder(worker.FOLDER) as folder:
        # Standard output is for the findings.
        result = agent.run(job, folder, stdout=sys.stderr, stderr=sys.stderr)
        facts = load_facts(folder)
    findings = _judge_result(result, run)
    # Ranks that could not be started or failed have gathered nothing, which is reported already.
    if facts.software or facts.failures or not findings:
        findings += judge_ranks(facts, run)
    return findings, result.signal


def _judge_result(result: agent.JobResult, run: RequestedRun) -> list[Finding]:
    """What prevented ranks from being started, or from ending with exit code 0."""
    if result.error is not None:
        error = f"{type(result.error).__name__}: {result.error}".partition("\n")[0]
        if run.hosts > 1:
            found = f"hosts did not meet in time (hosts: {run.hosts}, at: {run.endpoint}, {error})"
            return [fault(RANKS_CHECK, found, "paceline doctor …    # on every host, with the same options")]
        return [fault(RANKS_CHECK, f"ranks could not be started ({error})", "paceline doctor --no-ranks")]
    summary = result.summary
    if summary is None or result.signal is not None:
        return []
    # A signal came from outside. Otherwise the first thing that can fail is an import.
    was_signal = summary.root_cause.exit_code < 0
    fix = "sudo dmesg | tail" if was_signal else f"{sys.executable} -c 'import {rank_program.__name__}'"
    return [fault(RANKS_CHECK, f"a rank failed ({summary})", fix)]


def judge_ranks(facts: RankFacts, run: RequestedRun) -> list[Finding]:
    """Judge all facts, in the order in which ranks gathered them."""
    software = [*facts.software, *[None] * (run.world_size - len(facts.software))]
    hosts = _host_names(software)
    findings = [
        *_judge_failures(facts.failures, run),
        *_judge_silence(facts, run),
        *_judge_versions(software),
    ]
    if facts.connection_errors:
        findings += judge_connections(facts.connection_errors, facts.listeners, hosts)
    if facts.clock_readings:
        findings += judge_clocks(facts.clock_readings, hosts)
    findings += _judge_dtypes(facts.dtype_errors)
    if speeds := [speed for of_rank in facts.pair_speeds for speed in of_rank or ()]:
        findings += judge_pairs(speeds, [each["host_id"] if each else "" for each in software])
    return findings


def _host_names(software: Sequence[Any]) -> list[str]:
    """The name of each rank's host, with its address if several hosts have that name."""
    names = [name for name, _ in {(each["host"], each["address"]) for each in software if each}]
    return [_host_name(each, names) for each in software]


def _host_name(software: Any, names: Sequence[str]) -> str:
    if software is None:
        return "an unknown host"
    name = str(software["host"])
    return f"{name} ({software['address']})" if names.count(name) > 1 else name


def _judge_failures(failures: Sequence[Any], run: RequestedRun) -> list[Finding]:
    """What stopped ranks; one finding for all ranks of a host with the same error."""
    ranks_by_error: dict[tuple[str, str, str], list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            key = (failure["host"], failure["stage"], failure["error"])
            ranks_by_error.setdefault(key, []).append(rank)
    return [_stopped(*key, ranks, run) for key, ranks in ranks_by_error.items()]


def _stopped(host: str, stage: str, error: str, ranks: list[int], run: RequestedRun) -> Finding:
    fix = "export TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_CPP_LOG_LEVEL=INFO"
    if stage == RENDEZVOUS:
        # Most likely the first host told the others a name of its own that they cannot resolve.
        address = "localhost" if run.endpoint is None else run.endpoint.address
        fix = f"paceline run --local-addr {address} …    # on the first host"
    found = f"ranks {ranks} on {host} failed at this stage: {stage} ({error})"
    return fault(RANKS_CHECK, found, fix, ranks=ranks, stage=stage)


def _judge_silence(facts: RankFacts, run: RequestedRun) -> list[Finding]:
    """Ranks that others waited for without success, and that reported no error."""
    failed = {rank for rank, failure in enumerate(facts.failures) if failure is not None}
    gathered = (
        facts.software,
        facts.listeners,
        facts.connection_errors,
        facts.clock_readings,
        facts.dtype_errors,
        facts.pair_speeds,
    )
    missing = {rank for by_rank in gathered for rank, value in enumerate(by_rank) if value is None}
    if not facts.software and not failed:
        missing = set(range(run.world_size))
    silent = sorted(missing - failed)
    if not silent:
        return []
    found = f"ranks did not answer (ranks: {silent})"
    return [fault(RANKS_CHECK, found, "paceline doctor …    # on their hosts", ranks=silent)]


def _judge_versions(software: Sequence[Any]) -> list[Finding]:
    known = [(rank, each) for rank, each in enumerate(software) if each is not None]
    if not known:
        return []
    findings = []
    for package in COMPARED_VERSIONS:
        by_version: dict[str, list[int]] = {}
        for rank, each in known:
            by_version.setdefault(each[package], []).append(rank)
        if len(by_version) > 1:
            findings.append(_versions_differ(package, by_version))
    if not findings:
        same = {package: known[0][1][package] for package in COMPARED_VERSIONS}
        findings.append(ok(VERSIONS_CHECK, "all ranks have the same torch, paceline and python", **same))
    return findings


def _versions_differ(package: str, by_version: dict[str, list[int]]) -> Finding:
    versions = "; ".join(f"{version} on ranks {ranks}" for version, ranks in by_version.items())
    wanted = max(by_version, key=lambda version: len(by_version[version]))
    fix = f"pip install '{package}=={wanted}'    # on all hosts"
    if package == "python":
        fix = f"paceline run …    # with python {wanted} on all hosts"
    found = f"ranks have different versions of {package} ({versions})"
    return fault(VERSIONS_CHECK, found, fix, **{package: by_version})


def _judge_dtypes(dtype_errors: Sequence[Any]) -> list[Finding]:
    """The dtypes that each backend can all-reduce on every rank."""
    known = [each for each in dtype_errors if each is not None]
    findings = []
    for backend in known[0] if known else ():
        dtypes = known[0][backend]
        refused = [dtype for dtype in dtypes if any(each[backend][dtype] is not None for each in known)]
        taken = [dtype for dtype in dtypes if dtype not in refused]
        found = f"{backend} can all-reduce {', '.join(taken)}" + (
            f"; not {', '.join(refused)}" if refused else ""
        )
        findings.append(ok(DTYPES_CHECK, found, backend=backend, taken=taken, refused=refused))
    return findings
