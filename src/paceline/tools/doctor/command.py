"""``paceline doctor``: diagnoses problems and prints the command that fixes each one."""

import argparse
import json
import os
import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from paceline.tools.doctor import host_network
from paceline.tools.doctor.connections import PORT_CHECK
from paceline.tools.doctor.findings import Finding, Severity, has_faults, notice, worst_first
from paceline.tools.doctor.host_checks import check_host
from paceline.tools.doctor.host_resources import FILES_CHECK
from paceline.tools.doctor.rank_checks import RANK_COMMAND, RANKS_CHECK, check_ranks
from paceline.tools.doctor.requested_run import Endpoint, RequestedRun, TargetKind
from paceline.tools.run import agent
from paceline.tools.run.command import choose_rendezvous, exit_now, ranks_parser
from paceline.torch_private import is_this_host, parse_rendezvous_config

USAGE = "%(prog)s [-n RANKS] [--json] [--no-ranks] [torchrun's options] [SCRIPT [ARGUMENT ...]]"
EXIT_FAULTS = 1
DEFAULT_PORT = 29500
# Seconds to wait for other hosts, for either rendezvous backend, unless torchrun's options set them.
JOIN_TIMEOUTS = "join_timeout=60,timeout=60"
# With a fault in one of these checks, ranks would hang or fail for a known reason.
NEEDED_BY_RANKS = frozenset(
    {host_network.INTERFACES_CHECK, host_network.NAMES_CHECK, PORT_CHECK, FILES_CHECK}
)
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
COLOURS = {Severity.OK: "green", Severity.NOTICE: "yellow", Severity.FAULT: "red"}


@click.command(
    # As for paceline run.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def doctor(arguments: tuple[str, ...]) -> None:
    """Diagnose problems and print the command that fixes each one."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        run = _requested_run(options)
        job = _job(options, run)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        parser.error(str(error))
    findings, signum = check_host(run), None
    if not options.no_ranks:
        of_ranks, signum = _check_ranks(job, run, findings)
        findings += of_ranks
    if signum is not None:
        exit_now(128 + signum)
    _show(worst_first(findings), as_json=options.json)
    exit_now(EXIT_FAULTS if has_faults(findings) else 0)


def _parser() -> argparse.ArgumentParser:
    """The parser of ``paceline run``, with an optional script."""
    parser, ours = ranks_parser()
    parser.prog = "paceline doctor"
    parser.usage = USAGE
    parser.description = (
        "Diagnoses problems of this host and between ranks, and prints the command that fixes each one. "
        "It accepts torchrun's options. With several hosts, start it on each of them with the options of the "
        "training run. Exit codes: 0 no faults, 1 faults, 2 wrong usage."
    )
    [script] = [action for action in parser._actions if action.dest == "training_script"]
    script.nargs, script.required = "?", False
    ours.add_argument("--json", action="store_true", help="print the findings as JSON, and nothing else")
    ours.add_argument("--no-ranks", action="store_true", help="check this host only, and start no ranks")
    return parser


def _requested_run(options: argparse.Namespace) -> RequestedRun:
    ranks = torchrun.determine_local_world_size(options.nproc_per_node)
    if ranks < 1:
        raise ValueError(f"at least one rank is needed (ranks: {ranks})")
    _, hosts = torchrun.parse_min_max_nnodes(options.nnodes)
    return RequestedRun(ranks, hosts, _endpoint(options, hosts), options.training_script, _kind(options))


def _kind(options: argparse.Namespace) -> TargetKind:
    if options.module:
        return TargetKind.MODULE
    return TargetKind.PROGRAM if options.no_python else TargetKind.SCRIPT


def _endpoint(options: argparse.Namespace, hosts: int) -> Endpoint | None:
    """The rendezvous endpoint, if options or the environment name one."""
    if options.standalone:
        return None
    if options.rdzv_endpoint:
        address, port = parse_rendezvous_endpoint(options.rdzv_endpoint, default_port=DEFAULT_PORT)
        option = f"--rdzv-endpoint {address}:{{port}}"
    elif options.master_port is not None or hosts > 1:
        address, port = options.master_addr, options.master_port or DEFAULT_PORT
        option = "--master-port {port}"
    elif "MASTER_PORT" in os.environ:
        # The launcher does not use it, but scripts that are started without a launcher do.
        address, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ["MASTER_PORT"])
        option = "export MASTER_PORT={port}"
    else:
        return None
    is_here, is_known = _is_here(options, address, hosts)
    return Endpoint(address, port, is_here, is_known, option)


def _is_here(options: argparse.Namespace, address: str, hosts: int) -> tuple[bool, bool]:
    """Whether this host is the one that listens, and whether torch detects that."""
    if hosts == 1:
        return True, True
    if options.rdzv_backend == "static":
        return int(options.node_rank) == 0, True
    configured = parse_rendezvous_config(options.rdzv_conf).get("is_host")
    if configured is not None:
        return configured.lower() in ("1", "true", "t", "yes", "y"), True
    is_known = is_this_host(address)
    own = {each for interface in host_network.list_interfaces() for each in interface.addresses}
    return is_known or bool(own & set(host_network.resolve(address).addresses)), is_known


def _check_ranks(
    job: agent.Job, run: RequestedRun, findings: list[Finding]
) -> tuple[list[Finding], int | None]:
    """Start ranks unless a fault of this host prevents it; also the signal that stopped them, if one did."""
    blocking = {each.check for each in findings if each.severity is Severity.FAULT} & NEEDED_BY_RANKS
    if blocking:
        found = f"no ranks were started: fix these faults first ({', '.join(sorted(blocking))})"
        return [notice(RANKS_CHECK, found)], None
    return check_ranks(job, run)


def _job(options: argparse.Namespace, run: RequestedRun) -> agent.Job:
    environment = agent.rank_environment(run.ranks)
    # What torch logs about connections is found and reported by our own checks.
    environment[LOG_LEVEL] = os.environ.get(LOG_LEVEL, "ERROR")
    # torchrun's config_from_args warns and sets it to 1 if it is not set.
    os.environ["OMP_NUM_THREADS"] = environment["OMP_NUM_THREADS"]
    options.log_dir = os.devnull
    options.training_script = options.training_script or ""
    options.rdzv_conf = ",".join(filter(None, (JOIN_TIMEOUTS, options.rdzv_conf)))
    # The checks need all ranks, and each of them only once.
    options.max_restarts, options.nnodes = 0, str(run.hosts)
    choose_rendezvous(options)
    config, _, _ = torchrun.config_from_args(options)
    return agent.Job(config, RANK_COMMAND, environment=environment, owns_all_children=True)


def _show(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"findings": [finding.as_json() for finding in findings]}, indent=2))
        return
    console = Console(file=sys.stdout, highlight=False)
    table = Table(show_edge=False, pad_edge=False)
    for column in ("", "check", "what was found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(_severity(finding), finding.check, Text(finding.found))
    console.print(table)
    # Below the table, whose cells are wrapped: a command must stay on one line to be copied.
    for finding in findings:
        if finding.fix:
            heading = ("\n", _severity(finding), f" {finding.check}, fixed by\n")
            console.print(Text.assemble(*heading, (finding.fix, "bold")), soft_wrap=True)


def _severity(finding: Finding) -> Text:
    return Text(finding.severity.value, style=COLOURS[finding.severity])
