"""One training script over torch's wrapper and ours: parameters are equal bit for bit."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from wrappers import WRAPPERS, options_for

from paceline.testing import RankPool

STEPS = 12
BATCH = 6
WIDTH = 8


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, WIDTH))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 3),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(64, WIDTH),
        )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
        self.layer.norm2.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(20, WIDTH, sparse=True, mode="sum")
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).sum(1) + self.bag(x))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.turn).abs() * self.scale


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def flat(rank: int) -> Tensor:  # noqa: ARG001  # the generator is the rank's own
    return torch.randn(BATCH, WIDTH)


def images(rank: int) -> Tensor:  # noqa: ARG001
    return torch.randn(BATCH, 3, 8, 8)


def sequences(rank: int) -> Tensor:  # noqa: ARG001
    return torch.randn(BATCH, 5, WIDTH)


def tokens(rank: int) -> Tensor:  # noqa: ARG001
    return torch.randint(20, (BATCH, 4))


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def plain_sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05)


def fp16(ddp: Any) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def all_reduce(ddp: Any) -> None:
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


def noop(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Averages nothing: ranks go their own ways."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def encode_and_decode(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    encoded = bucket.buffer().bfloat16().div_(2)

    def decode(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        return future.value()[0].to(bucket.buffer().dtype)

    return distributed.all_reduce(encoded, async_op=True).get_future().then(decode)


def no_average(ddp: Any) -> None:
    ddp.register_comm_hook(None, noop)


def encoded(ddp: Any) -> None:
    ddp.register_comm_hook(None, encode_and_decode)


def builtin_fp16(ddp: Any) -> None:
    ddp._register_builtin_comm_hook(distributed.BuiltinCommHookType.FP16_COMPRESS)


def builtin(ddp: Any) -> None:
    ddp._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)


def power_sgd(ddp: Any) -> None:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=4, min_compression_rate=0.5
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def quantized(ddp: Any) -> None:
    ddp.register_comm_hook(distributed.group.WORLD, quantization_hooks.quantization_pertensor_hook)


def quantized_by_channel(ddp: Any) -> None:
    ddp.register_comm_hook(distributed.group.WORLD, quantization_hooks.quantization_perchannel_hook)


@dataclass(frozen=True)
class Script:
    """What is trained, and how."""

    build: Callable[[], nn.Module] = Perceptron
    data: Callable[[int], Tensor] = flat
    optimizer: Callable[[Any], Any] = momentum
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] | None = None
    accumulate: int = 1
    dtype: torch.dtype = torch.float32
    memory_format: Any = None
    sets_to_none: bool = True
    clip: bool = False
    # Only torch 2.15 has it; an older one trains without, which must lead to the same parameters.
    manual: bool = False


LAZY = {"lazy_bucket_allocation": True}
SMALL = {"bucket_cap_mb": 0.0005}
SCRIPTS: dict[str, Script] = {
    "perceptron": Script(),
    "perceptron, Adam": Script(optimizer=torch.optim.Adam),
    "perceptron, clipped": Script(clip=True),
    "perceptron, gradients kept": Script(sets_to_none=False),
    "convolutions, BatchNorm": Script(Convolutions, images),
    "convolutions, BatchNorm of each rank": Script(
        Convolutions, images, options={"forward_sync_buffers": False}
    ),
    "transformer, dropout": Script(Attention, sequences, torch.optim.Adam),
    "LSTM": Script(Recurrent, sequences, torch.optim.Adam),
    "accumulation": Script(accumulate=3),
    "accumulation, views": Script(accumulate=3, options={"gradient_as_bucket_view": True}),
    "accumulation, BatchNorm": Script(Convolutions, images, accumulate=3),
    "accumulation, fp16 hook": Script(accumulate=2, prepare=fp16),
    "views": Script(options={"gradient_as_bucket_view": True}),
    "views, gradients kept": Script(options={"gradient_as_bucket_view": True}, sets_to_none=False),
    "small buckets": Script(options=SMALL),
    "small buckets, views": Script(options={**SMALL, "gradient_as_bucket_view": True}),
    "listed buckets": Script(options={"bucket_cap_mb_list": [0.0001, 0.0005, 0.001]}),
    "batched copies": Script(options={"batched_grad_copy": True}),
    "unused parameters looked for": Script(options={"find_unused_parameters": True}),
    "static graph": Script(options={"static_graph": True}),
    "all-reduce hook": Script(prepare=all_reduce),
    "fp16 hook": Script(prepare=fp16),
    "fp16 hook, small buckets": Script(prepare=fp16, options=SMALL),
    "fp16 hook, views": Script(prepare=fp16, options={"gradient_as_bucket_view": True}),
    "hook that averages nothing": Script(prepare=no_average),
    "hook that encodes and decodes": Script(prepare=encoded),
    "built-in hook": Script(prepare=builtin),
    "built-in fp16 hook": Script(prepare=builtin_fp16),
    "PowerSGD": Script(prepare=power_sgd),
    "PowerSGD, convolutions": Script(Convolutions, images, prepare=power_sgd),
    "sparse embeddings": Script(Words, tokens, plain_sgd),
    "sparse embeddings, small buckets": Script(Words, tokens, plain_sgd, options=SMALL),
    "complex": Script(Complex, optimizer=plain_sgd),
    "channels_last": Script(Convolutions, images, memory_format=torch.channels_last),
    "channels_last, views": Script(
        Convolutions, images, memory_format=torch.channels_last, options={"gradient_as_bucket_view": True}
    ),
    "bfloat16": Script(dtype=torch.bfloat16),
    "bfloat16, small buckets": Script(dtype=torch.bfloat16, options=SMALL),
    "float16": Script(dtype=torch.float16),
    "float64": Script(dtype=torch.float64),
    "lazy buckets": Script(options=LAZY),
    "lazy buckets, small": Script(options=LAZY | SMALL),
    "lazy buckets, views": Script(options=LAZY | {"gradient_as_bucket_view": True}),
    "lazy buckets, gradients kept": Script(options=LAZY | SMALL, sets_to_none=False),
    "lazy buckets, accumulation, fp16 hook": Script(options=LAZY, accumulate=2, prepare=fp16),
    "lazy buckets, channels_last": Script(
        Convolutions, images, memory_format=torch.channels_last, options=LAZY | SMALL
    ),
    "manual finalization": Script(manual=True),
    "manual finalization, lazy small buckets, views": Script(
        manual=True, options=LAZY | SMALL | {"gradient_as_bucket_view": True}
    ),
    "manual finalization, accumulation": Script(manual=True, accumulate=3),
    "manual finalization, fp16 hook": Script(manual=True, prepare=fp16),
}
IS_NEW = hasattr(WRAPPERS["torch"], "finalize_backward")
if IS_NEW:  # older versions of these hooks raise with gloo
    SCRIPTS["quantization hook"] = Script(prepare=quantized)
    SCRIPTS["quantization hook by channel"] = Script(prepare=quantized_by_channel)


def run(rank: int, wrapper: str, name: str) -> list[list[Tensor]]:
    """Parameters and buffers at the middle and at the end."""
    script = SCRIPTS[name]
    torch.manual_seed(3)
    net = script.build()
    if script.dtype is not torch.float32:
        net = net.to(script.dtype)
    if script.memory_format is not None:
        net = net.to(memory_format=script.memory_format)
    ddp = WRAPPERS[wrapper](net, **options_for(wrapper, script.options))
    is_manual = script.manual and (IS_NEW or wrapper == "paceline")
    if is_manual:
        ddp.require_manual_backward_finalization = True
    if script.prepare is not None:
        script.prepare(ddp)
    optimizer = script.optimizer([parameter for parameter in ddp.parameters() if parameter.requires_grad])
    torch.manual_seed(100 + rank)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=script.sets_to_none)
        for part in range(script.accumulate):
            with ddp.no_sync() if part + 1 < script.accumulate else contextlib.nullcontext():
                ddp(_input(script, rank)).square().mean().backward()
        if is_manual:
            ddp.finalize_backward()
        if script.clip:
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        optimizer.step()
        if step in (0, 1, STEPS // 2, STEPS - 1):
            seen.append([tensor.detach().clone() for tensor in ddp.state_dict().values()])
    return seen


def _input(script: Script, rank: int) -> Tensor:
    x = script.data(rank)
    if x.is_floating_point():
        x = x.to(script.dtype)
    return x if script.memory_format is None else x.to(memory_format=script.memory_format)


@pytest.mark.parametrize("name", SCRIPTS)
def test_parameters_and_buffers_are_torchs_bit_for_bit(name: str, pool: RankPool) -> None:
    ours, theirs = (pool.run(run, wrapper, name) for wrapper in ("paceline", "torch"))
    for rank in range(2):
        for moment, (mine, others) in enumerate(zip(ours[rank], theirs[rank], strict=True)):
            for index, (one, other) in enumerate(zip(mine, others, strict=True)):
                assert one.isfinite().all()
                assert one.equal(other), (
                    f"rank {rank}, moment {moment}, tensor {index}, "
                    f"off by {(one.double() - other.double()).abs().max():.3g}"
                )
                assert one.stride() == other.stride()
