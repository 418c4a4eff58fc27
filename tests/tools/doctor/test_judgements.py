"""How facts are judged, without a host that has them."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.tools.doctor.connections import PortAttempt, judge_connections, judge_rendezvous_port
from paceline.tools.doctor.findings import Finding, Severity, fault, has_faults, notice, ok, worst_first
from paceline.tools.doctor.host_checks import SoftwareFacts, judge_software
from paceline.tools.doctor.host_network import (
    Interface,
    NetworkFacts,
    ResolvedName,
    judge_host_names,
    judge_network,
)
from paceline.tools.doctor.host_resources import (
    MIB,
    CoreFacts,
    FileLimit,
    ShmFacts,
    judge_cores,
    judge_file_limit,
    judge_shared_memory,
)
from paceline.tools.doctor.rank_checks import judge_ranks
from paceline.tools.doctor.rank_measurements import judge_clocks, judge_pairs, pairs_to_measure
from paceline.tools.doctor.rank_program import RankFacts, merge_facts
from paceline.tools.doctor.requested_run import Endpoint, RequestedRun

OK, NOTICE, FAULT = Severity.OK, Severity.NOTICE, Severity.FAULT
LO = Interface("lo", ("127.0.0.1", "::1"), is_up=True)
ETH = Interface("eth0", ("192.0.2.2",), is_up=True)
DOWN = Interface("eth1", ("192.0.2.3",), is_up=False)
BARE = Interface("eth2", (), is_up=True)
HOST = NetworkFacts((LO, BARE, DOWN, ETH), None, "node", ("192.0.2.2",), "eth0")
TWO_HOSTS = RequestedRun(hosts=2)


def test_the_worst_comes_first_and_faults_alone_count() -> None:
    findings = [ok("a", ""), fault("b", "", "fix"), notice("c", ""), fault("d", "", "fix")]
    assert [each.check for each in worst_first(findings)] == ["b", "d", "c", "a"]
    assert has_faults(findings)
    assert not has_faults([ok("a", ""), notice("c", "")])


@pytest.mark.parametrize(
    ("facts", "run", "severity", "words"),
    [
        (HOST, TWO_HOSTS, OK, "uses eth0 (192.0.2.2), to which the host name node resolves"),
        (
            replace(HOST, configured=("lo",)),
            RequestedRun(),
            OK,
            "uses lo (127.0.0.1), as set by GLOO_SOCKET_IFNAME",
        ),
        (replace(HOST, configured=("lo",)), TWO_HOSTS, FAULT, "other hosts cannot reach it"),
        (replace(HOST, resolved=("127.0.0.1",)), RequestedRun(), OK, "uses lo"),
        (replace(HOST, resolved=("127.0.0.1",)), TWO_HOSTS, FAULT, "other hosts cannot reach it"),
        # Not an address of this host, and none at all.
        (
            replace(HOST, resolved=("198.51.100.1",)),
            TWO_HOSTS,
            FAULT,
            "because the host name does not resolve",
        ),
        (replace(HOST, resolved=()), RequestedRun(), NOTICE, "because the host name does not resolve"),
        (replace(HOST, configured=("eth0", "nosuch")), RequestedRun(), FAULT, "GLOO_SOCKET_IFNAME: nosuch)"),
        (replace(HOST, configured=("eth1",)), RequestedRun(), FAULT, "GLOO_SOCKET_IFNAME: eth1)"),
        (replace(HOST, configured=("eth2",)), RequestedRun(), FAULT, "GLOO_SOCKET_IFNAME: eth2)"),
        (replace(HOST, gloo_problem="no answer within 5 s"), RequestedRun(), FAULT, "(no answer within 5 s)"),
    ],
)
def test_the_interface_that_gloo_uses(
    facts: NetworkFacts, run: RequestedRun, severity: Severity, words: str
) -> None:
    finding = judge_network(facts, run)
    assert (finding.severity, words in finding.found) == (severity, True)
    assert finding.fix == ("" if severity is OK else "export GLOO_SOCKET_IFNAME=eth0")


def test_without_an_interface_to_others_none_is_proposed() -> None:
    finding = judge_network(NetworkFacts((LO,), None, "node", ("127.0.0.1",)), TWO_HOSTS)
    assert finding.severity is FAULT
    assert "no interface to other hosts" in finding.found


@pytest.mark.parametrize(
    ("facts", "ranks", "severity", "fix"),
    [
        (CoreFacts(8, 8, None, {}), 2, OK, ""),
        (CoreFacts(8, 8, None, {"OMP_NUM_THREADS": "4"}), 2, OK, ""),
        (CoreFacts(8, 8, None, {"OMP_NUM_THREADS": "5"}), 2, FAULT, "export OMP_NUM_THREADS=4"),
        (CoreFacts(8, 8, None, {"OMP_NUM_THREADS": "all"}), 2, FAULT, "export OMP_NUM_THREADS=4"),
        # What ranks are given knows nothing of the quota.
        (CoreFacts(64, 8, 2.5, {}), 2, FAULT, "export OMP_NUM_THREADS=1"),
        (CoreFacts(8, 2, None, {}), 3, NOTICE, "paceline run -n 2 …"),
    ],
)
def test_threads_on_cores(facts: CoreFacts, ranks: int, severity: Severity, fix: str) -> None:
    finding = judge_cores(facts, RequestedRun(ranks))
    assert (finding.severity, finding.fix) == (severity, fix)


@pytest.mark.parametrize(
    ("facts", "run", "severity", "fix"),
    [
        (FileLimit(1024, 4096), RequestedRun(8), OK, ""),
        (FileLimit(-1, -1), RequestedRun(8), OK, ""),
        (FileLimit(1024, -1), RequestedRun(64, hosts=4), FAULT, "ulimit -n 65536"),
        (FileLimit(1024, 4096), RequestedRun(64, hosts=4), FAULT, "ulimit -n 4096"),
        (FileLimit(1024, 1024), RequestedRun(64, hosts=4), FAULT, "/etc/security/limits.conf"),
    ],
)
def test_open_files(facts: FileLimit, run: RequestedRun, severity: Severity, fix: str) -> None:
    finding = judge_file_limit(facts, run)
    assert (finding.severity, fix in finding.fix) == (severity, True)


@pytest.mark.parametrize(
    ("facts", "severity", "fix"),
    [
        (ShmFacts(1024 * MIB, 900 * MIB, None), OK, ""),
        (ShmFacts(64 * MIB, 64 * MIB, None), NOTICE, "--shm-size"),
        (ShmFacts(64 * MIB, 8 * MIB, None), FAULT, "--shm-size"),
        (ShmFacts(1024 * MIB, 8 * MIB, None), FAULT, "ls -lS"),
        (ShmFacts(1024 * MIB, 900 * MIB, "not permitted"), NOTICE, ""),
        (ShmFacts(None, None, None), FAULT, "mount -t tmpfs"),
    ],
)
def test_shared_memory(facts: ShmFacts, severity: Severity, fix: str) -> None:
    finding = judge_shared_memory(facts)
    assert (finding.severity, fix in finding.fix) == (severity, True)


@pytest.mark.parametrize(
    ("torch", "has_gloo", "severity"),
    [
        ("2.10.0+cpu", True, OK),
        ("2.15.1", True, OK),
        ("2.9.1", True, NOTICE),
        ("2.99.0a0+git123", True, NOTICE),
        ("2.13.0", False, FAULT),
    ],
)
def test_software(torch: str, has_gloo: bool, severity: Severity) -> None:
    assert judge_software(SoftwareFacts("3.11.7", torch, "1.0", {"gloo": has_gloo})).severity is severity


def test_names_that_do_not_resolve_or_slowly() -> None:
    looked_up = {
        "node": ResolvedName((), "no answer within 5 s", 5.0),
        "first": ResolvedName((), "Name or service not known", 0.1),
        "slow": ResolvedName(("192.0.2.9",), None, 3.0),
    }
    own, first, slow = judge_host_names(looked_up, host="node", own_addresses=["192.0.2.2"])
    assert own.severity is FAULT
    assert own.fix == "echo '192.0.2.2 node' | sudo tee -a /etc/hosts"
    assert "the name of the rendezvous host does not resolve (first: " in first.found
    assert (slow.severity, slow.fix) == (NOTICE, "echo '192.0.2.9 slow' | sudo tee -a /etc/hosts")


@pytest.mark.parametrize(
    ("facts", "is_here", "words", "fix"),
    [
        (PortAttempt("in use", 98, "python, pid 7", 4321), True, "by: python, pid 7", "--master-port 4321"),
        (PortAttempt("not permitted", 13, None, 4321), True, "b cannot listen there", "--master-port 4321"),
        (PortAttempt("refused", 111), False, "nothing listens", "paceline doctor --node-rank 0 …"),
        (
            PortAttempt("no answer", 110),
            False,
            "blocked (from b to a:29500: no answer)",
            "--dport 29500 -j ACCEPT",
        ),
        (PortAttempt("no route", 113), False, "there is no route to", "ip route get a"),
    ],
)
def test_a_rendezvous_that_does_not_work(facts: PortAttempt, is_here: bool, words: str, fix: str) -> None:
    finding = judge_rendezvous_port(facts, Endpoint("a", 29500, is_here=is_here), host="b")
    assert finding.severity is FAULT
    assert words in finding.found
    assert fix in finding.fix


def test_an_endpoint_that_torch_does_not_know_as_its_own() -> None:
    endpoint = Endpoint("192.0.2.2", 29500, is_here=True, is_known=False)
    finding = judge_rendezvous_port(PortAttempt(), endpoint, host="b")
    assert finding.severity is FAULT
    assert "--rdzv-conf is_host=1" in finding.fix


def listener(address: str) -> dict[str, Any]:
    return {"address": address, "port": 4000, "token": "x"}


def test_the_direction_that_is_blocked_is_named_once() -> None:
    listeners = [listener("192.0.2.1"), listener("192.0.2.1"), listener("192.0.2.2")]
    blocked = "no answer within 3 s"
    errors = [[None, None, blocked], [None, None, blocked], [None, None, None]]
    [finding] = judge_connections(errors, listeners, ["a", "a", "b"])
    assert finding.found == "connections are blocked from a to b (192.0.2.2:4000: no answer within 3 s)"
    assert finding.fix == "sudo iptables -I INPUT -s 192.0.2.1 -p tcp -j ACCEPT    # on b"
    [healthy] = judge_connections([[None] * 3] * 3, listeners, ["a", "a", "b"])
    assert healthy.severity is OK


def readings(offset: float, *, delay: float) -> list[tuple[float, float]]:
    return [(offset + start, offset + start + delay) for start in (0.0, 1.0)]


@pytest.mark.parametrize(
    ("offset", "delay", "severity", "words"),
    [
        (0.0, 0.001, OK, "within 1.0 ms"),
        (0.2, 0.001, NOTICE, "b is ahead of a by at least 0.199 s"),
        (-5.0, 0.001, FAULT, "b is behind a by at least 4.999 s"),
        # Not known for certain.
        (5.0, 6.0, OK, "within 11000.0 ms"),
    ],
)
def test_clocks_differ_by_what_is_certain(
    offset: float, delay: float, severity: Severity, words: str
) -> None:
    [finding] = judge_clocks([readings(0.0, delay=delay), readings(offset, delay=delay)], ["a", "b"])
    assert (finding.severity, words in finding.found) == (severity, True)


def test_one_host_has_one_clock() -> None:
    assert judge_clocks([readings(0.0, delay=0.1), readings(9.0, delay=0.1)], ["a", "a"]) == []


def test_pairs_of_many_ranks_are_a_chain_and_the_hosts() -> None:
    assert pairs_to_measure(["a", "a", "b"]) == [(0, 1), (0, 2), (1, 2)]
    hosts = ["a"] * 8 + ["b"] * 8 + ["c"] * 8
    assert pairs_to_measure(hosts) == sorted(
        {*((rank, rank + 1) for rank in range(23)), (0, 8), (0, 16), (8, 16)}
    )


def speed(a: int, b: int, megabytes: float) -> dict[str, Any]:
    return {"ranks": [a, b], "transport": "gloo", "latency_us": 50.0, "mb_per_s": megabytes}


def test_a_pair_that_is_much_slower_than_others_is_reported() -> None:
    measured = [
        speed(0, 1, 900.0),
        speed(0, 2, 100.0),
        speed(0, 3, 95.0),
        speed(1, 2, 10.0),
        speed(1, 3, 98.0),
    ]
    inside, between, slow = judge_pairs(measured, ["a", "a", "b", "b"])
    assert "gloo inside hosts: 50 us, 900 MB/s" in inside.found
    assert "gloo between hosts: 50 us, 10 to 100 MB/s" in between.found
    assert (slow.severity, slow.data["pair"]["ranks"]) == (NOTICE, [1, 2])


def software(host: str, address: str, **versions: str) -> dict[str, str]:
    same = {"torch": "2.13.0", "paceline": "1.0", "python": "3.11.7"}
    return {"host": host, "host_id": host, "address": address, **same, **versions}


def checks(facts: RankFacts, run: RequestedRun) -> list[Finding]:
    return [each for each in judge_ranks(facts, run) if each.severity is not OK]


def test_versions_that_differ_are_named_by_rank() -> None:
    ranks = [
        software("a", "192.0.2.1"),
        software("b", "192.0.2.2", torch="2.13.1"),
        software("c", "192.0.2.3"),
    ]
    [finding] = checks(RankFacts(software=ranks), RequestedRun(1, hosts=3))
    assert (
        finding.found
        == "ranks have different versions of torch (2.13.0 on ranks [0, 2]; 2.13.1 on ranks [1])"
    )
    assert finding.fix.startswith("pip install 'torch==2.13.0'")


def test_ranks_that_failed_and_ranks_that_did_not_answer() -> None:
    failed = {"stage": "rendezvous", "error": "ConnectionError: no", "host": "b"}
    facts = RankFacts(
        software=[software("a", "192.0.2.1"), None, None, None], failures=[None, None, failed, failed]
    )
    first, second = checks(
        facts, RequestedRun(2, hosts=2, endpoint=Endpoint("192.0.2.1", 29500, is_here=True))
    )
    assert first.found == "ranks [2, 3] on b failed at this stage: rendezvous (ConnectionError: no)"
    assert first.fix.startswith("paceline run --local-addr 192.0.2.1 …")
    assert second.found == "ranks did not answer (ranks: [1])"


def test_ranks_that_stop_answering_or_never_answered() -> None:
    ranks = [software("a", "192.0.2.1"), software("b", "192.0.2.2")]
    facts = RankFacts(
        software=ranks,
        listeners=[listener("192.0.2.1"), listener("192.0.2.2")],
        connection_errors=[[None, None], None],
    )
    [finding] = checks(facts, RequestedRun(1, hosts=2))
    assert finding.found == "ranks did not answer (ranks: [1])"
    assert "connections" not in [each.check for each in judge_ranks(facts, RequestedRun(1, hosts=2))]
    [finding] = checks(RankFacts(), RequestedRun(2))
    assert finding.found == "ranks did not answer (ranks: [0, 1])"


def test_facts_of_ranks_are_merged() -> None:
    one = RankFacts(software=["a", None], failures=[None, "p"])
    two = RankFacts(software=[None, "b"], clock_readings=[1, 2])
    assert merge_facts([one, two]) == RankFacts(
        software=["a", "b"], failures=[None, "p"], clock_readings=[1, 2]
    )
    assert merge_facts([]) == RankFacts()
