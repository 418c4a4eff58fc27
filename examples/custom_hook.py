"""Two ways to write your own communication hook, and how much each of them sends.

paceline run -n 2 examples/custom_hook.py

The first is a hook as torch has them: a function of a state and a bucket that returns a future. It issues one
collective per bucket. The second is a compressor, which only turns numbers into bytes and back.
``paceline.hooks`` does the rest: it remembers what the compression loses, and adds it to the next gradient. A
third network, without a hook, shows the difference.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # left out of its stubs
from torch.futures import Future

from paceline import DistributedDataParallel, hooks

STEPS = 60
SIZE = 64


@dataclass
class Sent:
    """Counts the bytes that a hook sends."""

    bytes: int = 0


def in_half(sent: Sent, bucket: GradBucket) -> Future[Tensor]:
    """Averages a bucket in float16."""
    buffer = bucket.buffer()
    half = (buffer / dist.get_world_size()).half()
    sent.bytes += half.nbytes
    summed = dist.all_reduce(half, async_op=True).get_future()
    average: Future[Tensor] = summed.then(lambda done: buffer.copy_(done.value()[0]))
    return average


class Signs:
    """Sends one bit per number, its sign, and after the bits the mean magnitude of all numbers."""

    name = "signs"
    keeps_places = True

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._values = 2 ** torch.arange(8)

    def encode(self, rows: Tensor) -> Tensor:
        negative = nn.functional.pad(rows < 0, (0, -rows.shape[1] % 8)).unflatten(1, (-1, 8))
        bits = (negative * self._values).sum(2).to(torch.uint8)
        scales = rows.abs().mean(1, keepdim=True)
        message = torch.cat((bits, scales.view(torch.uint8)), dim=1)
        self._sent.bytes += message.nbytes
        return message

    def decode(self, messages: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        bits, scales = messages.split([messages.shape[1] - dtype.itemsize, dtype.itemsize], dim=1)
        scales = scales.clone(memory_format=torch.contiguous_format).view(dtype)  # view needs aligned numbers
        negative = (bits.unsqueeze(2) & self._values).flatten(1)[:, :numel] != 0
        return torch.where(negative, -scales, scales)


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, 128), nn.Tanh(), nn.Linear(128, 1))
    # Compressors run between hosts only. Ranks of one host average gradients in shared memory, so this
    # example turns shared memory off.
    return DistributedDataParallel(model, transport="c10d")


def train(model: nn.Module) -> float:
    """Returns the loss of this rank's last batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for x in torch.randn(STEPS, 64, SIZE, generator=data):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x[:, :4].sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    dist.init_process_group("gloo")
    by_half, by_signs = Sent(), Sent()
    exact, half, signs = wrapped(), wrapped(), wrapped()
    half.register_comm_hook(by_half, in_half)
    signs.register_comm_hook(None, hooks.with_error_feedback(Signs(by_signs)))
    losses = [train(model) for model in (exact, half, signs)]
    whole = STEPS * sum(parameter.nbytes for parameter in exact.parameters())
    if dist.get_rank() == 0:
        sent = (whole, by_half.bytes, by_signs.bytes)
        for name, count, loss in zip(("no hook", "in_half", "Signs"), sent, losses, strict=True):
            share = f"{count / STEPS:,.0f} bytes a step, {count / whole:.1%}"
            print(f"{name} hands over {share}; loss {loss:.3f} at the end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
