"""Parameters that get no gradient: on some ranks, on all of them, in some steps."""

import dataclasses
from collections import namedtuple
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from torture.case import WIDTH, Branches, Case, Turn, loss_of, plain


def one_parameter_on_one_rank(turn: Turn) -> None:
    loss_of(turn.net(turn.rows(), gain=turn.rank != 1)).backward()


def one_parameter_everywhere(turn: Turn) -> None:
    loss_of(turn.net(turn.rows(), gain=False)).backward()


def one_parameter_after_the_first_step(turn: Turn) -> None:
    loss_of(turn.net(turn.rows(), gain=turn.step == 0)).backward()


def forget_all_but_gain(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if name != "gain":
            parameter.grad = None


def other_branch_each_step(turn: Turn) -> None:
    even = turn.step % 2 == 0
    loss_of(turn.net(turn.rows(), left=even, right=not even)).backward()


def other_branch_on_each_rank(turn: Turn) -> None:
    first = (turn.rank + turn.step) % 2 == 0
    loss_of(turn.net(turn.rows(), left=first, right=not first)).backward()


def branch_on_one_rank(turn: Turn) -> None:
    loss_of(turn.net(turn.rows(), right=turn.rank != 1)).backward()


class Heads(nn.Module):
    """Several outputs, in a container of the caller's choice."""

    def __init__(self, container: Any = lambda a, b: (a, b)) -> None:
        super().__init__()
        self.container = container
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: torch.Tensor, *, skip_b: bool = False) -> Any:
        stem = self.stem(x).tanh()
        return self.container(self.a(stem), stem if skip_b else self.b(stem))


def other_output_on_each_rank(turn: Turn) -> None:
    loss_of(turn.net(turn.rows())[turn.rank % 2]).backward()


def output_never_in_the_loss(turn: Turn) -> None:
    loss_of(turn.net(turn.rows())[0]).backward()


Pair = namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Data:
    a: torch.Tensor
    b: torch.Tensor


class Own:
    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a = a
        self.b = b


def in_a_dict() -> nn.Module:
    return Heads(lambda a, b: {"a": a, "nested": [b]})


def in_a_namedtuple() -> nn.Module:
    return Heads(Pair)


def in_a_dataclass() -> nn.Module:
    return Heads(Data)


def in_an_own_class() -> nn.Module:
    return Heads(Own)


def dict_unused_on_one_rank(turn: Turn) -> None:
    out = turn.net(turn.rows(), skip_b=turn.rank == 1)
    (loss_of(out["a"]) + loss_of(out["nested"][0])).backward()


def attributes_unused_on_one_rank(turn: Turn) -> None:
    out = turn.net(turn.rows(), skip_b=turn.rank == 1)
    (loss_of(out.a) + loss_of(out.b)).backward()


class Reticent(torch.autograd.Function):
    """Multiplies, and may give its second input no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: torch.Tensor, silent: bool) -> torch.Tensor:
        ctx.save_for_backward(x, gain)
        ctx.silent = silent
        return x * gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, gain = ctx.saved_tensors
        return grad * gain, None if ctx.silent else (grad * x).sum(0), None


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.double()

    def forward(self, x: torch.Tensor, silent: bool) -> torch.Tensor:
        return Reticent.apply(self.stem(x), self.gain, silent)


def no_gradient_on_one_rank(turn: Turn) -> None:
    loss_of(turn.net(turn.rows(), turn.rank == 1)).backward()


class CheckpointedBranches(Branches):
    def forward(self, x: torch.Tensor, **parts: bool) -> torch.Tensor:
        def body(hidden: torch.Tensor) -> torch.Tensor:
            return Branches.forward(self, hidden, **parts)

        return checkpoint(body, x * self.gain, use_reentrant=True)


def frozen_branches() -> nn.Module:
    module = Branches()
    module.right.requires_grad_(False)
    return module


def frozen_after_the_first_step(turn: Turn) -> None:
    turn.module.right.requires_grad_(turn.step == 0)
    plain(turn)


def unfrozen_after_the_first_step(turn: Turn) -> None:
    turn.module.right.requires_grad_(turn.step > 0)
    plain(turn)


def frozen_in_turn(turn: Turn) -> None:
    turn.module.left.requires_grad_(turn.step % 2 == 0)
    turn.module.right.requires_grad_(turn.step % 2 == 1)
    plain(turn)


CASES = [
    Case(name="parameter unused on one rank", build=Branches, step=one_parameter_on_one_rank),
    Case(name="parameter unused on all ranks", build=Branches, step=one_parameter_everywhere),
    Case(
        name="parameter unused on all ranks, its old gradient kept",
        build=Branches,
        step=one_parameter_after_the_first_step,
        clear=forget_all_but_gain,
    ),
    Case(name="branches that alternate by step", build=Branches, step=other_branch_each_step),
    Case(name="another branch on each rank", build=Branches, step=other_branch_on_each_rank),
    Case(name="whole branch skipped by one rank", build=Branches, step=branch_on_one_rank),
    Case(name="output that no rank puts in its loss", build=Heads, step=output_never_in_the_loss),
    Case(name="another output in the loss on each rank", build=Heads, step=other_output_on_each_rank),
    Case(
        name="outputs in a dict, one part unused on one rank", build=in_a_dict, step=dict_unused_on_one_rank
    ),
    Case(
        name="outputs in a namedtuple, one part unused on one rank",
        build=in_a_namedtuple,
        step=attributes_unused_on_one_rank,
    ),
    Case(
        name="outputs in a dataclass, one part unused on one rank",
        build=in_a_dataclass,
        step=attributes_unused_on_one_rank,
    ),
    Case(
        name="outputs in the user's own class, one part unused on one rank",
        build=in_an_own_class,
        step=attributes_unused_on_one_rank,
    ),
    Case(
        name="autograd function that gives a parameter no gradient on one rank",
        build=Gained,
        step=no_gradient_on_one_rank,
    ),
    Case(
        name="re-entrant checkpoint, parameter unused on one rank",
        build=CheckpointedBranches,
        step=branch_on_one_rank,
    ),
    Case(name="parameters frozen before wrapping", build=frozen_branches, step=plain),
    Case(name="parameters frozen after wrapping", build=Branches, step=frozen_after_the_first_step),
    Case(
        name="parameters unfrozen after wrapping", build=frozen_branches, step=unfrozen_after_the_first_step
    ),
    Case(name="parameters frozen and unfrozen in turn", build=Branches, step=frozen_in_turn),
]
