"""Runs every check of this host that needs no ranks; also checks the software and the user's script."""

import importlib.util
import os
import platform
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import paceline
from paceline.comm.probing import available_backends
from paceline.tools.doctor import connections, host_network, host_resources
from paceline.tools.doctor.findings import Finding, fault, notice, ok
from paceline.tools.doctor.host_resources import (
    gather_cores,
    gather_file_limit,
    gather_shared_memory,
    judge_cores,
    judge_file_limit,
    judge_shared_memory,
)
from paceline.tools.doctor.requested_run import RequestedRun, TargetKind
from paceline.torch_private import TRIED, release

SOFTWARE_CHECK, SCRIPT_CHECK = "software", "script"


def check_host(run: RequestedRun) -> list[Finding]:
    """Run every check of this host. A check that raises becomes a notice."""
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        SOFTWARE_CHECK: lambda: [judge_software(gather_software())],
        "network": lambda: _check_network(run),
        connections.PORT_CHECK: lambda: _check_rendezvous_port(run),
        host_resources.MEMORY_CHECK: lambda: [judge_shared_memory(gather_shared_memory())],
        host_resources.CORES_CHECK: lambda: [judge_cores(gather_cores(), run)],
        host_resources.FILES_CHECK: lambda: [judge_file_limit(gather_file_limit(), run)],
        SCRIPT_CHECK: lambda: _check_script(run),
    }
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check()
        except Exception as error:
            findings.append(notice(name, f"could not be checked ({type(error).__name__}: {error})"))
    return findings


def _check_network(run: RequestedRun) -> Iterator[Finding]:
    facts = host_network.gather_network()
    yield host_network.judge_network(facts, run)
    looked_up = host_network.resolve_host_names(None if run.endpoint is None else run.endpoint.address)
    yield from host_network.judge_host_names(
        looked_up, host=facts.host, own_addresses=facts.outward_addresses
    )


def _check_rendezvous_port(run: RequestedRun) -> Iterator[Finding]:
    if run.endpoint is not None and run.endpoint.port:
        attempt = connections.try_rendezvous_port(run.endpoint)
        yield connections.judge_rendezvous_port(attempt, run.endpoint, host=socket.gethostname())


def _check_script(run: RequestedRun) -> Iterator[Finding]:
    if run.target is not None:
        yield judge_script(run.target, gather_script(run.target, run.kind))


@dataclass(frozen=True)
class SoftwareFacts:
    """The installed versions, and which backends this torch has."""

    python: str
    torch: str
    paceline: str
    backends: dict[str, bool]


def gather_software() -> SoftwareFacts:
    """Look up what is installed."""
    return SoftwareFacts(
        platform.python_version(), torch.__version__, paceline.__version__, available_backends()
    )


def judge_software(software: SoftwareFacts) -> Finding:
    """Whether the installed torch is one that paceline works with."""
    available = [name for name, is_available in software.backends.items() if is_available]
    data = {**vars(software)}
    install = f"pip install 'torch=={TRIED[-1]}.*'"
    if "gloo" not in available:
        return fault(SOFTWARE_CHECK, f"this torch has no gloo (torch: {software.torch})", install, **data)
    if release(software.torch) not in TRIED:
        # paceline uses private parts of torch, which each version may change.
        found = f"paceline was tried with torch {TRIED[0]} to {TRIED[-1]} (torch: {software.torch})"
        return notice(SOFTWARE_CHECK, found, install, **data)
    found = (
        f"torch {software.torch}, paceline {software.paceline}, python {software.python}, "
        f"backends {', '.join(available)}"
    )
    return ok(SOFTWARE_CHECK, found, **data)


@dataclass(frozen=True)
class ScriptProblem:
    """Why ranks could not run the target, and the command that fixes it or shows more, if there is one."""

    reason: str
    fix: str = ""


def gather_script(target: str, kind: TargetKind) -> ScriptProblem | None:
    """Look for the target as a rank would, without running it; None if it can be run."""
    find = {
        TargetKind.SCRIPT: _script_problem,
        TargetKind.MODULE: _module_problem,
        TargetKind.PROGRAM: _program_problem,
    }
    return find[kind](target)


def _script_problem(target: str) -> ScriptProblem | None:
    quoted = shlex.quote(target)
    # Python runs a folder or an archive by the __main__.py inside.
    path = Path(target, "__main__.py") if Path(target).is_dir() else Path(target)
    if path.suffix in (".zip", ".pyz") and path.exists():
        return None
    try:
        compile(path.read_bytes(), str(path), "exec")
    except FileNotFoundError:
        return ScriptProblem(f"there is no such file: give its full path, or its path from {Path.cwd()}")
    except PermissionError:
        return ScriptProblem("it cannot be read", f"chmod a+r {quoted}")
    except OSError as error:
        return ScriptProblem(f"it cannot be read ({error.strerror})", f"ls -l {quoted}")
    except (SyntaxError, ValueError) as error:
        return ScriptProblem(f"it is not valid Python ({error})", f"{sys.executable} -m py_compile {quoted}")
    return None


def _module_problem(target: str) -> ScriptProblem | None:
    show = f"{sys.executable} -c 'import {target}'"
    # A rank looks in the current folder first.
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - sys.path has strings
    try:
        is_there = importlib.util.find_spec(target) is not None
    except Exception as error:
        return ScriptProblem(f"a package that contains it cannot be imported ({error})", show)
    finally:
        del sys.path[0]
    return None if is_there else ScriptProblem("there is no such module", show)


def _program_problem(target: str) -> ScriptProblem | None:
    quoted = shlex.quote(target)
    if shutil.which(target) is not None:
        return None
    if Path(target).is_file():
        return ScriptProblem("it cannot be executed", f"chmod a+x {quoted}")
    return ScriptProblem("there is no such program: give its full path, or add its folder to PATH")


def judge_script(target: str, problem: ScriptProblem | None) -> Finding:
    """Whether ranks can run the target."""
    if problem is not None:
        return fault(SCRIPT_CHECK, f"{target}: {problem.reason}", problem.fix, target=target)
    return ok(SCRIPT_CHECK, f"{target} can be run", target=target)
