"""``paceline doctor`` finds faults that are planted on a host, each alone, and none on a healthy one."""

import ctypes
import json
import os
import resource
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Ran, in_rank, paceline, script

from paceline.testing import run_ranks

NEWNS, NEWUTS = 0x00020000, 0x04000000  # linux/sched.h
CAPABILITIES, OVERRIDES = (
    0x20080522,
    0b110,
)  # linux/capability.h: version 3, CAP_DAC_OVERRIDE and _READ_SEARCH
UNKNOWN = "nowhere-at-all.invalid"
SECONDS = 30.0

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
libc = ctypes.CDLL(None, use_errno=True)
held: list[socket.socket] = []


def done(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "it cannot be planted")


def wrong_interface() -> tuple[list[str], dict[str, str]]:
    return [], {"GLOO_SOCKET_IFNAME": "nosuch0"}


def unknown_name() -> tuple[list[str], dict[str, str]]:
    done(libc.unshare(NEWUTS))
    socket.sethostname(UNKNOWN)
    return [], {}


def full_memory() -> tuple[list[str], dict[str, str]]:
    done(libc.unshare(NEWNS))
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", "/dev/shm"], check=True)
    with Path("/dev/shm/left").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 250 << 20)
    return [], {}


def port_in_use() -> tuple[list[str], dict[str, str]]:
    held.append(socket.create_server(("", 0)))
    return ["--master-port", str(held[0].getsockname()[1])], {}


def port_of_environment_in_use() -> tuple[list[str], dict[str, str]]:
    (_, port), _ = port_in_use()
    return [], {"MASTER_ADDR": "localhost", "MASTER_PORT": port}


def too_many_threads() -> tuple[list[str], dict[str, str]]:
    return ["-n", "2"], {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}


def few_files() -> tuple[list[str], dict[str, str]]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return [], {}


def unreadable_script() -> tuple[list[str], dict[str, str]]:
    Path("train.py").write_text("print()")
    Path("train.py").chmod(0)
    # Root reads everything, unless it may not.
    header = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
    sets = (ctypes.c_uint32 * 6)()
    done(libc.capget(header, sets))
    sets[0] &= ~OVERRIDES
    done(libc.capset(header, sets))
    return ["train.py"], {}


def broken_script() -> tuple[list[str], dict[str, str]]:
    Path("train.py").write_text("x = = 1")
    return ["train.py"], {}


Plant = Callable[[], tuple[list[str], dict[str, str]]]


def planted(rank: int, plant: Plant, folder: Path) -> Ran:
    os.chdir(folder)
    options, environment = plant()
    return in_rank(rank, ["doctor", "--no-ranks", "--json", *options], folder, environment=environment)


def faults(ran: Ran) -> list[dict[str, Any]]:
    return [each for each in json.loads(ran.stdout)["findings"] if each["severity"] == "fault"]


@pytest.mark.parametrize(
    ("plant", "check", "found", "fix"),
    [
        (wrong_interface, "interfaces", "GLOO_SOCKET_IFNAME: nosuch0", "export GLOO_SOCKET_IFNAME="),
        pytest.param(unknown_name, "names", UNKNOWN, "| sudo tee -a /etc/hosts", marks=needs_root),
        pytest.param(full_memory, "shared memory", "free: 6 MiB of 256", "ls -lS /dev/shm", marks=needs_root),
        (port_in_use, "rendezvous", "the port is in use", "--master-port "),
        (port_of_environment_in_use, "rendezvous", "the port is in use", "export MASTER_PORT="),
        (too_many_threads, "cores and threads", "threads are oversubscribed", "export OMP_NUM_THREADS="),
        (few_files, "file limit", "limit: 100, needed: 144", "ulimit -n "),
        (unreadable_script, "script", "train.py: it cannot be read", "chmod a+r train.py"),
        (broken_script, "script", "invalid syntax (train.py, line 1)", "-m py_compile train.py"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_planted_fault_is_found_and_no_other(
    plant: Plant, check: str, found: str, fix: str, tmp_path: Path
) -> None:
    if plant is too_many_threads and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("one core cannot be shared out wrongly by its own number")
    [ran] = run_ranks(planted, 1, args=(plant, tmp_path), backend=None, timeout=SECONDS)
    assert ran.code == 1
    [fault] = faults(ran)
    assert fault["check"] == check
    assert found in fault["found"]
    assert fix in fault["fix"]
    assert ran.left == []


def test_a_missing_script_is_said_in_a_line_with_what_to_do(tmp_path: Path) -> None:
    ran = paceline("doctor", "--no-ranks", "--json", "missing.py", folder=tmp_path)
    [fault] = faults(ran)
    told = f"missing.py: there is no such file: give its full path, or its path from {tmp_path}"
    assert (ran.code, fault["found"], fault["fix"]) == (1, told, "")


def test_a_healthy_host_has_no_faults_and_its_ranks_are_measured(tmp_path: Path) -> None:
    ran = paceline("doctor", "--json", script(tmp_path, "print()"), folder=tmp_path)
    assert faults(ran) == []
    assert (ran.code, ran.left) == (0, [])
    findings = json.loads(ran.stdout)["findings"]
    assert [each for each in findings if "could not be checked" in each["found"]] == []
    assert {each["check"] for each in findings} == {
        *("software", "interfaces", "names", "shared memory", "cores and threads", "file limit", "script"),
        *("versions", "connections", "dtypes", "speed"),
    }
    taken = {each["data"]["backend"]: each["data"]["taken"] for each in findings if "backend" in each["data"]}
    assert "float32" in taken["gloo"]
    assert "int16" not in taken["gloo"]
    assert "int16" in taken["paceline"]
    kinds = {each["data"]["kind"]: each["data"]["pairs"] for each in findings if each["check"] == "speed"}
    assert kinds.keys() == {"gloo inside hosts", "shared memory inside hosts"}
    for [pair] in kinds.values():
        assert pair["ranks"] == [0, 1]
        assert pair["latency_us"] > 0
        assert pair["mb_per_s"] > 0


def on_a_narrow_screen(rank: int, folder: Path) -> Ran:
    return in_rank(rank, ["doctor"], folder, environment={"GLOO_SOCKET_IFNAME": "nosuch0", "COLUMNS": "40"})


def test_ranks_are_not_started_in_vain_and_the_fix_is_on_one_line(tmp_path: Path) -> None:
    [ran] = run_ranks(on_a_narrow_screen, 1, args=(tmp_path,), backend=None, timeout=SECONDS)
    assert ran.code == 1
    assert ran.lines[2].split()[:3] == ["fault", "│", "interfaces"]
    assert any(line.startswith("export GLOO_SOCKET_IFNAME=") for line in ran.lines)
    assert "no ranks were started" in " ".join(ran.stdout.replace("│", "").split())


@pytest.mark.parametrize("arguments", [["-n", "0"], ["--nnodes", "many"], ["--no-such-option"]])
def test_wrong_usage_has_an_exit_code_of_its_own(arguments: list[str], tmp_path: Path) -> None:
    ran = paceline("doctor", "--json", *arguments, folder=tmp_path)
    assert (ran.code, ran.stdout) == (2, "")
    assert "paceline doctor: error: " in ran.stderr
