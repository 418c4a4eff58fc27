"""Everything about one host that can be seen without ranks."""

import socket
from collections.abc import Iterator
from ipaddress import ip_address

from paceline.tools.doctor import cores, files, memory, names, network, ports, script, software
from paceline.tools.doctor.asked import Asked
from paceline.tools.doctor.finding import Finding, notice


def examine(asked: Asked) -> list[Finding]:
    """Run every check of this host; one that cannot be run is a notice."""
    findings: list[Finding] = []
    for check in (_software, _network, _rendezvous, _memory, _cores, _files, _script):
        try:
            findings += check(asked)
        except Exception as error:
            kind = type(error).__name__
            findings.append(notice(check.__name__.strip("_"), f"it could not be checked ({kind}: {error})"))
    return findings


def _software(asked: Asked) -> Iterator[Finding]:  # noqa: ARG001 - a check's argument, as below
    yield software.judge(software.gather())


def _network(asked: Asked) -> Iterator[Finding]:
    facts = network.gather()
    yield network.judge(facts, asked)
    outward = facts.named(facts.best)
    addresses = [] if outward is None else [a for a in outward.addresses if not ip_address(a).is_loopback]
    looked_up = names.gather(None if asked.endpoint is None else asked.endpoint.address)
    yield from names.judge(looked_up, host=facts.host, outward=addresses)


def _rendezvous(asked: Asked) -> Iterator[Finding]:
    if asked.endpoint is not None and asked.endpoint.port:
        yield ports.judge(ports.gather(asked.endpoint), asked, host=socket.gethostname())


def _memory(asked: Asked) -> Iterator[Finding]:  # noqa: ARG001
    yield memory.judge(memory.gather())


def _cores(asked: Asked) -> Iterator[Finding]:
    yield cores.judge(cores.gather(), asked)


def _files(asked: Asked) -> Iterator[Finding]:
    yield files.judge(files.gather(), asked)


def _script(asked: Asked) -> Iterator[Finding]:
    if asked.target is not None:
        yield script.judge(script.gather(asked.target, asked.kind))
