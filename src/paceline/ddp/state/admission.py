"""Which modules can be wrapped."""

from collections.abc import Collection

from torch import nn

from paceline.ddp.state.parameters import Slots
from paceline.errors import OptionError, WrapError


def refuse_uninitialised(module: nn.Module, ignored: Collection[str]) -> None:
    """Raise if a lazy module has not been called yet."""
    for name, parameter in module.named_parameters():
        if name not in ignored and isinstance(parameter, nn.UninitializedParameter):
            raise WrapError(
                f"a lazy module must be called once before it is wrapped (uninitialised: {name!r})"
            )


def check_module(module: nn.Module, found: Slots, ignored: Collection[str]) -> None:
    """Raise if there is nothing to train, or if parameters are where they cannot be trained."""
    if not found.trainable:
        raise WrapError(
            "DistributedDataParallel is not needed for a module without a parameter that requires a gradient "
            f"(module: {type(module).__name__}, ignored: {sorted(ignored)})"
        )
    types = sorted({parameter.device.type for parameter in found.parameters})
    if len(types) > 1:
        raise OptionError(f"a module must be on one type of device (found: {types})")
    for slot, parameter in zip(found.slots, found.parameters, strict=True):
        if parameter.device.type == "meta":
            raise WrapError(
                f"a parameter on the meta device has no values to train (parameter: {slot.name!r})"
            )
