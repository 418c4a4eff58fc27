"""Has backward leave each rank with the averages of its own parts of the parameters."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.ddp.buckets.cut import Cut, Range
from paceline.ddp.exchange.average import Average, LowPrecisionAverage
from paceline.ddp.exchange.part_average import PartAverage
from paceline.ddp.state.part_parameters import PartParameters
from paceline.ddp.wrapper import DistributedDataParallel
from paceline.errors import OptionError, UnsupportedError
from paceline.tensors.dtensor import is_dtensor
from paceline.tensors.part_parameter import PartParameter


class ReducedParts:
    """Which rank has which part of a wrapped module's parameters.

    Where ranks of a host share memory, each host has all parts, one or more per rank. Otherwise the ranks of
    the group have them together.

    Args:
        wrapper: the wrapped module.
        name: what asks for parts, for errors.

    Attributes:
        ranks: the number of ranks that have parts.
        rank: this rank's number among those of its host, or of the group.
    """

    def __init__(self, wrapper: DistributedDataParallel, name: str) -> None:
        _refuse(wrapper, name)
        self._reducer = wrapper._reducer
        self._group = group = wrapper._group
        self._slots, whole, _ = wrapper._wrapped.params
        self.rank = group.rank if group.shared is None else group.shared.rank
        self.ranks = group.size if group.shared is None else group.shared.leaders
        self._cut = Cut(self._slots, self.ranks)
        self._numbers: dict[Tensor, int] = {parameter: slot for slot, parameter in enumerate(whole)}
        self._parameters = PartParameters(wrapper._reducer.context.parameters)
        self._plain = Average(group) if wrapper._precision is None else LowPrecisionAverage(group)

    def slot_of(self, parameter: Tensor) -> int:
        """A parameter's slot."""
        if parameter not in self._numbers:
            raise OptionError(
                "the optimizer can step parameters that the wrapper averages, and no others "
                f"(given: a tensor of shape {tuple(parameter.shape)})"
            )
        return self._numbers[parameter]

    def name_of(self, parameter: Tensor) -> str:
        """A parameter's name in the module."""
        return self._slots[self.slot_of(parameter)].name

    def keep_whole(self, parameter: Tensor, owner: int) -> None:
        """Give all of a parameter to one rank."""
        self._cut.keep_whole(self.slot_of(parameter), owner)

    def ranges_of(self, parameter: Tensor) -> Sequence[Range]:
        """The parts of a parameter, of all ranks."""
        return self._cut[self.slot_of(parameter)]

    def set_parts(self, parameter: Tensor, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Have averages of a parameter, each from an element on, become gradients of these tensors."""
        self._parameters.cut[self.slot_of(parameter)].parts = [*parts]

    def cut_of(self, parameters: Sequence[Tensor]) -> list[PartParameter]:
        """The parameters, with the gradients of their parts."""
        return [self._parameters.cut[self.slot_of(parameter)] for parameter in parameters]

    def reduce(self) -> None:
        """Have the next backward leave parts, as they are now."""
        self._reducer.use_parts(self._parameters, PartAverage(self._group, self._plain, self._cut))


def _refuse(wrapper: DistributedDataParallel, name: str) -> None:
    """Raise if the wrapper's gradients cannot be reduced to parts."""
    options, params = wrapper._options, wrapper._wrapped.params
    refusals: Mapping[str, object] = {
        "a process group whose ranks may change": wrapper._group.may_change,
        "parameters that are DTensors": any(map(is_dtensor, params.parameters)),
        "sparse gradients": any(slot.sparse for slot in params.slots),
        "shards": options.shards is not None,
        "strict mode": options.strict,
        "reductions in a compiled graph": wrapper._use_python_reducer,
        "communication hooks": not isinstance(
            wrapper._reducer.exchange, Average | LowPrecisionAverage | PartAverage
        ),
        "keep_low_precision_grads": getattr(options.mixed_precision, "keep_low_precision_grads", False),
    }
    for what, is_so in refusals.items():
        if is_so:
            raise UnsupportedError(f"{name} and {what} exclude each other")
