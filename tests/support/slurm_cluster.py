"""A cluster of Slurm on this machine: a controller and two nodes, with a configuration of their own.

The nodes' names are addresses of the loopback, so that ranks on them can be reached by name.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpi_wheels import MissingLauncherError

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
NODES = ("127.0.0.1", "127.0.0.2")
START_SECONDS = 30.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SchedulerType=sched/builtin
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES OverSubscribe=YES MaxTime=INFINITE State=UP
SlurmdParameters=config_overrides
"""


@contextmanager
def slurm_cluster() -> Iterator[dict[str, str]]:
    """Start the cluster; yields the variables by which ``srun`` and ``sbatch`` find it."""
    if (reason := why_not()) is not None:
        raise MissingLauncherError(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        yield _start(folder)
    finally:
        _stop(folder)
        shutil.rmtree(folder, ignore_errors=True)


def why_not() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    path = os.environ["PATH"] + ":/usr/sbin"
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"not installed: {', '.join(missing)} (packages slurm-wlm and munge)" if missing else None


def _start(folder: Path) -> dict[str, str]:
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    configuration.write_text(
        CONFIGURATION.format(host=host, ports=_free_ports(3), nodes=NODES, folder=folder)
    )
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
    files |= {"log-file": "munged.log", "seed-file": "munge.seed"}
    _run("munged", "--force", *(f"--{option}={folder / name}" for option, name in files.items()))
    _run("slurmctld", "-f", str(configuration), "-c")
    for node in NODES:
        _run("slurmd", "-f", str(configuration), "-N", node)
    environment = {"SLURM_CONF": str(configuration)}
    _wait_until_idle(environment)
    return environment


def _run(*command: str) -> None:
    environment = os.environ | {"PATH": os.environ["PATH"] + ":/usr/sbin"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_SECONDS)
    assert ran.returncode == 0, f"{command}\n{ran.stderr}"


def _wait_until_idle(environment: dict[str, str]) -> None:
    until = time.monotonic() + START_SECONDS
    states: list[str] = []
    while states != ["idle"] * len(NODES):
        assert time.monotonic() < until, f"the nodes are not ready: {states}"
        time.sleep(0.1)
        listed = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%t"],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )
        states = listed.stdout.split()


def _stop(folder: Path) -> None:
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
