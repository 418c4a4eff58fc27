"""Strategies for Lightning: as its own "ddp", but with paceline's wrapper around the model.

Import this module, and use them by name::

    import paceline.integrations.lightning

    Trainer(strategy="paceline", devices=2)
    Fabric(strategy="paceline", devices=2)

``PacelineStrategy(...)`` and ``PacelineFabricStrategy(...)`` take options. They use private parts of
Lightning, tried with lightning 2.6.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import MissingPackageError, OptionError

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning.fabric.wrappers import _FabricModule
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise MissingPackageError(
        f"paceline's strategies need a package that is not installed (missing: {error.name}); "
        "install it with `pip install 'paceline[libraries]'`"
    ) from error

NAME = "paceline"


class PacelineStrategy(DDPStrategy):
    """Lightning's "ddp" for ``Trainer``, with paceline's wrapper around the model.

    Args:
        arguments: those of Lightning's ``DDPStrategy``. ``ddp_comm_hook`` works on CPUs too, and may be
            one of ``paceline.hooks``.
        weigh: returns the number of samples or tokens of a batch, by which its gradients are weighted. The
            gradients of accumulated batches are then averaged by weight too. By default all ranks count the
            same.
        options: those of Lightning's ``DDPStrategy`` and of ``paceline.DistributedDataParallel``.
    """

    def __init__(self, *arguments: Any, weigh: Callable[[Any], float] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._weigh = weigh
        self._weight: float | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register this strategy under its name."""
        _register(strategy_registry, cls)

    # mypy does not know that ours is a virtual subclass of torch's wrapper.
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:  # type: ignore[override]
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        hook = self._ddp_comm_hook
        if hook is not None:
            assert isinstance(self.model, DistributedDataParallel)
            self.model.register_comm_hook(
                self._ddp_comm_state, hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(hook)
            )

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Compute the weight of the batch, if asked to, and run the model's training step."""
        if self._weigh is not None:
            self._weight = self._weigh(arguments[0])
        return super().training_step(*arguments, **named)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *arguments: Any, **named: Any
    ) -> Tensor:
        """Run backward, weighted by the batch's weight if there is one."""
        if self._weight is None:
            return super().backward(closure_loss, optimizer, *arguments, **named)
        assert isinstance(self.model, DistributedDataParallel)
        with self.model.weigh(self._weight):
            return super().backward(closure_loss * self._passes, optimizer, *arguments, **named)

    @property
    def _passes(self) -> int:
        """The factor by which Lightning has divided the loss, which weighting would divide a second time."""
        module = self.lightning_module
        assert module is not None
        return module.trainer.accumulate_grad_batches if module.automatic_optimization else 1


class PacelineFabricStrategy(FabricDDPStrategy):
    """Lightning's "ddp" for ``Fabric``, with paceline's wrapper around each model.

    Its arguments are those of Lightning's ``DDPStrategy``, and of ``paceline.DistributedDataParallel``.
    """

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register this strategy under its name."""
        _register(strategy_registry, cls)

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:  # type: ignore[override]
        """Wrap a model."""
        return DistributedDataParallel(
            module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs
        )

    def weigh(self, model: nn.Module, weight: float) -> contextlib.AbstractContextManager[None]:
        """A context in which ``fabric.backward`` weights gradients by the number of samples or tokens.

        Args:
            model: the model that ``fabric.setup`` returned.
            weight: the number of samples or tokens.
        """
        wrapper = model._forward_module if isinstance(model, _FabricModule) else model
        if not isinstance(wrapper, DistributedDataParallel):
            raise OptionError(f"model must be what fabric.setup returned (model: {type(model)})")
        return wrapper.weigh(weight)


def _register(registry: Any, strategy: type) -> None:
    registry.register(NAME, strategy, description="data parallel with paceline's wrapper", override=True)


PacelineStrategy.register_strategies(StrategyRegistry)
PacelineFabricStrategy.register_strategies(STRATEGY_REGISTRY)
