"""``paceline.launch``: calls a function on several ranks, from a program or a notebook."""

import os
import pickle
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import LaunchError, OptionError

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    n: int = 2,
    *,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    log_dir: str | Path | None = None,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on ``n`` ranks of this host, and return their results in rank order.

    Each rank is a new process with the environment variables that torchrun sets, so ``fn`` calls
    ``init_process_group`` itself. The function, its arguments and its results are pickled with cloudpickle,
    so ``fn`` may be defined in a notebook or in the main program. What ranks print appears line by line with
    the rank's number; with ``log_dir`` it is also written to files.

    Raises:
        LaunchError: a rank failed; the message has the traceback of the first failure.
    """
    if n < 1:
        raise OptionError(f"at least one rank is needed (n: {n})")
    # Not at the top of the file: importing paceline should not import the launcher.
    from paceline.tools.run import agent, worker
    from paceline.tools.run.processes import guarded_folder

    with guarded_folder(worker.FOLDER, agent.shutdown_seconds()) as folder:
        (folder / "call").write_bytes(_pickled(fn, args, kwargs or {}))
        _run(folder, n, Path(log_dir) if log_dir is not None else None)
        return [_result(folder / "0" / f"{rank}.result", rank) for rank in range(n)]


def _result(file: Path, rank: int) -> Any:
    if not file.exists():
        raise LaunchError(f"rank {rank} exited before fn returned (exit code: 0)")
    return pickle.loads(file.read_bytes())  # noqa: S301 - from the ranks that were just started


def _pickled(fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    import cloudpickle

    try:
        call = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        raise TypeError(f"fn and its arguments must be picklable ({error})") from error
    main = getattr(sys.modules["__main__"], "__file__", None)
    return pickle.dumps({"path": sys.path, "main": main, "call": call})


def _run(folder: Path, n: int, log_dir: Path | None) -> None:
    # As above.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from paceline.tools.run import agent, worker

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        # Otherwise torch creates a folder for logs, which would stay empty.
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    command = (sys.executable, "-u", worker.__file__, "--call", str(folder / "call"))
    job = agent.Job(
        config,
        command,
        log_dir=log_dir,
        environment=agent.rank_environment(n),
        shutdown_seconds=agent.shutdown_seconds(),
    )
    result = agent.run(job, folder, stdout=sys.stdout, stderr=sys.stderr)
    if result.signal is not None:
        # The caller handles it as if there had been no ranks.
        signal.raise_signal(result.signal)
    if result.error is not None:
        raise LaunchError(f"the ranks could not be started ({result.error})") from result.error
    if result.summary is not None:
        raise LaunchError(str(result.summary))
