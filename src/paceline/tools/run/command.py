"""``paceline run``: runs a script on several ranks."""

import argparse
import os
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import Std

from paceline.comm.roster import LOST_AFTER_VARIABLE
from paceline.recording.files import make_folder
from paceline.recording.ledger import LEDGER_VARIABLE
from paceline.recording.recorder import FOLDER_VARIABLE
from paceline.tools.formatting import plural, printable
from paceline.tools.run import agent, patch_torch, worker
from paceline.tools.run.failures import in_lines
from paceline.tools.run.processes import guarded_folder
from paceline.tools.run.rosters import HostError
from paceline.tools.run.run_watch import StalledRunError, parse_stall
from paceline.training import checkpoints

DEFAULT_RANKS = "2"
EXIT_NOT_FOUND = 127
EXIT_STALLED = 1
USAGE = (
    "%(prog)s [-n RANKS] [--heal] [--checkpoint DIR] [--patch] [--log-dir DIR] [--record DIR] "
    "[--stall kill:SECONDS] "
    "[torchrun's options] SCRIPT [ARGUMENT ...]"
)
NOTHING_PATCHED = (
    "--patch had no effect: no DistributedDataParallel or DataParallel was made "
    "in a process in which it replaces torch's"
)
ONE_HOST = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
# torchrun's options that control output in ways that we do not have.
UNSUPPORTED = ("logs_specs", "duplicate_stdout_filters", "duplicate_stderr_filters")


@click.command(
    # argparse parses everything, so that torchrun's options and ours can be given in any order.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Run a script on several ranks, like torchrun."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        job = _job(options)
        _make_folders(options.record, options.checkpoint, job.log_dir)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        parser.error(str(error))
    ranks = job.config.nproc_per_node
    if ranks > agent.available_cores():
        _say(_shared_cores(ranks, job.environment["OMP_NUM_THREADS"]))
    with guarded_folder(worker.FOLDER, job.shutdown_seconds) as folder:
        result = agent.run(job, folder, stdout=sys.stdout, stderr=sys.stderr)
        has_patched = any(folder.glob(f"*/{patch_torch.NOTE}"))
    code = _report(result)
    # A run that was stopped, or has failed, may have ended before it came to its wrapper.
    if options.patch and code == 0 and not has_patched:
        _say(NOTHING_PATCHED)
    exit_now(code)


def _shared_cores(ranks: int, threads: str) -> str:
    """What is told if there are more ranks than cores; ``threads`` is OMP_NUM_THREADS, perhaps a user's."""
    each = plural(int(threads), "thread") if threads.isdecimal() else f"OMP_NUM_THREADS={printable(threads)}"
    return f"{plural(ranks, 'rank')} share {plural(agent.available_cores(), 'core')}: each gets {each}"


def _parser() -> argparse.ArgumentParser:
    """The parser of torchrun, with our own options."""
    parser, ours = ranks_parser()
    parser.prog = "paceline run"
    parser.usage = USAGE
    parser.description = (
        "Runs a script on several ranks with torch's elastic agent. It accepts all of torchrun's options."
    )
    ours.add_argument(
        "--patch", action="store_true", help="replace torch's wrappers by paceline's in the script"
    )
    ours.add_argument(
        "--record", metavar="DIR", help="record the steps of each rank in DIR, for paceline report"
    )
    ours.add_argument(
        "--stall",
        metavar="kill:SECONDS",
        help="end the run if a rank is stalled for SECONDS (default: wait for the group's timeout)",
    )
    _add_healing(parser.add_argument_group("paceline, for scripts that train in paceline.Run"))
    return parser


def _add_healing(ours: argparse._ArgumentGroup) -> None:
    ours.add_argument(
        "--heal", action="store_true", help="replace ranks that die, and do the step that was lost again"
    )
    ours.add_argument(
        "--spares",
        type=int,
        default=1,
        metavar="N",
        help="processes that wait to replace a rank; with 0, the others go on without it (default: 1)",
    )
    ours.add_argument(
        "--lost-after",
        type=float,
        default=agent.DEFAULT_LOST_AFTER,
        metavar="SECONDS",
        help="how long others wait for a rank that lives before it is replaced (default: 30)",
    )
    ours.add_argument(
        "--ledger", action="store_true", help="with --record: also record which samples each step had"
    )
    ours.add_argument("--checkpoint", metavar="DIR", help="save the training in DIR, and go on from there")
    ours.add_argument(
        "--every", type=int, default=100, metavar="STEPS", help="steps per checkpoint (default: 100)"
    )


def ranks_parser() -> tuple[argparse.ArgumentParser, argparse._ArgumentGroup]:
    """The parser of torchrun with our ``--ranks``, and the argument group for our other options."""
    parser = torchrun.get_args_parser()
    ours = parser.add_argument_group("paceline")
    ours.add_argument(
        "-n",
        "--ranks",
        dest="nproc_per_node",
        metavar="RANKS",
        default=argparse.SUPPRESS,
        help=f"ranks on this host, same as --nproc-per-node (default: {DEFAULT_RANKS})",
    )
    script, arguments = (
        action for action in parser._actions if action.dest in ("training_script", "training_script_args")
    )
    # The words of our usage lines; in Python 3.11 torch's arguments of the script are required.
    script.metavar, arguments.metavar, arguments.required = "SCRIPT", "ARGUMENT", False
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node=DEFAULT_RANKS)
    if not any("--shutdown-timeout" in action.option_strings for action in parser._actions):
        # torch's parser has it since 2.12.
        ours.add_argument("--shutdown-timeout", type=int, help="seconds that ranks have to end")
    return parser, ours


