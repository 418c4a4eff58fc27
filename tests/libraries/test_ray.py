"""Ray Train with paceline's wrapper: what ``prepare_model`` gives, and how trainings fail, resume and end."""

import os
import re
import subprocess
import sys
from datetime import timedelta
from importlib import util
from pathlib import Path

import pytest
import torch
from ray_runs import EXAMPLE, RayRun, environment, run_scenarios
from torch import distributed, nn

import paceline
from paceline.errors import MissingPackageError, OptionError
from paceline.testing import run_ranks

# Ray is imported in other processes alone: it takes seconds, and every test process would pay them.
pytestmark = [
    pytest.mark.skipif(util.find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.timeout(600),  # a cluster starts some twenty processes that import torch, on a busy machine
]
PACELINE = Path(sys.executable).parent / "paceline"


@pytest.fixture(scope="module")
def ran() -> RayRun:
    """Two trainings on one cluster; Ctrl-C ends the second."""
    return run_scenarios()


def test_the_example_ends_as_without_ray(ran: RayRun, tmp_path: Path) -> None:
    told = subprocess.run(
        [PACELINE, "run", "-n", "2", EXAMPLE, "--workers", "0"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    [sha256] = {*re.findall(r"^\[[01]\] sha256 (\w{64})$", told.stdout, re.MULTILINE)}
    assert ran.resumed["sha256"] == [sha256, sha256]
    assert ran.resumed["ranks"] == [[0, 0, 2], [1, 1, 2]]


def test_ctrl_c_leaves_nothing(ran: RayRun) -> None:
    assert ran.code != 0
    assert not ran.left
    assert not ran.memory


def test_workers_of_one_host_share_memory(ran: RayRun) -> None:
    assert ran.resumed["shared memory"] == [True, True]


def test_after_a_killed_worker_all_continue_from_the_checkpoint(ran: RayRun) -> None:
    starts = [line for line in ran.notes if "starts after" in line]
    assert {*starts[:2]} == {f"rank {rank} of 2: starts after 0 epochs" for rank in range(2)}
    # Ray may not have taken the last checkpoint yet when a worker dies.
    assert len(starts) == 4
    assert all(re.fullmatch(r"rank [01] of 2: starts after [123] epochs", line) for line in starts[2:]), (
        starts
    )


def test_a_failing_worker_is_named_by_the_others(ran: RayRun) -> None:
    assert ran.failures["1"] == ["ValueError", "no such row"]
    kind, text = ran.failures["0"]
    assert kind == "PeerError"
    assert re.match(r"rank 1 raised ValueError\('no such row'\) \(.*\) in forward of step 19;", text), text


def test_a_training_grows_with_the_cluster(ran: RayRun) -> None:
    epochs = [line for line in ran.notes if "did an epoch" in line]
    assert epochs[0] == "rank 0 of 1: did an epoch, after 0 epochs"
    assert re.fullmatch(r"rank [01] of 2: did an epoch, after [1-9]\d* epochs", epochs[-1]), epochs


def test_a_single_worker_needs_no_wrapper(ran: RayRun) -> None:
    assert "rank 0 of 1: prepared a Linear" in ran.notes
    assert {f"rank {rank} of 2: prepared a DistributedDataParallel" for rank in range(2)} <= {*ran.notes}


def prepare() -> None:
    from paceline.integrations.ray import prepare_model

    plain, moved, wrapped = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    assert prepare_model(plain, parallel_strategy=None) is plain
    assert prepare_model(moved, torch.device("meta"), None) is moved
    assert moved.weight.is_meta
    model = prepare_model(wrapped, parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    assert isinstance(model, paceline.DistributedDataParallel)
    assert model.module is wrapped
    assert model.gradient_as_bucket_view
    for given in ("fsdp", ""):
        with pytest.raises(OptionError, match=rf'must be "ddp" or None \(parallel_strategy: {given!r}\)'):
            prepare_model(plain, parallel_strategy=given)


def prepare_as_a_worker(rank: int, port: int) -> None:
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in told.items()}
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    import ray.train
    from ray.train.torch import TorchTrainer

    # With no workers, Ray runs the function here.
    TorchTrainer(prepare, scaling_config=ray.train.ScalingConfig(num_workers=0)).fit()


def test_the_arguments_are_rays() -> None:
    # As under torchrun, the store is not a rank's: it has its port before any rank starts.
    store = distributed.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=100))
    run_ranks(prepare_as_a_worker, 2, args=(store.port,), backend=None, timeout=200.0)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "paceline.integrations.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'paceline\[ray\]'"):
        import paceline.integrations.ray  # noqa: F401
