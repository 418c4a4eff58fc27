"""``paceline doctor``: what is wrong with this host, or among ranks, and the line that mends it."""

import argparse
import json
import os
import sys

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import utils as rendezvous

from paceline.tools.doctor import files, host, names, network, ports, starting
from paceline.tools.doctor.asked import Asked, Endpoint, Target
from paceline.tools.doctor.finding import Finding, Severity, has_faults, notice, worst_first
from paceline.tools.run import agent
from paceline.tools.run.command import choose_meeting_place, leave, ranks_parser

USAGE = "%(prog)s [-n RANKS] [--json] [--no-ranks] [torchrun's options] [SCRIPT [ARGUMENT ...]]"
EXIT_FAULTS = 1
# So many seconds other hosts are waited for, unless torchrun's options say how long: by either rendezvous.
JOIN = "join_timeout=60,timeout=60"
# With a fault of these ranks would only hang, or fail for a reason that is known.
NEEDED_BY_RANKS = frozenset({network.CHECK, names.CHECK, ports.CHECK, files.CHECK})
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
COLOURS = {Severity.OK: "green", Severity.NOTICE: "yellow", Severity.FAULT: "red"}


@click.command(
    # As for run.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def doctor(arguments: tuple[str, ...]) -> None:
    """Find what is wrong with this host, or among ranks."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        asked = _asked(options)
        job = _job(options, asked)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        parser.error(str(error))
    findings, signum = host.examine(asked), None
    if not options.no_ranks:
        among, signum = _among_ranks(job, asked, findings)
        findings += among
    if signum is not None:
        leave(128 + signum)
    _show(worst_first(findings), as_json=options.json)
    leave(EXIT_FAULTS if has_faults(findings) else 0)


def _parser() -> argparse.ArgumentParser:
    """The parser of ``paceline run``, with the script left to choice."""
    parser, ours = ranks_parser()
    parser.prog = "paceline doctor"
    parser.usage = USAGE
    parser.description = (
        "Finds what is wrong with this host, or among ranks, and says the line that mends it. torchrun's "
        "options are all here: on several hosts, start it on each of them as training would be started. "
        "Exit codes: 0 healthy, 1 faults, 2 wrong usage."
    )
    [script] = [action for action in parser._actions if action.dest == "training_script"]
    script.nargs, script.required = "?", False
    ours.add_argument("--json", action="store_true", help="print the findings as JSON, and nothing else")
    ours.add_argument("--no-ranks", action="store_true", help="look at this host alone, and start no ranks")
    return parser


def _asked(options: argparse.Namespace) -> Asked:
    """The run that the options are of."""
    ranks = torchrun.determine_local_world_size(options.nproc_per_node)
    if ranks < 1:
        raise ValueError(f"at least one rank is needed (ranks: {ranks})")
    _, hosts = torchrun.parse_min_max_nnodes(options.nnodes)
    return Asked(ranks, hosts, _endpoint(options, hosts), options.training_script, _kind(options))


def _kind(options: argparse.Namespace) -> Target:
    if options.module:
        return Target.MODULE
    return Target.PROGRAM if options.no_python else Target.SCRIPT


def _endpoint(options: argparse.Namespace, hosts: int) -> Endpoint | None:
    """Where ranks would meet, if anybody has said where."""
    if options.standalone:
        return None
    if options.rdzv_endpoint:
        address, port = rendezvous.parse_rendezvous_endpoint(options.rdzv_endpoint, default_port=29500)
        option = f"--rdzv-endpoint {address}:{{port}}"
    elif options.master_port is not None or hosts > 1:
        address, port = options.master_addr, options.master_port or 29500
        option = "--master-port {port}"
    elif "MASTER_PORT" in os.environ:
        # Of no use to the launcher, but to scripts that are started without one.
        address, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ["MASTER_PORT"])
        option = "export MASTER_PORT={port}"
    else:
        return None
    is_here, is_known = _is_here(options, address, hosts)
    return Endpoint(address, port, is_here, is_known, option)


def _is_here(options: argparse.Namespace, address: str, hosts: int) -> tuple[bool, bool]:
    """Whether this host listens there, and whether torch knows that it does."""
    if hosts == 1:
        return True, True
    if options.rdzv_backend == "static":
        return int(options.node_rank) == 0, True
    told = rendezvous._parse_rendezvous_config(options.rdzv_conf).get("is_host")
    if told is not None:
        return told.lower() in ("1", "true", "t", "yes", "y"), True
    is_known = bool(rendezvous._matches_machine_hostname(address))
    own = {each for interface in network.interfaces() for each in interface.addresses}
    return is_known or bool(own & set(names.resolve(address).addresses)), is_known


def _among_ranks(job: agent.Job, asked: Asked, findings: list[Finding]) -> tuple[list[Finding], int | None]:
    """What ranks find, unless it is known that they cannot meet; also the signal that ended them, if any."""
    in_the_way = {each.check for each in findings if each.severity is Severity.FAULT} & NEEDED_BY_RANKS
    if in_the_way:
        return [
            notice("ranks", f"none were started before this is mended: {', '.join(sorted(in_the_way))}")
        ], None
    return starting.examine(job, asked)


def _job(options: argparse.Namespace, asked: Asked) -> agent.Job:
    environment = agent.environment(asked.ranks)
    # What torch has to say of connections is found and told otherwise.
    environment[LOG_LEVEL] = os.environ.get(LOG_LEVEL, "ERROR")
    # torch's own reading of the options warns and decides where this is not set.
    os.environ["OMP_NUM_THREADS"] = environment["OMP_NUM_THREADS"]
    options.log_dir = os.devnull
    options.training_script = options.training_script or ""
    options.rdzv_conf = ",".join(filter(None, (JOIN, options.rdzv_conf)))
    # Ranks that look at each other are not restarted, nor are they fewer.
    options.max_restarts, options.nnodes = 0, str(asked.hosts)
    choose_meeting_place(options)
    config, _, _ = torchrun.config_from_args(options)
    return agent.Job(config, starting.COMMAND, environment=environment, adopts_all=True)


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
    # Below the table, whose cells are wrapped: these lines are there to be copied.
    for finding in findings:
        if finding.fix:
            mends = Text.assemble(
                "\n", _severity(finding), f" {finding.check}, mended by\n", (finding.fix, "bold")
            )
            console.print(mends, soft_wrap=True)


def _severity(finding: Finding) -> Text:
    return Text(finding.severity.value, style=COLOURS[finding.severity])
