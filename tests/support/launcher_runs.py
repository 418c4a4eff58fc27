"""Starts two ranks with each launcher, and looks at how they begin and end."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path

from mpi_wheels import MissingLauncherError, mpirun
from ray_runs import environment as ray_environment
from running import MARK, marked
from slurm_cluster import slurm_cluster

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "any_launcher.py"
SCRIPTS = Path(__file__).parent / "launcher_scripts"
UNFINISHED = SCRIPTS / "unfinished.py"
SECONDS = 100.0  # what takes longer hangs
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# Variables of a launcher that may have started the tests themselves.
FOREIGN = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*|GROUP_.*|SLURM_.*|OMPI_.*|PMIX?_.*|PET_.*|TORCHELASTIC_.*)"
)


@dataclass(frozen=True)
class Launch:
    """How a launcher starts two ranks.

    Attributes:
        command: the command line, up to the script.
        variables: what it needs in its environment.
        interrupts: how often it wants Ctrl-C.
        local_ranks: the ranks' numbers on their hosts.
    """

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    interrupts: int = 1
    local_ranks: tuple[int, int] = (0, 1)


Open = Callable[[], AbstractContextManager[Launch]]


@contextmanager
def torchrun() -> Iterator[Launch]:
    yield Launch([*TORCHRUN, "--nproc-per-node=2"])


@contextmanager
def paceline_run() -> Iterator[Launch]:
    yield Launch([str(Path(sys.executable).with_name("paceline")), "run", "-n", "2"])


@contextmanager
def open_mpi() -> Iterator[Launch]:
    yield Launch([mpirun("openmpi"), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable])


@contextmanager
def mpich() -> Iterator[Launch]:
    yield Launch([mpirun("mpich"), "-n", "2", sys.executable])


@contextmanager
def srun() -> Iterator[Launch]:
    with slurm_cluster() as variables:
        # The first Ctrl-C has srun show the tasks, and a second one within a second end them.
        yield Launch(["srun", "-n", "2", sys.executable], variables, interrupts=2)


@contextmanager
def train_job() -> Iterator[Launch]:
    """torchrun in two pods, with the variables of Kubeflow's trainer."""
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "{pod}"}
    variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    yield Launch([*_pods(variables), *TORCHRUN], local_ranks=(0, 0))


