"""Trainings under Ray Train in which something happens: a rank is killed, a rank fails, a node is added.

ray_runs.py starts this program, and ends it by Ctrl-C. What it sees is in FOLDER/resumed.json and
FOLDER/failures.json; what happens on the workers is in FOLDER/notes.

python tests/support/ray_scenarios.py FOLDER
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray_train
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from running import MARK
from torch import nn

from paceline.integrations.ray import prepare_model

SEAT = {"seat": 1}  # each node of the cluster has resources for one worker that needs it
MEMORY = 100 << 20


def note(folder: str, text: str) -> None:
    with (Path(folder) / "notes").open("a") as file:
        file.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {text}\n")


def shares_memory() -> bool:
    """Whether this process has a segment that our ranks share."""
    return any(
        "memfd:paceline" in str(link.readlink())
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()
    )


def on_all(own: object) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def killed(config: dict[str, Any]) -> None:
    """Rank 1 is killed after three epochs. All start again, continue, and write down what they see."""
    saved = ray_train.load()
    note(config["folder"], f"starts after {saved['epochs'] if saved else 0} epochs")

    def after_epoch(state: ray_train.State) -> None:
        ray_train.report(state)
        if saved is None and state["epochs"] == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    sha256 = ray_train.train(prepare_model, 5, saved=saved, after_epoch=after_epoch)
    seen = {
        "sha256": on_all(sha256),
        "shared memory": on_all(shares_memory()),
        "ranks": on_all([int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]),
    }
    if dist.get_rank() == 0:
        (Path(config["folder"]) / "resumed.json").write_text(json.dumps(seen))


def fails() -> None:
    """Rank 1 raises in the forward of its step 19."""
    calls = []

    def fail(*_: object) -> None:
        calls.append(None)
        if len(calls) == 20 and dist.get_rank() == 1:
            raise ValueError("no such row")

    def wrap(network: nn.Module) -> nn.Module:
        network.register_forward_hook(fail)
        return prepare_model(network)

    ray_train.train(wrap, 2)


def killed_then_fails(config: dict[str, Any]) -> None:
    """Both in one training, because it takes seconds to start one."""
    killed(config)
    fails()


def grows(config: dict[str, Any]) -> str:
    """Trains without end, on as many workers as there is room for."""
    (Path(config["folder"]) / "workers" / str(os.getpid())).touch()
    saved = ray_train.load()
    network = nn.Linear(1, 1)
    note(config["folder"], f"prepared a {type(prepare_model(network)).__name__}")

    def after_epoch(state: ray_train.State) -> None:
        ray_train.report(state)
        note(config["folder"], f"did an epoch, after {saved['epochs'] if saved else 0} epochs")
        time.sleep(0.2)  # each epoch leaves a checkpoint

    return ray_train.train(prepare_model, sys.maxsize, saved=saved, after_epoch=after_epoch)


def fit(
    loop: Callable[..., object], config: dict[str, Any], *, max_failures: int = 0, **scaling: Any
) -> None:
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        torch_config=TorchConfig(timeout_s=60),
        scaling_config=ray.train.ScalingConfig(**scaling),
        run_config=ray.train.RunConfig(
            storage_path=config["folder"],
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
        ),
    )
    trainer.fit()


def failures(config: dict[str, Any]) -> dict[int, list[str]]:
    try:
        fit(killed_then_fails, config, num_workers=2, max_failures=1)
    except ray.train.WorkerGroupError as error:
        return {rank: [type(one).__name__, str(one)] for rank, one in error.worker_failures.items()}
    raise AssertionError("the training ended without an error")


def add_node_when_training(folder: Path) -> None:
    """Start a second node on this machine once the first worker trains; ray_runs.py ends it."""
    while "rank 0 of 1: did an epoch" not in (folder / "notes").read_text():
        time.sleep(0.1)
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=0"]
    to = [f"--address={ray.get_runtime_context().gcs_address}", f"--resources={json.dumps(SEAT)}"]
    subprocess.run(
        [*start, *to, f"--object-store-memory={MEMORY}"],
        env=os.environ | {MARK: str(folder / "node")},
        check=True,
    )


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "workers").mkdir()
    ray.init(num_cpus=2, resources=SEAT, object_store_memory=MEMORY, include_dashboard=False)
    config = {"folder": str(folder)}
    (folder / "failures.json").write_text(json.dumps(failures(config)))
    threading.Thread(target=add_node_when_training, args=(folder,), daemon=True).start()
    fit(
        grows,
        config,
        num_workers=(1, 2),
        resources_per_worker=SEAT,
        elastic_resize_monitor_interval_s=1,
    )


if __name__ == "__main__":
    main()
