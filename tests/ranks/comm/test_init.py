"""paceline.init on real ranks: how they meet, and what keeps them from meeting."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import paceline
from paceline.comm import init as init_module
from paceline.comm import meeting, meeting_store
from paceline.testing import RanksError, run_ranks, toy

# Longer than any refusal may take.
WAIT = timedelta(seconds=60)
REFUSED_SECONDS = 10.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def by_hand(rank: int, port: int, size: int = 2) -> dict[str, Any]:
    return {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def open_mpi(rank: int, size: int = 2, job: str = "job") -> dict[str, Any]:
    name = "OMPI_COMM_WORLD_{}".format
    numbers = {name("RANK"): rank, name("LOCAL_RANK"): rank, name("SIZE"): size, name("LOCAL_SIZE"): size}
    return numbers | {"PMIX_NAMESPACE": job}


def set_variables(variables: Mapping[str, Any]) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})


def refusal(rank: int, per_rank: list[dict[str, Any]]) -> tuple[str, float]:
    """The error of a rank with these variables, and the seconds that it took."""
    set_variables(per_rank[rank])
    meeting_store.ANSWER_SECONDS = 3.0
    began = time.monotonic()
    with pytest.raises(paceline.PacelineError) as raised:
        paceline.init(timeout=WAIT)
    return f"{type(raised.value).__name__}: {raised.value}", time.monotonic() - began


def refusals(*per_rank: dict[str, Any]) -> list[str]:
    """The error of each rank; each comes soon."""
    found = run_ranks(refusal, len(per_rank), args=(list(per_rank),), backend=None)
    assert max(seconds for _, seconds in found) < REFUSED_SECONDS
    return [text for text, _ in found]


# --- ranks that meet ---


def join(rank: int, per_rank: list[dict[str, Any]]) -> tuple[Any, ...]:
    set_variables(per_rank[rank])
    me = paceline.init(timeout=WAIT)
    total = torch.tensor([float(me.rank)])
    distributed.all_reduce(total)
    assert paceline.init() == me  # as it is
    backend = distributed.get_backend()
    distributed.destroy_process_group()
    exported = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    return me.rank, me.world_size, me.local_rank, me.launcher, backend, total.item(), exported


@pytest.mark.parametrize("launcher", ["Open MPI", "RANK and WORLD_SIZE"])
def test_ranks_meet_and_libraries_find_torchruns_variables(launcher: str) -> None:
    job, port = f"test-{time.time_ns()}", free_port()
    variables = [
        open_mpi(rank, job=job) if launcher == "Open MPI" else by_hand(rank, port) for rank in (0, 1)
    ]
    for rank, found in enumerate(run_ranks(join, 2, args=(variables,), backend=None)):
        assert found == (rank, 2, rank, launcher, "cpu:paceline", 1.0, [str(rank), "2", str(rank), "2"])


def test_without_local_ranks_they_are_counted_host_by_host() -> None:
    port = free_port()
    hosts = ["a", "b", "a", "b"]
    variables = [
        by_hand(rank, port, 4) | {"PACELINE_HOST_ID": host, "WORLD_SIZE": 4}
        for rank, host in enumerate(hosts)
    ]
    found = run_ranks(join, 4, args=(variables,), backend=None)
    assert [local for _, _, local, *_ in found] == [0, 0, 1, 1]


def join_twice(rank: int, port: int) -> list[int]:
    set_variables(by_hand(rank, port))
    sizes = []
    for _ in range(3):
        sizes.append(paceline.init(timeout=WAIT).world_size)
        distributed.barrier()
        distributed.destroy_process_group()
    return sizes


def test_the_group_can_be_closed_and_opened_again() -> None:
    assert run_ranks(join_twice, 2, args=(free_port(),), backend=None) == [[2, 2, 2]] * 2


def alone(_: int) -> tuple[Any, ...]:
    before = dict(os.environ)
    me = paceline.init()
    assert os.environ == before
    return me, distributed.get_world_size()


def test_without_a_launcher_a_process_is_a_world_of_one() -> None:
    [(me, size)] = run_ranks(alone, 1, backend=None)
    assert me == paceline.LaunchedRank(0, 1, 0, torch.device("cpu"), "no launcher")
    assert size == 1


def alone_by_variables(_: int, variables: dict[str, Any]) -> paceline.LaunchedRank:
    set_variables(variables)
    return paceline.init()


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")])
def test_a_world_of_one_needs_no_local_rank(names: tuple[str, str]) -> None:
    variables = dict(zip(names, (0, 1), strict=True))
    [me] = run_ranks(alone_by_variables, 1, args=(variables,), backend=None)
    assert (me.rank, me.world_size, me.local_rank) == (0, 1, 0)


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1), 5])
def test_a_timeout_must_be_a_positive_timedelta(timeout: Any) -> None:
    with pytest.raises(paceline.OptionError, match=r"timeout must be a positive timedelta \(timeout: "):
        paceline.init(timeout=timeout)


def take(rank: int) -> paceline.LaunchedRank:
    set_variables(
        {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 1 - rank, "RAY_JOB_ID": 1} | {"MASTER_ADDR": "x"}
    )
    os.environ["MASTER_PORT"] = "1"
    with pytest.raises(paceline.OptionError, match=r"open: gloo, backend: nccl"):
        paceline.init(backend="nccl")
    return paceline.init(backend="cpu:gloo")


def test_an_open_group_is_taken_as_it_is() -> None:
    for rank, me in enumerate(run_ranks(take, 2)):
        assert me == paceline.LaunchedRank(rank, 2, 1 - rank, torch.device("cpu"), "Ray")


def take_alone(rank: int) -> str:
    set_variables(open_mpi(rank))
    with pytest.raises(paceline.WorldError) as raised:
        paceline.init()
    return str(raised.value)


def test_an_open_group_of_one_rank_is_refused_if_the_launcher_started_several() -> None:
    [text] = run_ranks(take_alone, 1)
    assert "the open process group has 1 rank, but Open MPI started 2" in text


def take_fell_apart(_: int, variables: dict[str, Any]) -> str:
    set_variables(variables)
    try:
        return paceline.init().launcher
    except paceline.FellApartError as error:
        return str(error)


def test_an_open_group_that_is_a_world_that_fell_apart_is_refused() -> None:
    one_of_two = open_mpi(1)
    [text] = run_ranks(take_fell_apart, 1, args=({"RANK": 0, "WORLD_SIZE": 1} | one_of_two,))
    assert "the world fell apart: RANK=0, WORLD_SIZE=1" in text
    torchrun = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "TORCHELASTIC_RUN_ID": "x"}
    [text] = run_ranks(take_fell_apart, 1, args=(torchrun | one_of_two,))
    assert "nodes formed worlds of their own" in text


def test_an_open_group_of_another_size_than_the_world_that_fell_apart_is_taken() -> None:
    variables = {"RANK": 0, "WORLD_SIZE": 1} | open_mpi(1)
    assert run_ranks(take_fell_apart, 2, args=(variables,)) == ["no launcher"] * 2


def say(rank: int, variables: dict[str, Any]) -> None:
    set_variables(variables | {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank})
    paceline.init(timeout=WAIT)


def test_rank_0_says_in_one_line_what_was_found(capfd: pytest.CaptureFixture[str]) -> None:
    job = f"test-{time.time_ns()}"
    run_ranks(say, 2, args=(open_mpi(0, job=job),), backend=None)
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("paceline:")]
    assert line.startswith(
        "paceline: 2 ranks, started by Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"
    )
    assert f"all ranks are on this host, job {job}" in line
    assert line.endswith("backend cpu:paceline, device cpu")


# --- worlds that are not one ---


def test_a_mixed_world_is_refused_on_every_rank() -> None:
    port = free_port()
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for text in refusals(by_hand(0, port), open_mpi(1) | there):
        assert text.startswith("MeetingError: a mixed world meets at one address")
        assert f"MASTER_PORT={port}" in text
        assert "rank 0 of 2, started by RANK and WORLD_SIZE" in text
        assert "rank 1 of 2, started by Open MPI" in text


def test_two_worlds_at_one_address_are_refused() -> None:
    port = free_port()
    for text in refusals(by_hand(0, port), by_hand(1, port, size=3), by_hand(2, port, size=3)):
        assert "a mixed world" in text
        assert "of 2" in text
        assert "of 3" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_there_twice_is_refused(rank: int) -> None:
    port = free_port()
    texts = refusals(by_hand(0, port, 3), by_hand(1, port, 3), by_hand(rank, port, 3))
    for text in texts:
        assert "two processes have the same rank" in text
        assert f"rank {rank} of 3" in text


def test_ranks_of_another_job_at_the_same_port_give_way(tmp_path: Path) -> None:
    port = free_port()
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    per_rank = [open_mpi(rank, job=job) | there for job in ("first", "late") for rank in (0, 1)]
    results = run_ranks(join_first_or_late, 4, args=(per_rank, tmp_path), backend=None)
    assert results[:2] == [2, 2]
    for text in results[2:]:
        assert "the port is in use by another job" in text
        assert f"MASTER_PORT={port}" in text


def join_first_or_late(rank: int, per_rank: list[dict[str, Any]], folder: Path) -> int | str:
    set_variables(per_rank[rank])
    if rank < 2:
        size = paceline.init(timeout=WAIT).world_size
        (folder / f"joined-{rank}").touch()
        wait_for(folder / "refused-2", folder / "refused-3")  # rank 0 is the store
        return size
    wait_for(folder / "joined-0", folder / "joined-1")
    with pytest.raises(paceline.MeetingError) as raised:
        paceline.init(timeout=WAIT)
    (folder / f"refused-{rank}").touch()
    return str(raised.value)


def wait_for(*paths: Path) -> None:
    until = time.monotonic() + REFUSED_SECONDS
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_rank_whose_variables_disagree_tells_the_rank_that_waits() -> None:
    stale = by_hand(0, free_port())  # on all ranks, so that it fits on rank 0
    zero, one = refusals(stale | open_mpi(0), stale | open_mpi(1))
    assert one.startswith("DisagreementError: two launchers disagree: RANK=0, WORLD_SIZE=2")
    assert zero == one.replace("DisagreementError", "MeetingError")


def test_every_error_of_the_variables_is_told_to_ranks_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, str]] = []
    monkeypatch.setattr(init_module, "tell_waiting_ranks", lambda *args, **_: told.append(args))
    for name, value in (by_hand(0, 29500) | {"LOCAL_RANK": 7}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(paceline.WorldError, match="LOCAL_RANK must be less than WORLD_SIZE") as raised:
        paceline.init()
    assert told == [(("127.0.0.1", 29500), str(raised.value))]


# --- the next call after a refusal ---


def start_together(rank: int, folder: Path) -> None:
    """Wait until both ranks are here, so that what follows does not depend on when they were started."""
    (folder / f"here-{rank}").touch()
    wait_for(folder / "here-0", folder / "here-1")


def correct_after_a_timeout(rank: int, port: int, folder: Path) -> tuple[str, int]:
    meeting._TELL_SECONDS = 1.0
    set_variables(by_hand(rank, port, size=3))
    start_together(rank, folder)
    with pytest.raises(paceline.MeetingError) as kept:  # with its stack, as a notebook does
        paceline.init(timeout=timedelta(seconds=1))
    set_variables(by_hand(rank, port))
    return str(kept.value), paceline.init(timeout=WAIT).world_size


def correct_with_an_old_wrapper(rank: int, port: int, folder: Path) -> tuple[str, int]:
    """The wrapper of an earlier group is alive, and with it the store where ranks have met."""
    set_variables(by_hand(rank, port))
    paceline.init(timeout=WAIT)
    old = paceline.DistributedDataParallel(torch.nn.Linear(2, 2))
    distributed.barrier()
    distributed.destroy_process_group()
    result = correct_after_a_timeout(rank, port, folder)
    del old
    return result


def correct_after_a_disagreement(rank: int, port: int, _: Path) -> tuple[str, int]:
    meeting._TELL_SECONDS = 1.0
    set_variables(by_hand(0, port) | open_mpi(rank))
    with pytest.raises(paceline.PacelineError) as kept:
        paceline.init(timeout=WAIT)
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    return str(kept.value), paceline.init(timeout=WAIT).world_size


@pytest.mark.parametrize(
    ("correct", "reason"),
    [
        (correct_after_a_timeout, "not all ranks came"),
        (correct_with_an_old_wrapper, "not all ranks came"),
        (correct_after_a_disagreement, "disagree"),
    ],
)
def test_ranks_that_were_refused_meet_when_their_variables_are_correct(
    correct: Callable[[int, int, Path], tuple[str, int]], reason: str, tmp_path: Path
) -> None:
    for text, size in run_ranks(correct, 2, args=(free_port(), tmp_path), backend=None):
        assert reason in text
        assert size == 2


# --- ports ---


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A program that listens at a port, and is no store."""
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
                kept.append(connection)
                answer(connection)
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def say_nothing(_: socket.socket) -> None:
    pass


