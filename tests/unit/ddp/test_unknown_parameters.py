"""Parameters that nobody averages, because they came after the module was wrapped."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from paceline.ddp.state.parameters import UnknownParameters


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))


def watch(module: nn.Module, ignored: tuple[str, ...] = ()) -> UnknownParameters:
    return UnknownParameters(module, module.parameters(), ignored)


def silent(watched: UnknownParameters) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched.warn(is_step_new=True)


def replace_layer(module: nn.Sequential) -> None:
    module[1] = nn.Linear(3, 3)


def replace_parameter(module: nn.Sequential) -> None:
    module[1].weight = nn.Parameter(torch.zeros(3, 3))


def load_with_assign(module: nn.Sequential) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def add_adapter(module: nn.Sequential) -> None:
    module[1].adapter = nn.Linear(3, 3)


def parametrize(module: nn.Sequential) -> None:
    parametrizations.weight_norm(module[1])


CHANGES: dict[Callable[[nn.Sequential], None], list[str]] = {
    replace_layer: ["1.weight", "1.bias"],
    replace_parameter: ["1.weight"],
    load_with_assign: [f"{layer}.{name}" for layer in range(3) for name in ("weight", "bias")],
    add_adapter: ["1.adapter.weight", "1.adapter.bias"],
    parametrize: ["1.parametrizations.weight.original0", "1.parametrizations.weight.original1"],
}


@pytest.mark.parametrize("change", CHANGES)
def test_new_parameters_are_named_once(change: Callable[[nn.Sequential], None]) -> None:
    module = net()
    watched = watch(module)
    silent(watched)
    change(module)
    with pytest.warns(UserWarning, match="not averaged across ranks") as caught:
        watched.warn(is_step_new=True)
    assert all(repr(name) in str(caught[0].message) for name in CHANGES[change])
    silent(watched)


def untie(module: nn.Sequential) -> None:
    module[2].weight = nn.Parameter(module[2].weight.detach().clone())


def test_a_parameter_that_is_no_longer_shared_is_named() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    watched = watch(module)
    untie(module)
    with pytest.warns(UserWarning, match=r"\['2.weight'\]"):
        watched.warn(is_step_new=True)


def freeze(module: nn.Sequential) -> None:
    module.requires_grad_(False)


def convert(module: nn.Sequential) -> None:
    module.double()


def remove(module: nn.Sequential) -> None:
    del module[2]


def add_frozen(module: nn.Sequential) -> None:
    module.append(nn.Linear(1, 1).requires_grad_(False))


def change_values(module: nn.Sequential) -> None:
    module.load_state_dict(net().state_dict())


@pytest.mark.parametrize("change", [freeze, convert, remove, add_frozen, change_values])
def test_other_changes_are_nobodys_business(change: Callable[[nn.Sequential], None]) -> None:
    module = net()
    watched = watch(module)
    change(module)
    silent(watched)


def test_a_scripted_module_is_left_alone() -> None:
    module = torch.jit.script(net())
    watched = watch(module)
    for _ in range(20):
        silent(watched)


def test_what_the_user_said_to_ignore_is_ignored() -> None:
    module = net()
    watched = watch(module, ("3.weight", "3.bias"))
    module.append(nn.Linear(1, 1))
    silent(watched)


def test_without_a_sign_it_looks_before_every_16th_forward() -> None:
    module = net()
    watched = watch(module)
    watched.warn(is_step_new=False)
    add_adapter(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(15):
            watched.warn(is_step_new=False)
    with pytest.warns(UserWarning, match="not averaged across ranks"):
        watched.warn(is_step_new=False)