@contextmanager
def pytorch_job() -> Iterator[Launch]:
    """A script in two pods, with the variables of Kubeflow's training operator."""
    variables = {"RANK": "{pod}", "WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NODE_RANK": "{pod}"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    yield Launch([*_pods(variables), sys.executable])


@contextmanager
def ray_train() -> Iterator[Launch]:
    if util.find_spec("ray") is None:
        raise MissingLauncherError("ray is not installed")
    # Ray's sockets are in this folder, and the length of their paths is limited.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield Launch([sys.executable, str(SCRIPTS / "ray_workers.py")], ray_environment(Path(folder)))


def _pods(variables: Mapping[str, str]) -> list[str]:
    pairs = [f"{name}={value}" for name, value in variables.items()]
    return [sys.executable, str(SCRIPTS / "pods.py"), *pairs, "--"]


# In the order of the table.
LAUNCHERS: dict[str, Open] = {
    "torchrun": torchrun,
    "paceline run": paceline_run,
    "mpirun of Open MPI": open_mpi,
    "mpirun of MPICH": mpich,
    "srun of Slurm": srun,
    "torchrun with Kubeflow's PET_*": train_job,
    "RANK and WORLD_SIZE, as by Kubeflow's PyTorchJob": pytorch_job,
    "Ray Train": ray_train,
}


@dataclass(frozen=True)
class Ended:
    """How a launcher's command ended, and what it left behind; the code is None if it did not end."""

    code: int | None
    output: str
    left: Sequence[str]


class Started:
    """A command in a session of its own, as a shell starts it.

    Args:
        command: the command line.
        variables: what it needs in its environment.
        folder: for its output; its name marks its processes.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # As a shell's background jobs have it. Ranks would inherit it, and not see a Ctrl-C.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._folder = folder
        self._files = _shared_files()
        self._output = Path(folder) / "output"
        with self._output.open("w") as file:
            self._process = subprocess.Popen(
                command,
                env=clean | variables | {MARK: folder},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, *texts: str) -> None:
        """Wait until the output has these texts."""
        until = time.monotonic() + SECONDS
        while not all(text in self._output.read_text() for text in texts):
            assert time.monotonic() < until, f"has not appeared: {texts}\n{self._output.read_text()}"
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.killpg(self._process.pid, signal.SIGINT)  # a terminal sends it to the whole group

    def end(self) -> Ended:
        """Wait for its end. If it does not come, the processes are what it leaves."""
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(SECONDS)
        left = [f"process {pid}" for pid in self._processes_left()]
        return Ended(code, self._output.read_text(), [*left, *(_shared_files() - self._files)])

    def _processes_left(self) -> list[int]:
        """Processes that are still there a while after the command has ended."""
        until = time.monotonic() + 5.0
        while (pids := marked(self._folder)) and time.monotonic() < until:
            time.sleep(0.05)
        return pids

    def kill(self) -> None:
        """End what is left."""
        for pid in marked(self._folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(SECONDS)


@contextmanager
def started(command: Sequence[str], variables: Mapping[str, str] | None = None) -> Iterator[Started]:
    """Start a command; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        process = Started(command, variables or {}, folder)
        try:
            yield process
        finally:
            process.kill()


def run(command: Sequence[str], variables: Mapping[str, str] | None = None) -> Ended:
    """Run a command to its end."""
    with started(command, variables) as process:
        return process.end()


def train(launch: Launch) -> Ended:
    """Run the example."""
    return run([*launch.command, str(EXAMPLE)], launch.variables)


def fail(launch: Launch) -> Ended:
    """Run ranks of which one fails."""
    return run([*launch.command, str(UNFINISHED), "fail"], launch.variables)


def interrupt(launch: Launch) -> Ended:
    """Press Ctrl-C while ranks train."""
    with started([*launch.command, str(UNFINISHED), "run"], launch.variables) as process:
        process.wait_for("rank 0 trains", "rank 1 trains")
        for number in range(launch.interrupts):
            time.sleep(0.2 * number)
            process.interrupt()
        return process.end()


def reference_sha256() -> str:
    """The parameters with which the example ends under torchrun."""
    with torchrun() as launch:
        ended = train(launch)
    found = sha256_in(ended.output)
    assert found is not None, ended.output
    return found


def outcomes(launch: Launch, sha256: str) -> dict[str, str]:
    """What is wrong with each outcome; nothing where all is well."""
    trained, failed, interrupted = train(launch), fail(launch), interrupt(launch)
    expected = [f"rank {rank} of 2, local rank {local}, on" for rank, local in enumerate(launch.local_ranks)]
    ranks = [line.rpartition(" ")[0] for line in ranks_of(trained.output)]
    found = sha256_in(trained.output)
    return {
        "starts": _problem(trained, trained.code == 0),
        "right rank and world": "" if ranks == expected else f"{ranks}",
        "same sha256": "" if found == sha256 else f"{found}",
        "a failing rank ends all": _problem(failed, failed.code != 0 and "this rank fails" in failed.output),
        "Ctrl-C ends all": _problem(interrupted, interrupted.code != 0),
    }


def _problem(ended: Ended, is_right: bool) -> str:
    if is_right and not ended.left:
        return ""
    return f"exit code {ended.code}, left: {ended.left}, output:\n{ended.output}"


def ranks_of(output: str) -> list[str]:
    """What the example's ranks say about themselves."""
    # Ray prints what its workers say more than once.
    return sorted({*re.findall(r"rank \d+ of \d+, local rank \d+, on \S+", output)})


def sha256_in(output: str) -> str | None:
    found = re.search(r"sha256 ([0-9a-f]{64})\b", output)
    return found and found[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _shared_files() -> set[str]:
    """What shared memory may leave behind: segments that ranks in other containers can open."""
    return {str(path) for path in Path("/dev/shm").glob("paceline*")}