def say_hello(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9\r\n")


@pytest.mark.parametrize("answer", [say_nothing, say_hello, socket.socket.close])
def test_a_port_that_another_program_uses_is_named_on_every_rank(
    answer: Callable[[socket.socket], None],
) -> None:
    with listening(answer) as port:
        for text in refusals(by_hand(0, port), by_hand(1, port)):
            assert "the port is used by another program" in text
            assert f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}" in text


def test_a_port_that_another_program_of_torch_uses_is_named_on_every_rank() -> None:
    store = distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    for text in refusals(by_hand(0, store.port), by_hand(1, store.port)):
        assert "the port is in use by another program that uses torch" in text
        assert f"MASTER_PORT={store.port}" in text


# --- ranks that do not come ---


def wait_in_vain(rank: int, port: int, folder: Path) -> str:
    set_variables(by_hand(0 if rank == 0 else 2, port, 4))
    start_together(rank, folder)
    with pytest.raises(paceline.MeetingError) as raised:
        paceline.init(timeout=timedelta(seconds=1))
    return str(raised.value)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    for text in run_ranks(wait_in_vain, 2, args=(free_port(), tmp_path), backend=None):
        assert "not all ranks came within 1 s" in text
        assert "missing: rank 1, rank 3" in text


def reach_nobody(rank: int, port: int) -> str:
    set_variables(by_hand(rank, port) | {"MASTER_ADDR": "192.0.2.1"})  # an address that nobody has
    with pytest.raises(paceline.MeetingError) as raised:
        paceline.init(timeout=timedelta(seconds=1))
    return str(raised.value)


