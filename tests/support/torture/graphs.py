"""Graphs that are not one forward, one loss, one backward over parameters used once."""

import copy

import torch
from torch import nn

from torture.case import WIDTH, Branches, Case, Turn, each, layers, loss_of, plain


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.decode = nn.Linear(WIDTH, 5)
        self.decode.weight = self.embed.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.middle(self.embed(x)).tanh())


def words(turn: Turn) -> None:
    loss_of(turn.net(turn.indexes(4, 5))).backward()


def two_forwards(turn: Turn) -> None:
    a, b = turn.net(turn.rows()), turn.net(turn.rows(batch=1))
    loss_of(a - b).backward()


def two_forwards_in_a_row(turn: Turn) -> None:
    loss_of(turn.net(turn.net(turn.rows()))).backward()


def two_forwards_two_backwards(turn: Turn) -> None:
    a, b = turn.net(turn.rows()), turn.net(turn.rows(batch=1))
    loss_of(a).backward()
    loss_of(b).backward()


def one_of_two_forwards(turn: Turn) -> None:
    turn.net(turn.rows())
    loss_of(turn.net(turn.rows(batch=1))).backward()


def first_of_two_forwards(turn: Turn) -> None:
    out = turn.net(turn.rows())
    turn.net(turn.rows(batch=1))
    loss_of(out).backward()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), layers(1)).double()


class Scaled(nn.Module):
    """Multiplies by a buffer, which autograd keeps for backward."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers(2)
        self.register_buffer("scale", torch.randn(WIDTH))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def normed_by_the_past() -> nn.Module:
    module = normed()
    module[1].eval()
    return module


def two_losses(turn: Turn) -> None:
    out = turn.net(turn.rows())
    loss_of(out).backward(retain_graph=True)
    out.abs().sum().backward()


class Two(nn.Module):
    """Two outputs behind a shared stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = layers(1)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stem = self.stem(x)
        return self.a(stem), self.b(stem)


def a_loss_for_each_output(turn: Turn) -> None:
    a, b = turn.net(turn.rows())
    loss_of(a).backward(retain_graph=True)
    loss_of(b).backward()


def same_loss_twice(turn: Turn) -> None:
    loss = loss_of(turn.net(turn.rows()))
    loss.backward(retain_graph=True)
    loss.backward()


def penalty_on_a_weight(turn: Turn) -> None:
    loss = loss_of(turn.net(turn.rows()))
    (loss + (1 + turn.rank) * turn.module.stem.weight.square().sum()).backward()


def used_only_outside(turn: Turn) -> None:
    loss = loss_of(turn.net(turn.rows(), gain=False))
    (loss + (1 + turn.rank) * turn.module.gain.square().sum()).backward()


def part_called_directly(turn: Turn) -> None:
    loss_of(turn.module.right(turn.module.stem(turn.rows()))).backward()


def part_called_beside_forward(turn: Turn) -> None:
    out = turn.net(turn.rows(), right=False)
    loss_of(out + turn.module.right(turn.rows(batch=1))).backward()


def part_called_in_every_other_step(turn: Turn) -> None:
    if turn.step % 2:
        part_called_directly(turn)
    else:
        plain(turn)


