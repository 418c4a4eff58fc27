"""Ray Train's ``prepare_model``, with paceline's wrapper around the model.

In the function that ``TorchTrainer`` runs on each worker, change the import::

    from paceline.integrations.ray import prepare_model  # instead of ray.train.torch

    model = prepare_model(network)

Tried with ray 2.60.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import MissingPackageError, OptionError

try:
    import ray.train
    import ray.train.torch
except ImportError as error:
    raise MissingPackageError(
        f"paceline's prepare_model needs a package that is not installed (missing: {error.name}); "
        "install it with `pip install 'paceline[ray]'`"
    ) from error


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,  # noqa: FBT001, FBT002  # the signature is Ray's
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Move a model to this worker's device, and wrap it if there are several workers.

    Args:
        model: the model of this worker.
        move_to_device: whether to move the model to the device that Ray gave this worker, or the device to
            move it to.
        parallel_strategy: "ddp", or None to only move the model.
        parallel_strategy_kwargs: options of ``paceline.DistributedDataParallel``.

    Returns:
        The wrapper; the model itself if there is one worker, or no strategy.
    """
    if parallel_strategy not in ("ddp", None):
        raise OptionError(
            f'parallel_strategy must be "ddp" or None (parallel_strategy: {parallel_strategy!r}); '
            "for other strategies use ray.train.torch.prepare_model"
        )
    model = ray.train.torch.prepare_model(model, move_to_device, parallel_strategy=None)
    if parallel_strategy is None or ray.train.get_context().get_world_size() == 1:
        return model
    device = move_to_device if isinstance(move_to_device, torch.device) else ray.train.torch.get_device()
    places = {"device_ids": [device], "output_device": device} if device.type == "cuda" else {}
    return DistributedDataParallel(model, **{**places, **(parallel_strategy_kwargs or {})})
