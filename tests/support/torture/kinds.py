"""Parameters and modules of unusual kinds."""

import copy
from functools import partial

import torch
from torch import nn
from torch.nn.utils import parametrizations

from torture.case import WIDTH, Case, Turn, layers, loss_of, plain

# More than torch's default cap of 25 MiB a bucket.
OVER_THE_CAP = 28 * 2**20 // 8


class Words(nn.Module):
    def __init__(self, *, bag: bool) -> None:
        super().__init__()
        self.bag = bag
        embedding = partial(nn.EmbeddingBag, mode="sum") if bag else nn.Embedding
        self.embed = embedding(7, WIDTH, sparse=True)
        self.decode = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        offsets = (x.new_tensor([0, len(x) // 2]),) if self.bag else ()
        embedded = self.decode.weight[:1] if skip else self.embed(x, *offsets)
        return self.decode(embedded).square().sum()


def empty_on_one_rank(turn: Turn) -> None:
    turn.net(turn.indexes(0 if turn.rank == 1 else 4, 7)).backward()


def embedding_skipped_on_one_rank(turn: Turn) -> None:
    turn.net(turn.indexes(4, 7), skip=turn.rank == 1).backward()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.cdouble)
        self.real = nn.Linear(WIDTH, WIDTH, dtype=torch.double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.real(self.linear(torch.complex(x, x.flip(0))).abs())


def convolutions() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3)).double()
    return module.to(memory_format=torch.channels_last)


def images(turn: Turn) -> None:
    x = turn.rows(4, 2 * 6 * 6).reshape(4, 2, 6, 6).to(memory_format=torch.channels_last)
    loss_of(turn.net(x)).backward()


class TwoPrecisions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.ModuleList([nn.Linear(WIDTH, WIDTH).double() for _ in range(2)])
        self.coarse = nn.ModuleList([nn.Linear(WIDTH, WIDTH).bfloat16() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Side by side, so that what is rounded on one side does not show on the other.
        rounded = x.bfloat16()
        for fine, coarse in zip(self.fine, self.coarse, strict=True):
            x, rounded = fine(x).tanh(), coarse(rounded).tanh()
        return loss_of(x) + loss_of(rounded)


def loss_from_the_module(turn: Turn) -> None:
    turn.net(turn.rows()).backward()


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.randn(0, WIDTH))
        self.inner = layers(2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.cat([x, self.empty]))


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.inner = layers(2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / self.temperature


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 5, dtype=torch.double).t())
        self.inner = layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.weight.t()


class Tiny(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(1, dtype=torch.double) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.parts)) * x.sum()


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, 1).double()
        self.large = nn.Parameter(torch.arange(OVER_THE_CAP, dtype=torch.double) / OVER_THE_CAP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large * self.stem(x).sum()


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(WIDTH, dtype=torch.double) for _ in range(3)])
        self.shifts = nn.ParameterDict({name: torch.randn(WIDTH, dtype=torch.double) for name in "abc"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, shift in zip(self.scales, self.shifts.values(), strict=True):
            x = (x * scale + shift).tanh()
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 4, num_layers=2, bidirectional=True).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (hidden, _) = self.lstm(x)
        return loss_of(out) + loss_of(hidden)


def copied_parts() -> nn.Module:
    part = layers(1)
    return nn.Sequential(part, copy.deepcopy(part), copy.deepcopy(part))


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), layers(1)).double()


def on_meta() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, device="meta")


CASES = [
    Case(
        name="sparse embedding, empty input on one rank",
        build=partial(Words, bag=False),
        step=empty_on_one_rank,
    ),
    Case(
        name="sparse embedding bag, empty input on one rank",
        build=partial(Words, bag=True),
        step=empty_on_one_rank,
    ),
    Case(
        name="sparse embedding skipped by one rank",
        build=partial(Words, bag=False),
        step=embedding_skipped_on_one_rank,
    ),
    Case(name="complex parameters", build=Complex, step=plain),
    Case(name="convolutions in channels_last", build=convolutions, step=images),
    Case(name="bfloat16 and float64 parameters", build=TwoPrecisions, step=loss_from_the_module),
    Case(name="parameter without elements", build=Empty, step=plain),
    Case(name="parameter without dimensions", build=Scalar, step=plain),
    Case(name="transposed parameter", build=Transposed, step=plain),
    Case(name="5,000 tiny parameters", build=partial(Tiny, 5_000), step=plain, steps=2),
    Case(name="parameter larger than a bucket", build=Large, step=plain, steps=2),
    Case(name="lists and dicts of parameters", build=Lists, step=plain),
    Case(name="LSTM", build=Recurrent, step=loss_from_the_module),
    Case(name="deep copies of a submodule", build=copied_parts, step=plain),
    Case(name="weight norm", build=weight_norm, step=plain),
    Case(name="module on the meta device is refused", build=on_meta, step=plain, steps=0, refused="meta"),
]
