"""What is made of facts, without a host that has them."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.tools.doctor import (
    among,
    clocks,
    cores,
    files,
    memory,
    names,
    network,
    pairs,
    ports,
    reach,
    software,
)
from paceline.tools.doctor.asked import Asked, Endpoint
from paceline.tools.doctor.cores import Cores
from paceline.tools.doctor.files import Limit
from paceline.tools.doctor.finding import Finding, Severity, fault, has_faults, notice, ok, worst_first
from paceline.tools.doctor.memory import MIB, Memory
from paceline.tools.doctor.names import Resolved
from paceline.tools.doctor.network import Interface, Network
from paceline.tools.doctor.ports import Port
from paceline.tools.doctor.report import Report, merged
from paceline.tools.doctor.software import Software

OK, NOTICE, FAULT = Severity.OK, Severity.NOTICE, Severity.FAULT
LO = Interface("lo", ("127.0.0.1", "::1"), is_up=True)
ETH = Interface("eth0", ("192.0.2.2",), is_up=True)
DOWN = Interface("eth1", ("192.0.2.3",), is_up=False)
BARE = Interface("eth2", (), is_up=True)
HOST = Network((LO, BARE, DOWN, ETH), None, "node", ("192.0.2.2",), "eth0")
TWO_HOSTS = Asked(hosts=2)


def test_the_worst_comes_first_and_faults_alone_count() -> None:
    findings = [ok("a", ""), fault("b", "", "fix"), notice("c", ""), fault("d", "", "fix")]
    assert [each.check for each in worst_first(findings)] == ["b", "d", "c", "a"]
    assert has_faults(findings)
    assert not has_faults([ok("a", ""), notice("c", "")])


@pytest.mark.parametrize(
    ("facts", "asked", "severity", "words"),
    [
        (HOST, TWO_HOSTS, OK, "takes eth0 (192.0.2.2), to which the host name node resolves"),
        (replace(HOST, chosen=("lo",)), Asked(), OK, "takes lo (127.0.0.1), as GLOO_SOCKET_IFNAME says"),
        (replace(HOST, chosen=("lo",)), TWO_HOSTS, FAULT, "other hosts cannot reach it"),
        (replace(HOST, resolved=("127.0.0.1",)), Asked(), OK, "takes lo"),
        (replace(HOST, resolved=("127.0.0.1",)), TWO_HOSTS, FAULT, "other hosts cannot reach it"),
        # Not an address of this host, and none at all.
        (replace(HOST, resolved=("198.51.100.1",)), TWO_HOSTS, FAULT, "for want of an address"),
        (replace(HOST, resolved=()), Asked(), NOTICE, "for want of an address"),
        (replace(HOST, chosen=("eth0", "nosuch")), Asked(), FAULT, "GLOO_SOCKET_IFNAME: nosuch)"),
        (replace(HOST, chosen=("eth1",)), Asked(), FAULT, "GLOO_SOCKET_IFNAME: eth1)"),
        (replace(HOST, chosen=("eth2",)), Asked(), FAULT, "GLOO_SOCKET_IFNAME: eth2)"),
        (replace(HOST, problem="no answer within 5 s"), Asked(), FAULT, "(no answer within 5 s)"),
    ],
)
def test_the_interface_that_gloo_takes(facts: Network, asked: Asked, severity: Severity, words: str) -> None:
    finding = network.judge(facts, asked)
    assert (finding.severity, words in finding.found) == (severity, True)
    assert finding.fix == ("" if severity is OK else "export GLOO_SOCKET_IFNAME=eth0")


def test_without_an_interface_to_others_none_is_proposed() -> None:
    finding = network.judge(Network((LO,), None, "node", ("127.0.0.1",)), TWO_HOSTS)
    assert finding.severity is FAULT
    assert "no interface to other hosts" in finding.found


@pytest.mark.parametrize(
    ("facts", "ranks", "severity", "fix"),
    [
        (Cores(8, 8, None, {}), 2, OK, ""),
        (Cores(8, 8, None, {"OMP_NUM_THREADS": "4"}), 2, OK, ""),
        (Cores(8, 8, None, {"OMP_NUM_THREADS": "5"}), 2, FAULT, "export OMP_NUM_THREADS=4"),
        (Cores(8, 8, None, {"OMP_NUM_THREADS": "all"}), 2, FAULT, "export OMP_NUM_THREADS=4"),
        # What ranks are given knows nothing of the quota.
        (Cores(64, 8, 2.5, {}), 2, FAULT, "export OMP_NUM_THREADS=1"),
        (Cores(8, 2, None, {}), 3, NOTICE, "paceline run -n 2 …"),
    ],
)
def test_threads_on_cores(facts: Cores, ranks: int, severity: Severity, fix: str) -> None:
    finding = cores.judge(facts, Asked(ranks))
    assert (finding.severity, finding.fix) == (severity, fix)


@pytest.mark.parametrize(
    ("facts", "asked", "severity", "fix"),
    [
        (Limit(1024, 4096), Asked(8), OK, ""),
        (Limit(-1, -1), Asked(8), OK, ""),
        (Limit(1024, -1), Asked(64, hosts=4), FAULT, "ulimit -n 65536"),
        (Limit(1024, 4096), Asked(64, hosts=4), FAULT, "ulimit -n 4096"),
        (Limit(1024, 1024), Asked(64, hosts=4), FAULT, "/etc/security/limits.conf"),
    ],
)
def test_open_files(facts: Limit, asked: Asked, severity: Severity, fix: str) -> None:
    finding = files.judge(facts, asked)
    assert (finding.severity, fix in finding.fix) == (severity, True)


@pytest.mark.parametrize(
    ("facts", "severity", "fix"),
    [
        (Memory(1024 * MIB, 900 * MIB, None), OK, ""),
        (Memory(64 * MIB, 64 * MIB, None), NOTICE, "--shm-size"),
        (Memory(64 * MIB, 8 * MIB, None), FAULT, "--shm-size"),
        (Memory(1024 * MIB, 8 * MIB, None), FAULT, "ls -lS"),
        (Memory(1024 * MIB, 900 * MIB, "not permitted"), NOTICE, ""),
        (Memory(None, None, None), FAULT, "mount -t tmpfs"),
    ],
)
def test_shared_memory(facts: Memory, severity: Severity, fix: str) -> None:
    finding = memory.judge(facts)
    assert (finding.severity, fix in finding.fix) == (severity, True)


@pytest.mark.parametrize(
    ("torch", "has_gloo", "severity"),
    [("2.13.0+cpu", True, OK), ("2.14.0", True, NOTICE), ("2.13.0", False, FAULT)],
)
def test_software(torch: str, has_gloo: bool, severity: Severity) -> None:
    assert software.judge(Software("3.11.7", torch, "1.0", {"gloo": has_gloo})).severity is severity


def test_names_that_do_not_resolve_or_slowly() -> None:
    looked_up = {
        "node": Resolved((), "no answer within 5 s", 5.0),
        "first": Resolved((), "Name or service not known", 0.1),
        "slow": Resolved(("192.0.2.9",), None, 3.0),
    }
    own, first, slow = names.judge(looked_up, host="node", outward=["192.0.2.2"])
    assert own.severity is FAULT
    assert own.fix == "echo '192.0.2.2 node' | sudo tee -a /etc/hosts"
    assert "where ranks meet does not resolve (first: " in first.found
    assert (slow.severity, slow.fix) == (NOTICE, "echo '192.0.2.9 slow' | sudo tee -a /etc/hosts")


@pytest.mark.parametrize(
    ("facts", "is_here", "words", "fix"),
    [
        (Port("in use", 98, "python, pid 7", 4321), True, "by: python, pid 7", "--master-port 4321"),
        (Port("not permitted", 13, None, 4321), True, "b cannot listen there", "--master-port 4321"),
        (Port("refused", 111), False, "nobody listens", "paceline doctor --node-rank 0 …"),
        (Port("no answer", 110), False, "blocked (from b to a:29500: no answer)", "--dport 29500 -j ACCEPT"),
        (Port("no route", 113), False, "no way leads to", "ip route get a"),
    ],
)
def test_a_rendezvous_that_does_not_work(facts: Port, is_here: bool, words: str, fix: str) -> None:
    asked = Asked(hosts=2, endpoint=Endpoint("a", 29500, is_here=is_here))
    finding = ports.judge(facts, asked, host="b")
    assert finding.severity is FAULT
    assert words in finding.found
    assert fix in finding.fix


def test_an_endpoint_that_torch_does_not_know_as_its_own() -> None:
    endpoint = Endpoint("192.0.2.2", 29500, is_here=True, is_known=False)
    finding = ports.judge(Port(), Asked(hosts=2, endpoint=endpoint), host="b")
    assert finding.severity is FAULT
    assert "--rdzv-conf is_host=1" in finding.fix


def place(address: str) -> dict[str, Any]:
    return {"address": address, "port": 4000, "token": "x"}


def test_the_direction_that_is_blocked_is_named_once() -> None:
    places = [place("192.0.2.1"), place("192.0.2.1"), place("192.0.2.2")]
    blocked = "no answer within 3 s"
    reached = [[None, None, blocked], [None, None, blocked], [None, None, None]]
    [finding] = reach.judge(reached, places, ["a", "a", "b"])
    assert finding.found == "connections are blocked from a to b (192.0.2.2:4000: no answer within 3 s)"
    assert finding.fix == "sudo iptables -I INPUT -s 192.0.2.1 -p tcp -j ACCEPT    # on b"
    [healthy] = reach.judge([[None] * 3] * 3, places, ["a", "a", "b"])
    assert healthy.severity is OK


def looks(offset: float, *, delay: float) -> list[tuple[float, float]]:
    return [(offset + start, offset + start + delay) for start in (0.0, 1.0)]


@pytest.mark.parametrize(
    ("offset", "delay", "severity", "words"),
    [
        (0.0, 0.001, OK, "within 1.0 ms"),
        (0.2, 0.001, NOTICE, "b is ahead of a by 0.199 s at least"),
        (-5.0, 0.001, FAULT, "b is behind a by 4.999 s at least"),
        # Not known for certain.
        (5.0, 6.0, OK, "within 11000.0 ms"),
    ],
)
def test_clocks_are_apart_by_what_is_certain(
    offset: float, delay: float, severity: Severity, words: str
) -> None:
    [finding] = clocks.judge([looks(0.0, delay=delay), looks(offset, delay=delay)], ["a", "b"])
    assert (finding.severity, words in finding.found) == (severity, True)


def test_one_host_has_one_clock() -> None:
    assert clocks.judge([looks(0.0, delay=0.1), looks(9.0, delay=0.1)], ["a", "a"]) == []


def test_pairs_of_many_ranks_are_a_chain_and_the_hosts() -> None:
    assert pairs.chosen(["a", "a", "b"]) == [(0, 1), (0, 2), (1, 2)]
    hosts = ["a"] * 8 + ["b"] * 8 + ["c"] * 8
    assert pairs.chosen(hosts) == sorted(
        {*((rank, rank + 1) for rank in range(23)), (0, 8), (0, 16), (8, 16)}
    )


def speed(a: int, b: int, megabytes: float) -> dict[str, Any]:
    return {"ranks": [a, b], "transport": "gloo", "latency_us": 50.0, "mb_per_s": megabytes}


def test_a_pair_that_is_slower_than_its_like_is_noticed() -> None:
    measured = [
        speed(0, 1, 900.0),
        speed(0, 2, 100.0),
        speed(0, 3, 95.0),
        speed(1, 2, 10.0),
        speed(1, 3, 98.0),
    ]
    inside, between, slow = pairs.judge(measured, ["a", "a", "b", "b"])
    assert "gloo inside hosts: 50 us, 900 MB/s" in inside.found
    assert "gloo between hosts: 50 us, 10 to 100 MB/s" in between.found
    assert (slow.severity, slow.data["pair"]["ranks"]) == (NOTICE, [1, 2])


def fact(host: str, address: str, **versions: str) -> dict[str, str]:
    same = {"torch": "2.13.0", "paceline": "1.0", "python": "3.11.7"}
    return {"host": host, "host_id": host, "address": address, **same, **versions}


def checks(report: Report, asked: Asked) -> list[Finding]:
    return [each for each in among.judge(report, asked) if each.severity is not OK]


def test_versions_that_differ_are_named_by_rank() -> None:
    ranks = [fact("a", "192.0.2.1"), fact("b", "192.0.2.2", torch="2.13.1"), fact("c", "192.0.2.3")]
    [finding] = checks(Report(facts=ranks), Asked(1, hosts=3))
    assert finding.found == "ranks have different torch (2.13.0 on ranks [0, 2]; 2.13.1 on ranks [1])"
    assert finding.fix.startswith("pip install 'torch==2.13.0'")


def test_ranks_that_were_stopped_and_ranks_that_said_nothing() -> None:
    stopped = {"stage": "meeting", "words": "ConnectionError: no", "host": "b"}
    report = Report(facts=[fact("a", "192.0.2.1"), None, None, None], problems=[None, None, stopped, stopped])
    first, second = checks(report, Asked(2, hosts=2, endpoint=Endpoint("192.0.2.1", 29500, is_here=True)))
    assert first.found == "ranks [2, 3] on b were stopped while meeting (ConnectionError: no)"
    assert first.fix.startswith("paceline run --local-addr 192.0.2.1 …")
    assert second.found == "ranks said nothing (ranks: [1])"


def test_ranks_that_fall_silent_later_or_never_spoke() -> None:
    ranks = [fact("a", "192.0.2.1"), fact("b", "192.0.2.2")]
    report = Report(
        facts=ranks, places=[place("192.0.2.1"), place("192.0.2.2")], reached=[[None, None], None]
    )
    [finding] = checks(report, Asked(1, hosts=2))
    assert finding.found == "ranks said nothing (ranks: [1])"
    assert "connections" not in [each.check for each in among.judge(report, Asked(1, hosts=2))]
    [finding] = checks(Report(), Asked(2))
    assert finding.found == "ranks said nothing (ranks: [0, 1])"


def test_reports_of_ranks_are_one_report() -> None:
    one = Report(facts=["a", None], problems=[None, "p"])
    two = Report(facts=[None, "b"], looks=[1, 2])
    assert merged([one, two]) == Report(facts=["a", "b"], problems=[None, "p"], looks=[1, 2])
    assert merged([]) == Report()