def test_a_rank_0_that_cannot_be_reached_is_named() -> None:
    port = free_port()
    zero, one = run_ranks(reach_nobody, 2, args=(port,), backend=None)
    where = f"MASTER_ADDR=192.0.2.1, MASTER_PORT={port}"
    assert f"not all ranks came within 1 s ({where}; missing: rank 1)" in zero
    assert f"rank 1 cannot reach rank 0 ({where})" in one


def lose_rank_0(rank: int, port: int, folder: Path) -> str:
    set_variables(by_hand(rank, port, 3))
    if rank == 0:
        threading.Thread(target=end_at, args=(folder / "waits",), daemon=True).start()
    else:
        touch_when_called(meeting.Meeting, "_verdict", folder / "waits")
    with pytest.raises(paceline.MeetingError) as raised:
        paceline.init(timeout=WAIT)
    raise ValueError(str(raised.value))


def end_at(path: Path) -> None:
    wait_for(path)
    os.kill(os.getpid(), signal.SIGKILL)


def touch_when_called(owner: Any, name: str, path: Path) -> None:
    function = getattr(owner, name)

    def call(*args: Any) -> Any:
        path.touch()
        return function(*args)

    setattr(owner, name, call)


def test_a_rank_0_that_dies_while_others_wait_is_named(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as raised:
        run_ranks(lose_rank_0, 2, args=(free_port(), tmp_path), backend=None, timeout=2 * REFUSED_SECONDS)
    assert any("rank 0 or its agent ended while ranks met" in str(error) for error in raised.value.exceptions)


def press_ctrl_c(_: int, port: int) -> float:
    set_variables(by_hand(0, port))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        init_and_press_ctrl_c()
    return time.monotonic() - began


def init_and_press_ctrl_c() -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    paceline.init(timeout=WAIT)


def test_ctrl_c_ends_the_wait_for_other_ranks() -> None:
    [seconds] = run_ranks(press_ctrl_c, 1, args=(free_port(),), backend=None)
    assert seconds < REFUSED_SECONDS


# --- accelerators ---


def on_toy(rank: int, port: int, size: int) -> str:
    toy.register()
    set_variables(by_hand(rank, port, size) | {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size})
    try:
        me = paceline.init(timeout=WAIT)
    except paceline.MeetingError as error:
        return str(error)
    assert torch.accelerator.current_device_index() == rank
    return f"{me.device} {distributed.get_backend()}"


def test_each_rank_has_the_device_of_its_local_rank() -> None:
    assert run_ranks(on_toy, 2, args=(free_port(), 2), backend=None) == ["toy:0 gloo", "toy:1 gloo"]


def late_on_toy(rank: int, port: int, size: int) -> str:
    """The same, but rank 1 takes its time after the ranks have met."""
    choose = init_module._choose_device

    def choose_late(local_rank: int) -> tuple[torch.device, str | None]:
        time.sleep(1.0 if rank == 1 else 0.0)
        return choose(local_rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init_module, "_choose_device", choose_late)
        return on_toy(rank, port, size)


def test_more_ranks_than_devices_are_refused_on_every_rank() -> None:
    for text in run_ranks(late_on_toy, 3, args=(free_port(), 3), backend=None):
        assert "more ranks than devices on this host (local rank: 2, devices: toy:0, toy:1)" in text


def without_a_device(rank: int, port: int) -> str:
    """Rank 1's device cannot be used."""

    def fail() -> list[torch.device]:
        raise RuntimeError("the device is busy")

    set_variables(by_hand(rank, port))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(init_module, "all_accelerators", fail)
        with pytest.raises(paceline.MeetingError) as raised:
            paceline.init(timeout=WAIT)
    return str(raised.value)


def test_a_device_that_cannot_be_used_is_named_on_every_rank() -> None:
    for text in run_ranks(without_a_device, 2, args=(free_port(),), backend=None, timeout=30.0):
        assert "the device of local rank 1 cannot be used: RuntimeError('the device is busy')" in text