def _job(options: argparse.Namespace) -> agent.Job:
    """The job that the options describe."""
    if unsupported := [name for name in UNSUPPORTED if getattr(options, name)]:
        raise ValueError(f"not supported: use --log-dir (options: {', '.join(unsupported)})")
    if options.redirects != "0" and not options.log_dir:
        raise ValueError("output that is not shown needs log files: use --log-dir (options: redirects)")
    ranks = torchrun.determine_local_world_size(options.nproc_per_node)
    if ranks < 1:
        raise ValueError(f"at least one rank is needed (ranks: {ranks})")
    command = _command(options)
    environment = agent.rank_environment(ranks)
    if options.record:
        environment[FOLDER_VARIABLE] = str(Path(options.record).resolve())
    if options.patch:
        environment["PYTHONPATH"] = patch_torch.python_path(os.environ.get("PYTHONPATH", ""))
    environment |= _healing_environment(options)
    # torchrun's config_from_args warns and sets it to 1 if it is not set.
    os.environ["OMP_NUM_THREADS"] = environment["OMP_NUM_THREADS"]
    log_dir = options.log_dir
    # Otherwise torchrun creates a folder for logs, which would stay empty.
    options.log_dir = os.devnull
    choose_rendezvous(options)
    config, _, _ = torchrun.config_from_args(options)
    return agent.Job(
        config=config,
        command=command,
        log_dir=Path(log_dir) if log_dir else None,
        environment=environment,
        only_logged=Std.from_str(options.redirects),
        shown_ranks=config.logs_specs._local_ranks_filter if config.logs_specs else None,
        shutdown_seconds=agent.shutdown_seconds(options.shutdown_timeout),
        owns_all_children=True,
        stall_seconds=None if options.stall is None else parse_stall(options.stall),
        spares=options.spares if options.heal else None,
        lost_after=options.lost_after,
    )


def _make_folders(record: str | None, checkpoint: str | None, log_dir: Path | None) -> None:
    """Make the folders that the options name, so that a wrong name is told before ranks start."""
    given = {"--record": record, "--checkpoint": checkpoint, "--log-dir": log_dir}
    for option, name in given.items():
        if not name:
            continue
        folder = Path(name)
        try:
            make_folder(folder) if option == "--record" else folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "there is a file of this name" if folder.is_file() else error.strerror
            raise ValueError(f"the folder cannot be made: {reason} ({option}: {name})") from error


def _healing_environment(options: argparse.Namespace) -> dict[str, str]:
    """What ranks have to know to be healed, and to write checkpoints."""
    if options.spares < 0 or options.lost_after <= 0 or options.every < 1:
        raise ValueError(
            "--spares must not be negative, --lost-after and --every must be positive "
            f"(--spares: {options.spares}, --lost-after: {options.lost_after:g}, --every: {options.every})"
        )
    environment = {}
    if options.ledger:
        if not options.record:
            raise ValueError("the ledger is a part of the recording: use --record too (options: --ledger)")
        environment[LEDGER_VARIABLE] = "1"
    if options.heal:
        if options.no_python:
            raise ValueError("only Python scripts can be healed (options: --no-python, --heal)")
        environment[LOST_AFTER_VARIABLE] = str(options.lost_after)
    if options.checkpoint:
        environment[checkpoints.FOLDER_VARIABLE] = str(Path(options.checkpoint).resolve())
        environment[checkpoints.EVERY_VARIABLE] = str(options.every)
    return environment


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    """The command line of each rank."""
    target, arguments = options.training_script, options.training_script_args
    if options.no_python and options.patch:
        raise ValueError("only Python scripts can be patched (options: --no-python, --patch)")
    if options.no_python and not options.run_path:
        return target, *arguments
    if not options.module and not Path(target).exists():
        raise FileNotFoundError(f"there is no such script (script: {target}, current folder: {Path.cwd()})")
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    kind = "--module" if options.module else "--script"
    return python, "-u", worker.__file__, kind, target, *arguments


def choose_rendezvous(options: argparse.Namespace) -> None:
    """One host alone uses a free port, unless the options name an endpoint."""
    _, hosts = torchrun.parse_min_max_nnodes(options.nnodes)
    is_given = options.rdzv_backend != "static" or options.rdzv_endpoint or options.master_port is not None
    if options.standalone or (hosts == 1 and not is_given):
        vars(options).update(ONE_HOST, rdzv_id=str(uuid.uuid4()))
    if options.master_port is None:
        options.master_port = 29500


def _report(result: agent.JobResult) -> int:
    """Print how the job ended; the exit code."""
    summary = result.summary
    if result.signal is not None:
        has_cause = summary is not None and not summary.root_cause.is_secondary
        lines = [str(summary)] if has_cause else in_lines(result.failures)
        _say("\n".join([f"stopped by {result.signal.name}", *lines]))
        return 128 + result.signal
    if isinstance(result.error, (StalledRunError, HostError)):
        _say("\n".join([str(result.error), *in_lines(result.failures)]))
        return EXIT_STALLED
    if summary is not None:
        _say(str(summary))
        return summary.root_cause.shell_code
    if result.error is not None:
        _say(_describe_error(result.error))
        return EXIT_NOT_FOUND if isinstance(result.error, FileNotFoundError) else 1
    return 0


def exit_now(code: int) -> NoReturn:
    """Exit without Python's shutdown: unloading torch would take longer than stopping all ranks did."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _describe_error(error: Exception) -> str:
    """Why the ranks could not be started."""
    text = f"the ranks could not be started ({type(error).__name__}: {error})"
    if "EADDRINUSE" in str(error):
        text += "\nthe port is in use: choose another one, or none to get a free one"
    return text


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
