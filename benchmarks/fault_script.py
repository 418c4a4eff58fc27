"""The training script in which benchmarks/faults.py plants faults: one rank of it.

Written as users write theirs: nothing in it looks after other ranks. Its places ask whether a fault strikes.
"""

import argparse
import contextlib
import hashlib
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fault_list import FAULTS, PlantedFault, say
from torch import Tensor, nn
from torch.futures import Future
from torch.utils.data import DataLoader, Dataset

import paceline

FEATURES, HIDDEN, BATCH = 32, 64, 8
STEPS_AFTER = 40
BARRIER_SECONDS = 8.0
MOST_LEFT_OUT = 3


class Rows(Dataset[Tensor]):
    """Random rows, read one by one."""

    def __init__(self, planted: PlantedFault, rows: int) -> None:
        self._planted = planted
        self._rows = torch.randn(rows, FEATURES)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        # The loader reads for the step that follows.
        self._planted.now = index // BATCH
        self._planted.strikes("loader")
        return self._rows[index]


class Identity(torch.autograd.Function):
    """A place in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, planted: PlantedFault) -> Tensor:
        ctx.planted = planted
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.planted.strikes("backward")
        return grad * float("nan") if ctx.planted.strikes("nan") else grad, None


class Net(nn.Module):
    """A small network with module buffers."""

    def __init__(self, planted: PlantedFault) -> None:
        super().__init__()
        self._planted = planted
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.last = nn.Linear(HIDDEN, FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        self._planted.strikes("forward")
        hidden = self.norm(self.first(inputs)).relu()
        output: Tensor = self.last(Identity.apply(hidden, self._planted))  # type: ignore[no-untyped-call]
        return output


class QuietLogger(dist.Logger):  # type: ignore[name-defined, misc]  # in no __all__ of torch
    """Leaves out the call in which torch 2.13 dies of a segmentation fault, on gloo with DETAIL."""

    def set_construction_data_and_log(self, *_: Any) -> None:
        pass


def wrap(module: nn.Module, options: argparse.Namespace) -> Any:
    if options.wrapper != "paceline":
        setattr(dist, "Logger", QuietLogger)  # noqa: B010  # mypy does not know the attribute
        return nn.parallel.DistributedDataParallel(module)
    transport: Any = "c10d" if options.transport == "gloo" else "auto"
    return paceline.DistributedDataParallel(module, transport=transport)


def average_hook(planted: PlantedFault, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]  # in no __all__ of torch
    planted.strikes("comm hook")
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    averaged: Future[Tensor] = work.get_future().then(mean_of_sum)
    return averaged


def mean_of_sum(future: Future[list[Tensor]]) -> Tensor:
    return future.value()[0] / dist.get_world_size()


def compute_loss(output: Tensor, inputs: Tensor, planted: PlantedFault) -> Tensor:
    planted.strikes("loss")
    return (output - inputs).square().mean()


def output_hook(planted: PlantedFault) -> Callable[[Tensor], None]:
    def on_gradient(_: Tensor) -> None:
        planted.strikes("output hook")

    return on_gradient


def before_optimizer(planted: PlantedFault) -> Callable[..., None]:
    def on_step(*_: Any) -> None:
        planted.strikes("optimizer")

    return on_step


def plain_step(ddp: Any, inputs: Tensor, planted: PlantedFault) -> None:
    planted.strikes("before forward")
    output = ddp(inputs)
    output.register_hook(output_hook(planted))
    loss = compute_loss(output, inputs, planted)
    planted.strikes("before backward")
    if planted.strikes("instead"):
        return
    loss.backward()


def gan_step(generator: Any, discriminator: Any, inputs: Tensor) -> None:
    fake = generator(inputs)
    discriminator(fake.detach()).square().mean().backward()
    (1 - discriminator(fake)).square().mean().backward()


def make_step(planted: PlantedFault, options: argparse.Namespace) -> Callable[[Tensor], None]:
    """Forward and backward of one batch; notes the module and its optimizer."""
    is_gan = planted.fault is not None and planted.fault.gan
    generator = wrap(nn.Linear(FEATURES, FEATURES), options) if is_gan else None
    module = Net(planted)
    ddp = wrap(module, options)
    planted.module, planted.optimizer = module, torch.optim.Adam(module.parameters(), lr=1e-3)
    if planted.fault is not None and planted.fault.hook:
        ddp.register_comm_hook(planted, average_hook)
    if generator is not None:
        return lambda inputs: gan_step(generator, ddp, inputs)
    return lambda inputs: plain_step(ddp, inputs, planted)


def train(planted: PlantedFault, options: argparse.Namespace) -> None:
    is_last = planted.fault is not None and planted.fault.place == "end of data"
    steps = planted.step + (1 if is_last else STEPS_AFTER)
    loader = DataLoader(Rows(planted, steps * BATCH), batch_size=BATCH)
    take_step = make_step(planted, options)
    optimizer = planted.optimizer
    assert optimizer is not None
    optimizer.register_step_pre_hook(before_optimizer(planted))
    wait_for_all, bad_batches = make_barrier(options), BadBatches(planted)
    for step, inputs in enumerate(loader):
        planted.now = step
        planted.strikes("loop")
        if planted.strikes("skip"):
            continue
        if planted.strikes("end of data"):
            break
        wait_for_all()
        with bad_batches.caught(step):
            optimizer.zero_grad()
            take_step(inputs)
            optimizer.step()
    else:
        say("done", digest=digest(planted.module))


def make_barrier(options: argparse.Namespace) -> Callable[[], None]:
    """What a user of torch can do before each step, so that a missing rank is named."""
    if options.wrapper != "torch-barrier":
        return lambda: None
    # Of its own: on the group of the wrapper, DETAIL takes the barrier for a mismatch.
    group = dist.new_group(backend="gloo")
    timeout = timedelta(seconds=BARRIER_SECONDS)

    def wait_for_all() -> None:
        dist.monitored_barrier(group, timeout=timeout, wait_all_ranks=True)

    return wait_for_all


class BadBatches:
    """Leaves bad batches out, as many scripts do, if the fault is about that; too many end the training."""

    def __init__(self, planted: PlantedFault) -> None:
        self._is_asked_for = planted.fault is not None and planted.fault.catches
        self._left_out = 0

    @contextlib.contextmanager
    def caught(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._left_out += 1
            if not self._is_asked_for or self._left_out > MOST_LEFT_OUT:
                raise
            print(f"step {step} left out: {error!r}", file=sys.stderr, flush=True)


def digest(module: nn.Module | None) -> str:
    assert module is not None
    joined = b"".join(value.detach().numpy().tobytes() for value in module.parameters())
    return hashlib.sha256(joined).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a training in which a fault is planted.")
    parser.add_argument("--fault", choices=(*FAULTS, "none"), required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--culprit", type=int, required=True)
    parser.add_argument("--wrapper", required=True)
    parser.add_argument("--transport", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    # A shell in the background has its children ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    train(PlantedFault(FAULTS.get(options.fault), options.step, rank == options.culprit), options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
