"""What DataParallel and its parts cost, compared with torch where torch can run, else with the module itself.

python benchmarks/data_parallel.py [--json FILE] [--figures FILE]
"""

import argparse
import copy
import importlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.parallel.scatter_gather as torch_scatter_gather
from targets import Row, add_output_options, report, save_figures
from torch import nn

import paceline
from paceline.tools.bench.measure import Timing, interleave

DEVICES = ["cpu", "cpu"]

# Not by an import statement: torch.nn.parallel has a function of the module's name.
torch_replicate = importlib.import_module("torch.nn.parallel.replicate")


def scatter_of_a_tensor() -> Row:
    x = torch.randn(64, 128)
    pieces = paceline.scatter(x, DEVICES)
    assert pieces[0].data_ptr() == x.data_ptr(), "scatter copied"
    timings = interleave(
        {"torch.chunk": lambda: torch.chunk(x, 2), "paceline.scatter": lambda: paceline.scatter(x, DEVICES)},
        rounds=50,
        calls=500,
    )
    return _ratio("scatter of a CPU tensor to two CPU devices, as views", timings, 2.0)


def scatter_of_a_structure() -> Row:
    # torch's own map over the structure; only its last step, which needs a GPU, is a chunk instead.
    structure = {
        f"part{i}": (torch.randn(8, 3), [torch.randn(8, 2), {"a": torch.randn(8), "b": torch.randn(8, 1)}])
        for i in range(250)
    }
    with mock.patch.object(torch_scatter_gather, "Scatter", _ChunkOnCpu):
        timings = interleave(
            {
                "torch's map": lambda: torch_scatter_gather.scatter(structure, [0, 1]),
                "paceline.scatter": lambda: paceline.scatter(structure, DEVICES),
            },
            rounds=60,
        )
    return _ratio("scatter of a nested structure of 1,000 tensors", timings, 1.3)


class _ChunkOnCpu:
    @staticmethod
    def apply(devices: list[int], _sizes: None, dim: int, tensor: torch.Tensor) -> Any:
        return tensor.chunk(len(devices), dim)


def forward_and_backward() -> Row:
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    wrapper = paceline.DataParallel(net, DEVICES)
    x = torch.randn(32, 3, 16, 16)
    halves = [(copy.deepcopy(net), half) for half in x.chunk(2)]

    def step(module: nn.Module, rows: torch.Tensor) -> None:
        module.zero_grad()
        module(rows).square().mean().backward()

    def apart() -> None:
        threads = [threading.Thread(target=step, args=half) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    timings = interleave(
        {
            "one thread": lambda: step(net, x),
            "two replicas": lambda: step(wrapper, x),
            "two threads that share nothing": apart,
        },
        rounds=40,
    )
    speed = timings["one thread"].median / timings["two replicas"].median
    what = "forward + backward of a conv net, one intra-op thread per replica"
    return Row(what, timings, "times as fast", speed, 1.6, at_most=False)


class Wide(nn.Module):
    """500 parameters of which forward uses two, so that the module itself takes little time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(250))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers[-1](x)
        return result


def call_again() -> list[Row]:
    module = Wide()
    wrapper = paceline.DataParallel(module, DEVICES)
    x = torch.randn(8, 4)
    with torch.no_grad(), _torch_replicate_on_cpu():
        timings = interleave(
            {
                "the module": lambda: module(x),
                "the wrapper": lambda: wrapper(x),
                "torch's replicate": lambda: torch_replicate.replicate(module, [0, 1], detach=True),
                "paceline.replicate, with gradients": lambda: _with_grad(
                    lambda: paceline.replicate(module, DEVICES)
                ),
            },
            rounds=40,
            calls=10,
        )
        _check_changes_are_seen(module, wrapper, x)
    added = timings["the wrapper"].median - timings["the module"].median
    what = "calling a wrapper of 500 parameters again under no_grad: cost over the module's own"
    return [
        Row(what, timings, f"of a fresh {name}", added / timings[name].median, 1 / 20)
        for name in ("torch's replicate", "paceline.replicate, with gradients")
    ]


def _with_grad(call: Any) -> Any:
    with torch.enable_grad():
        return call()


@contextmanager
def _torch_replicate_on_cpu() -> Iterator[None]:
    # Without the broadcast, which needs a GPU: the tree is copied, the tensors are shared.
    def share(tensors: list[torch.Tensor], devices: list[int], *_: object, **__: object) -> Any:
        return [tensors for _ in devices]

    with mock.patch.object(torch_replicate, "_broadcast_coalesced_reshape", share):
        yield


def _check_changes_are_seen(module: Wide, wrapper: nn.Module, x: torch.Tensor) -> None:
    for scale, layer in itertools.product((0.5, 2.0), (module.layers[-1], nn.Linear(4, 4))):
        module.layers[-1] = layer
        layer.weight.data.mul_(scale)  # type: ignore[operator]
        torch.testing.assert_close(wrapper(x), module(x))


def _ratio(what: str, timings: dict[str, Timing], target: float) -> Row:
    theirs, ours = timings.values()
    return Row(what, timings, "times the cost", ours.median / theirs.median, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time DataParallel and its parts.")
    add_output_options(parser)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = [scatter_of_a_tensor(), scatter_of_a_structure(), forward_and_backward(), *call_again()]
    report("DataParallel", rows, arguments.json)
    save_figures(arguments.figures, "data_parallel", rows)


if __name__ == "__main__":
    main()
