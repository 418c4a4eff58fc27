"""A user's program without a mistake."""

import torch
from torch import Tensor, nn
from torch.futures import Future

import paceline
from paceline.hooks.grad_bucket import GradBucket
from paceline.nn.parallel import DataParallel, DistributedDataParallel


def own_hook(_: None, bucket: GradBucket) -> Future[Tensor]:
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


def train(net: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    precision = paceline.MixedPrecision(param_dtype=torch.bfloat16)
    model = DistributedDataParallel(net, bucket_cap_mb=1.5, mixed_precision=precision, transport="c10d")
    model.register_comm_hook(None, own_hook)
    optimizer = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    for batch in batches:
        with model.no_sync():
            model(batch).sum().backward()
        loss: Tensor = model(batch).mean()
        model.backward(loss, weight=len(batch))
        optimizer.step()
        optimizer.zero_grad()
    inner: nn.Module = model.module
    return {name: value for name, value in inner.state_dict().items() if "weight" in name}


def compress(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, paceline.hooks.int8())


def evaluate(net: nn.Linear, batch: Tensor) -> Tensor:
    model = DataParallel(net, device_ids=["cpu", "cpu"], gather="cat")
    answers: Tensor = model(batch)
    return answers + model.module.weight.sum()


def launched(rank: int) -> float:
    return rank / 2


numbers: list[float] = paceline.launch(launched, n=2, args=(1,))
