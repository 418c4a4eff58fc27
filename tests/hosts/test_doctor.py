"""``paceline doctor`` on two hosts: what lies between them is found, from both sides, and named."""

import ctypes
import json
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from running import Ran, in_rank

import paceline
from paceline.testing import run_ranks
from paceline.testing.hosts import Hosts, enter

NEWUTS = 0x04000000  # linux/sched.h
PORT = 29500
OTHER_VERSION = "0.0.7"


def move(host: str) -> None:
    """To a host, with a name that resolves without a name server."""
    enter(host)
    assert ctypes.CDLL(None).unshare(NEWUTS) == 0
    socket.sethostname("localhost")


def doctor(
    rank: int, hosts: Hosts, folder: Path, options: Sequence[str], environments: Sequence[dict[str, str]]
) -> Ran:
    move(hosts.names[rank])
    folder = folder / str(rank)
    folder.mkdir()
    where = ["--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", f"{hosts.addresses[0]}:{PORT}"]
    return in_rank(
        rank, ["doctor", "--json", "-n", "1", *where, *options], folder, environment=environments[rank]
    )


def on_both(
    hosts: Hosts, folder: Path, *options: str, second: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    environments = [{"GLOO_SOCKET_IFNAME": "wire", "PACELINE_HOST_ID": name} for name in hosts.names]
    environments[1].update(second or {})
    arguments = (hosts, folder, options, environments)
    found = []
    for ran in run_ranks(doctor, 2, args=arguments, backend=None, timeout=60.0):
        assert ran.left == []
        faults = [each for each in json.loads(ran.stdout)["findings"] if each["severity"] == "fault"]
        assert ran.code == (1 if faults else 0)
        found.append({each["check"]: each for each in faults})
    return found


def rule(host: str, *words: str) -> None:
    subprocess.run(["ip", "-n", host, "rule", "add", *words], check=True)


def test_a_blocked_rendezvous_is_named_by_the_host_that_cannot_reach_it(tmp_path: Path) -> None:
    with Hosts() as hosts:
        # Answers from the port are dropped, as by a firewall that says nothing.
        rule(hosts.names[0], "ipproto", "tcp", "sport", str(PORT), "blackhole")
        first, second = on_both(hosts, tmp_path, "--rdzv-conf", "timeout=2")
    assert first.keys() == {"ranks"}
    assert "hosts did not meet in time (hosts: 2, at: 10.77.0.1:29500" in first["ranks"]["found"]
    assert second.keys() == {"rendezvous"}
    assert "to 10.77.0.1:29500: no answer within 3 s" in second["rendezvous"]["found"]
    assert second["rendezvous"]["fix"].startswith("sudo iptables -I INPUT -p tcp --dport 29500 -j ACCEPT")


def test_other_ports_that_are_blocked_are_named_on_both_hosts(tmp_path: Path) -> None:
    with Hosts() as hosts:
        # Nothing leaves the second host but what goes to the rendezvous.
        rule(hosts.names[1], "pref", "100", "ipproto", "tcp", "dport", str(PORT), "lookup", "main")
        rule(hosts.names[1], "pref", "101", "to", f"{hosts.addresses[0]}/32", "ipproto", "tcp", "blackhole")
        told = on_both(hosts, tmp_path)
    for faults in told:
        assert faults.keys() == {"connections"}
    [first, second] = told
    assert first == second
    place = first["connections"]["data"]
    assert place["address"] in hosts.addresses
    assert place["port"] != PORT


def test_other_versions_and_another_time_are_found_on_both_hosts(tmp_path: Path) -> None:
    # The second host has a paceline of its own, with another version and a clock of its own.
    other = tmp_path / "other"
    shutil.copytree(Path(paceline.__file__).parent, other / "paceline")
    replace(other / "paceline/__init__.py", '_metadata.version("paceline")', f'"{OTHER_VERSION}"')
    replace(
        other / "paceline/tools/doctor/rank_measurements.py", "= time.time)", "= lambda: time.time() + 30)"
    )
    with Hosts() as hosts:
        told = on_both(hosts, tmp_path, second={"PYTHONPATH": str(other)})
    for faults in told:
        assert faults.keys() == {"versions", "clocks"}
        by_version = faults["versions"]["data"]["paceline"]
        assert by_version == {paceline.__version__: [0], OTHER_VERSION: [1]}
        clocks = faults["clocks"]["data"]
        assert -30 <= clocks["most"] < -29
        assert -31 < clocks["least"] <= -30
        assert "is ahead of" in faults["clocks"]["found"]


def replace(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def beside_the_name(rank: int, hosts: Hosts, folder: Path) -> Ran:
    move(hosts.names[rank])
    where = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.addresses[0]}:{PORT}"]
    return in_rank(rank, ["doctor", "--json", "--no-ranks", *where], folder)


def test_an_endpoint_here_that_torch_would_not_listen_at_is_found(tmp_path: Path) -> None:
    # The host's name means another address, so that torch takes this one for another host's.
    with Hosts() as hosts:
        [ran] = run_ranks(beside_the_name, 1, args=(hosts, tmp_path), backend=None, timeout=30.0)
    faults = {
        each["check"]: each for each in json.loads(ran.stdout)["findings"] if each["severity"] == "fault"
    }
    assert faults.keys() == {"rendezvous", "interfaces"}
    assert "--rdzv-conf is_host=1" in faults["rendezvous"]["fix"]
    assert faults["interfaces"]["fix"] == "export GLOO_SOCKET_IFNAME=wire"
