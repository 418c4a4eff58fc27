"""What optimizers of a wrapped module have in common: their parameters by default, and uneven inputs."""

from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.torch_distributed import Join, Joinable, JoinHook
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import OptionError
from paceline.torch_private import disable_join


class StepsWithWrapper(Joinable):
    """What all ranks step together, so that ranks without inputs have to step, too."""

    _wrapper: DistributedDataParallel
    _called = "optimizer"

    def join_hook(self, **_: Any) -> JoinHook:
        """The hook that torch's join context calls on a rank without inputs."""
        return _StepsWithoutInputs(self)

    @property
    def join_device(self) -> torch.device:
        """The device for the collectives of torch's join context."""
        return self._wrapper.join_device

    @property
    def join_process_group(self) -> Any:
        """The group for the collectives of torch's join context."""
        return self._wrapper.process_group

    @property
    def steps_after_this_forward(self) -> bool:
        """Whether gradients are averaged after the wrapper's last forward."""
        return self._wrapper.require_forward_param_sync

    def after_join(self) -> None:
        """All ranks have left torch's join context."""

    def _note_step(self) -> None:
        """A rank that has inputs steps: tell those that have none; raise if they could not step."""
        if self._wrapper._join_config.enable and not self._join_config.enable:
            raise OptionError(
                f"the {self._called} must join too, because ranks without inputs step their parts: "
                f"use Join([wrapper, {self._called}])"
            )
        Join.notify_join_context(self)

    def step(self) -> Any:
        """Step; every rank calls this at once."""
        raise NotImplementedError


class WrappedOptimizer(Optimizer, StepsWithWrapper):
    """An optimizer of which each rank steps a part."""


class _StepsWithoutInputs(JoinHook):
    def __init__(self, stepping: StepsWithWrapper) -> None:
        self._stepping = stepping
        super().__init__()

    def main_hook(self) -> None:
        if self._stepping.steps_after_this_forward:
            self._stepping.step()

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: ARG002, FBT001  # torch's signature
        self._stepping.after_join()
        disable_join(self._stepping)


def check_wrapper(wrapper: object, name: str) -> None:
    """Raise if an optimizer was not given a wrapper: torch's optimizers take parameters first."""
    if not isinstance(wrapper, DistributedDataParallel):
        raise OptionError(
            f"the first argument of a {name} must be paceline's wrapper; parameters come third: "
            f"{name}(ddp, torch.optim.Adam, params, lr=...) (given: {type(wrapper).__name__})"
        )


def trainable(wrapper: DistributedDataParallel) -> list[Parameter]:
    """Parameters that require a gradient, without the ignored ones, which may differ between ranks."""
    ignored = wrapper.parameters_to_ignore
    named = wrapper.module.named_parameters()
    return [each for name, each in named if each.requires_grad and name not in ignored]
