"""Runs a script in two workers of Ray Train, on a cluster that this program starts and ends.

python ray_workers.py SCRIPT ARGUMENTS...
"""

import runpy
import sys

import ray
import ray.train
from ray.train.torch import TorchTrainer

MEMORY = 100 << 20


def run_script(config: dict[str, list[str]]) -> None:
    sys.argv = config["argv"]
    runpy.run_path(sys.argv[0], run_name="__main__")


ray.init(num_cpus=2, object_store_memory=MEMORY, include_dashboard=False)
scaling = ray.train.ScalingConfig(num_workers=2)
TorchTrainer(run_script, train_loop_config={"argv": sys.argv[1:]}, scaling_config=scaling).fit()
