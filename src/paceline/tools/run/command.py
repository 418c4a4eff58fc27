"""``paceline run``: a script on several ranks."""

import argparse
import os
import sys
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import Std

from paceline.recording.recorder import FOLDER_VARIABLE
from paceline.tools.run import agent, worker
from paceline.tools.run.failures import folded, verdict

DEFAULT_RANKS = "2"
NOT_FOUND = 127
USAGE = (
    "%(prog)s [-n RANKS] [--patch] [--log-dir DIR] [--record DIR] [torchrun's options] SCRIPT [ARGUMENT ...]"
)
ONE_HOST = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
# Options of torchrun that say what is done with output in ways that are not ours.
LEFT_OUT = ("logs_specs", "duplicate_stdout_filters", "duplicate_stderr_filters")


@click.command(
    # One parser has torchrun's options and ours, so that they can be given in any order.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Run a script on several ranks, as torchrun does."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        job = _job(options)
        if options.record:
            Path(options.record).mkdir(parents=True, exist_ok=True)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        parser.error(str(error))
    ranks = job.config.nproc_per_node
    if ranks > agent.cores():
        _say(f"{ranks} ranks share {agent.cores()} cores: each gets one thread")
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        ending = agent.run(job, Path(folder), stdout=sys.stdout, stderr=sys.stderr)
    leave(_tell(ending))


def _parser() -> argparse.ArgumentParser:
    """The parser of torchrun, with our own options."""
    parser, ours = ranks_parser()
    parser.prog = "paceline run"
    parser.usage = USAGE
    parser.description = (
        "Runs a script on several ranks, on torch's elastic agent. torchrun's options are all here."
    )
    ours.add_argument(
        "--patch", action="store_true", help="put paceline's wrappers in the place of torch's in the script"
    )
    ours.add_argument("--record", metavar="DIR", help="have each rank record what it does when, in DIR")
    return parser


def ranks_parser() -> tuple[argparse.ArgumentParser, argparse._ArgumentGroup]:
    """The parser of torchrun with our number of ranks, and the group for options of ours."""
    parser = torchrun.get_args_parser()
    ours = parser.add_argument_group("paceline")
    ours.add_argument(
        "-n",
        "--ranks",
        dest="nproc_per_node",
        metavar="RANKS",
        default=argparse.SUPPRESS,
        help=f"ranks on this host, as --nproc-per-node; default: {DEFAULT_RANKS}",
    )
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=DEFAULT_RANKS)
    return parser, ours


def _job(options: argparse.Namespace) -> agent.Job:
    """What the options ask for."""
    if left_out := [name for name in LEFT_OUT if getattr(options, name)]:
        raise ValueError(f"not done here: use --log-dir (options: {', '.join(left_out)})")
    if options.redirects != "0" and not options.log_dir:
        raise ValueError("what is not shown needs a place to be kept: use --log-dir (options: redirects)")
    ranks = torchrun.determine_local_world_size(options.nproc_per_node)
    if ranks < 1:
        raise ValueError(f"at least one rank is needed (ranks: {ranks})")
    command = _command(options)
    environment = agent.environment(ranks)
    if options.record:
        environment[FOLDER_VARIABLE] = str(Path(options.record).resolve())
    # torch's own reading of the options warns and decides where this is not set.
    os.environ["OMP_NUM_THREADS"] = environment["OMP_NUM_THREADS"]
    log_dir = options.log_dir
    # Otherwise a folder for logs is made, which stays empty.
    options.log_dir = os.devnull
    choose_meeting_place(options)
    config, _, _ = torchrun.config_from_args(options)
    return agent.Job(
        config=config,
        command=command,
        log_dir=Path(log_dir) if log_dir else None,
        environment=environment,
        only_logged=_only_logged(options),
        shown_ranks=config.logs_specs._local_ranks_filter if config.logs_specs else None,
        failed_seconds=_failed_seconds(options),
        adopts_all=True,
    )


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    """What each rank runs."""
    target, arguments = options.training_script, options.training_script_args
    if options.no_python and options.patch:
        raise ValueError("only Python can be patched (options: --no-python, --patch)")
    if options.no_python and not options.run_path:
        return target, *arguments
    if not options.module and not Path(target).exists():
        raise FileNotFoundError(f"there is no such script (script: {target}, here: {Path.cwd()})")
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    patch = ["--patch"] if options.patch else []
    return (
        python,
        "-u",
        worker.__file__,
        *patch,
        "--module" if options.module else "--script",
        target,
        *arguments,
    )


def choose_meeting_place(options: argparse.Namespace) -> None:
    """One host meets at a free port, unless it is told where."""
    _, hosts = torchrun.parse_min_max_nnodes(options.nnodes)
    is_told = options.rdzv_backend != "static" or options.rdzv_endpoint or options.master_port is not None
    if options.standalone or (hosts == 1 and not is_told):
        vars(options).update(ONE_HOST, rdzv_id=str(uuid.uuid4()))
    if options.master_port is None:
        options.master_port = 29500


def _failed_seconds(options: argparse.Namespace) -> int:
    """How long ranks may take to end when another has failed: as long as was said, or a moment."""
    told = options.shutdown_timeout
    told = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") if told is None else told
    return agent.FAILED_SECONDS if told is None else int(told)


def _only_logged(options: argparse.Namespace) -> Std | dict[int, Std]:
    """Which streams torchrun's ``--redirects`` keeps from the screen."""
    return Std.from_str(options.redirects)


def _tell(ending: agent.Ending) -> int:
    """Say how it ended; the exit code."""
    told = verdict(ending.failures)
    if ending.signal is not None:
        is_real = told is not None and not told.first.is_consequence
        words = [str(told)] if is_real else folded(ending.failures)
        _say("\n".join([f"ended by {ending.signal.name}", *words]))
        return 128 + ending.signal
    if told is not None:
        _say(str(told))
        return told.first.shell_code
    if ending.error is not None:
        _say(_agent_words(ending.error))
        return NOT_FOUND if isinstance(ending.error, FileNotFoundError) else 1
    return 0


def leave(code: int) -> NoReturn:
    """Exit at once: taking torch apart would take longer than ending all ranks did."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _agent_words(error: Exception) -> str:
    """What went wrong before there were ranks."""
    words = f"the ranks could not be started ({type(error).__name__}: {error})"
    if "EADDRINUSE" in str(error):
        words += "\nthe port is in use: give another one, or none for a free one"
    return words


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
