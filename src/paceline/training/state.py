"""What has to be saved so that another number of ranks can go on with the same bits."""

import copy
import io
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import OptionError
from paceline.tensors.param_groups import parameters_of


class Stateful(Protocol):
    """What has a state: a sampler, a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from a state."""


class TrainingState:
    """The state of a training: the same on all ranks, and for every number of ranks.

    It has module, optimizer, scheduler, sampler, the shards' random numbers and those outside of shards. Save
    it with ``paceline.save`` and load it with ``paceline.load``, or as an entry of what
    ``torch.distributed.checkpoint`` saves. Call these between two steps, on every rank.

    Args:
        ddp: the wrapper.
        optimizer: the optimizer of its parameters, or several.
        sampler: the sampler, with ``state_dict``, such as a ``ShardedBatchSampler``.
        others: what else has a state, under any name: a scheduler, a gradient scaler, an average of weights.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sampler: Stateful | None = None,
        **others: Stateful | None,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        for each in optimizers:
            _check_parameters(ddp, each)
        self.ddp = ddp
        names = ["optimizer", *(f"optimizer {number}" for number in range(2, len(optimizers) + 1))]
        parts = {
            **dict(zip(names, optimizers, strict=True)),
            "sampler": sampler,
            "shards": getattr(ddp, "shards", None),
            **others,
        }
        self._parts: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
        for name, part in self._parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise OptionError(
                    f"the {name} must have state_dict and load_state_dict, or it cannot be resumed "
                    f"({name}: {type(part).__name__})"
                )

    def state_dict(self) -> dict[str, Any]:
        """The module's tensors by name, and all else as bytes.

        ``torch.distributed.checkpoint`` loads only tensors that are there already, and an optimizer that has
        not stepped has none.
        """
        return in_bytes(self._values())

    def copy(self) -> dict[str, Any]:
        """A copy of all values, which training does not change; ``in_bytes`` makes a state dict of it."""
        return copy.deepcopy(self._values())

    def check_copyable(self) -> None:
        """Raise if another process could not take the state over."""
        for name, part in self._parts.items():
            try:
                _from_bytes(_to_bytes(part.state_dict()))
            except Exception as error:
                raise OptionError(
                    f"the state of the {name} cannot be copied to another process; it may have tensors, "
                    f"numbers, texts and containers of these ({type(error).__name__}: {error})"
                ) from error

    def _values(self) -> dict[str, Any]:
        rest = {name: part.state_dict() for name, part in self._parts.items()}
        module = self.ddp.module_state_dict()
        buffers = {name: value for name, value in self.ddp.module.named_buffers() if name not in module}
        return {"module": module, "rest": {"random": _random_state(), "buffers": buffers, **rest}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. No code in it is run."""
        if missing := {"module", "rest"} - state.keys():
            raise OptionError(f"not the state of a training (missing: {sorted(missing)})")
        rest = _from_bytes(state["rest"])
        if missing := self._parts.keys() - rest.keys():
            raise OptionError(f"the state lacks parts of this training (missing: {sorted(missing)})")
        self.ddp.load_state_dict(state["module"])
        self._load_buffers(rest.get("buffers", {}))
        for name, part in self._parts.items():
            part.load_state_dict(rest[name])
        _set_random_state(rest["random"])

    def _load_buffers(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Load the buffers that no state dict has."""
        with torch.no_grad():
            for name, buffer in self.ddp.module.named_buffers():
                if name in saved:
                    buffer.copy_(saved[name])


def in_bytes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of a state's values."""
    return {"module": values["module"], "rest": _to_bytes(values["rest"])}


def _to_bytes(values: Any) -> bytes:
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


def _from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _check_parameters(ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
    known = {id(parameter) for parameter in ddp.parameters()}
    strange = [tuple(each.shape) for each in parameters_of(optimizer) if id(each) not in known]
    if strange:
        raise OptionError(
            f"the optimizer has parameters that are not the wrapper's (number: {len(strange)}, shape of the "
            f"first: {strange[0]})"
        )


def _random_state() -> dict[str, Any]:
    """The random numbers outside of shards, in plain values that torch loads without running code."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        found["numpy"] = {
            "kind": kind,
            "keys": torch.tensor(keys.astype("int64")),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        }
    return found


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
    numpy, saved = sys.modules.get("numpy"), state.get("numpy")
    if numpy is not None and saved is not None:
        keys = saved["keys"].numpy().astype("uint32")
        numpy.random.set_state((saved["kind"], keys, saved["position"], saved["has_gauss"], saved["gauss"]))