def penalty_of_input_gradients(turn: Turn) -> None:
    x = turn.rows().requires_grad_()
    out = turn.net(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (loss_of(out) + grad.square().sum()).backward()


def penalty_of_parameter_gradients(turn: Turn) -> None:
    loss = loss_of(turn.net(turn.rows()))
    grads = torch.autograd.grad(loss, list(turn.module.parameters()), create_graph=True)
    (loss + sum(grad.square().sum() for grad in grads)).backward()


def two_wrappers(turn: Turn) -> None:
    x = turn.rows()
    loss_of(turn.net[0](x) * turn.net[1](x)).backward()


def generator_then_critic(turn: Turn) -> None:
    generator, critic = turn.net
    fake = generator(turn.rows())
    critic(fake).sum().backward()
    turn.module[1].zero_grad()
    loss_of(critic(fake.detach())).backward()


def pair() -> nn.Module:
    return nn.ModuleList([layers(2), layers(2)])


def input_with_gradient(turn: Turn) -> None:
    x = turn.rows().requires_grad_()
    loss_of(turn.net(x)).backward()
    turn.local["x.grad"] = x.grad


def teacher(turn: Turn) -> None:
    x = turn.rows()
    frozen = copy.deepcopy(turn.module).requires_grad_(False)
    loss_of(turn.net(x) - frozen(x + 1)).backward()


def no_backward_in_one_step(turn: Turn) -> None:
    out = turn.net(turn.rows())
    if turn.step != 1:
        loss_of(out).backward()


def look_on_one_rank(turn: Turn) -> None:
    if turn.rank == 0:
        turn.net.eval()
        with torch.no_grad():
            turn.net(turn.rows(batch=1))
        turn.net.train()
    plain(turn)


class Reassigned(nn.Module):
    """Each forward puts another tensor in its buffer's place. Rank 0's is the one that counts."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers(2)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x) * self.scale
        self.scale = self.scale + x.detach().mean(0)
        return out


CASES = [
    Case(name="tied weights", build=Tied, step=words),
    Case(name="two forwards before one backward", build=layers, step=two_forwards),
    Case(
        name="two forwards before one backward, BatchNorm", build=normed, step=two_forwards, has_buffers=True
    ),
    Case(
        name="two forwards before one backward, BatchNorm in eval mode",
        build=normed_by_the_past,
        step=two_forwards,
        has_buffers=True,
    ),
    Case(
        name="two forwards before one backward, buffer kept for backward",
        build=Scaled,
        step=two_forwards,
        has_buffers=True,
    ),
    Case(name="two forwards, one fed to the other", build=layers, step=two_forwards_in_a_row),
    Case(name="two forwards before two backwards", build=layers, step=two_forwards_two_backwards),
    Case(name="two forwards, a loss on the second only", build=layers, step=one_of_two_forwards),
    Case(name="two forwards, a loss on the first only", build=layers, step=first_of_two_forwards),
    Case(name="two losses, two backwards, `retain_graph`", build=layers, step=two_losses),
    Case(
        name="two outputs with a backward each, `retain_graph`",
        build=Two,
        step=a_loss_for_each_output,
    ),
    Case(name="backward twice over one loss, `retain_graph`", build=layers, step=same_loss_twice),
    Case(name="parameter used in forward and outside it", build=Branches, step=penalty_on_a_weight),
    Case(name="parameter used only outside forward", build=Branches, step=used_only_outside),
    Case(name="only a method other than forward", build=Branches, step=part_called_directly),
    Case(name="forward and a method beside it", build=Branches, step=part_called_beside_forward),
    Case(name="forward and another method in turn", build=Branches, step=part_called_in_every_other_step),
    Case(name="gradient penalty on inputs", build=layers, step=penalty_of_input_gradients),
    Case(name="gradient penalty on parameters", build=layers, step=penalty_of_parameter_gradients),
    Case(name="two wrappers, one loss", build=pair, step=two_wrappers, wrap=each),
    Case(name="two wrappers, trained against each other", build=pair, step=generator_then_critic, wrap=each),
    Case(name="input that requires a gradient", build=layers, step=input_with_gradient),
    Case(name="deep copy of the module as a teacher", build=layers, step=teacher),
    Case(name="forward without backward in one step", build=layers, step=no_backward_in_one_step),
    Case(
        name="forward under `no_grad` on one rank only, BatchNorm",
        build=normed,
        step=look_on_one_rank,
        has_buffers=True,
    ),
    Case(name="buffer reassigned in forward", build=Reassigned, step=plain, has_buffers=True),
]
