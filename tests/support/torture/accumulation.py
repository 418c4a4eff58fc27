"""Gradients that are there before backward: accumulated, kept or put there by the user."""

import torch
from torch import nn

from torture.case import Branches, Case, Turn, keep, layers, loss_of, plain

MICRO_BATCHES = 3


def no_sync_around_both(turn: Turn) -> None:
    with turn.no_sync():
        for batch in range(MICRO_BATCHES - 1):
            loss_of(turn.net(turn.rows(batch=batch))).backward()
    loss_of(turn.net(turn.rows(batch=MICRO_BATCHES))).backward()


def no_sync_around_backward(turn: Turn) -> None:
    for batch in range(MICRO_BATCHES - 1):
        loss = loss_of(turn.net(turn.rows(batch=batch)))
        with turn.no_sync():
            loss.backward()
    loss_of(turn.net(turn.rows(batch=MICRO_BATCHES))).backward()


def used_in_the_first_batch_only(turn: Turn) -> None:
    with turn.no_sync():
        loss_of(turn.net(turn.rows())).backward()
    loss_of(turn.net(turn.rows(batch=1), gain=False)).backward()


def used_in_the_first_batch_of_one_rank_only(turn: Turn) -> None:
    with turn.no_sync():
        loss_of(turn.net(turn.rows(), gain=turn.rank == 0)).backward()
    loss_of(turn.net(turn.rows(batch=1), gain=False)).backward()


def used_in_the_last_batch_only(turn: Turn) -> None:
    with turn.no_sync():
        loss_of(turn.net(turn.rows(), gain=False)).backward()
    loss_of(turn.net(turn.rows(batch=1))).backward()


def several_synced_backwards(turn: Turn) -> None:
    for batch in range(MICRO_BATCHES):
        loss_of(turn.net(turn.rows(batch=batch))).backward()


def fill_with_zeros(module: nn.Module) -> None:
    module.zero_grad(set_to_none=False)


def replace(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)


def replace_every_other(module: nn.Module) -> None:
    for index, parameter in enumerate(module.parameters()):
        parameter.grad = None if index % 2 else torch.full_like(parameter, 0.5)


CASES = [
    Case(name="`no_sync` around forward and backward", build=layers, step=no_sync_around_both),
    Case(name="`no_sync` around backward only", build=layers, step=no_sync_around_backward),
    Case(
        name="`no_sync`, parameter used in the first micro-batch only",
        build=Branches,
        step=used_in_the_first_batch_only,
    ),
    Case(
        name="`no_sync`, parameter used in the first micro-batch of one rank only",
        build=Branches,
        step=used_in_the_first_batch_of_one_rank_only,
    ),
    Case(
        name="`no_sync`, parameter used in the last micro-batch only",
        build=Branches,
        step=used_in_the_last_batch_only,
    ),
    Case(name="several forwards and backwards a step", build=layers, step=several_synced_backwards),
    Case(name="gradients never zeroed", build=layers, step=plain, clear=keep),
    Case(name="`zero_grad(set_to_none=False)`", build=layers, step=plain, clear=fill_with_zeros),
    Case(name="gradients replaced by the user", build=layers, step=plain, clear=replace),
    Case(name="some gradients replaced, others None", build=layers, step=plain, clear=replace_every_other),
]
