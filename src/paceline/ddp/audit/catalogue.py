"""What belongs to a replica: parameters, the state of their optimizers, and the optimizers' options.

Note [State as it was listed]. To look up every tensor of optimizer state anew costs more than to hash small
ones. So the dict of each parameter's state is kept. In each step it is checked that the optimizer has the
same dict of dicts, and every 16 steps that these are the same too.

Note [Names of optimizers]. An optimizer is known from its first step on. Ranks number the optimizers of a
wrapper's parameters in the order of their first steps, which is the order of the training loop, so the same
tensor has the same name on all ranks. An optimizer keeps its number when others are gone.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.ddp.audit.hashes import as_words
from paceline.tensors.dtensor import is_dtensor, local_of
from paceline.tensors.param_groups import group_options

# In the order of their first steps; an optimizer that is gone keeps its place.
_stepped: "list[weakref.ref[Optimizer]]" = []
_known: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


class TensorEntry(NamedTuple):
    """A tensor of a replica.

    Attributes:
        name: such as ``0.weight`` or ``0.weight.exp_avg``.
        description: equal on two ranks if their tensors can be compared byte by byte.
        nbytes: its size.
        itemsize: the size of one element.
        get: finds the tensor as it is now; None if it is gone.
    """

    name: str
    description: str
    nbytes: int
    itemsize: int
    get: Callable[[], Tensor | None]


class OptionEntry(NamedTuple):
    """An option of an optimizer's parameter group, such as its learning rate."""

    name: str
    optimizer: "weakref.ref[Optimizer]"
    group: int
    key: str

    def get(self) -> Any:
        """Its value, in plain numbers and texts."""
        optimizer = self.optimizer()
        if optimizer is None or self.group >= len(optimizer.param_groups):
            return None
        return plain(optimizer.param_groups[self.group].get(self.key))

    def set(self, value: Any) -> None:
        """Give it another value, in the tensor that it is if it is one."""
        optimizer = self.optimizer()
        if optimizer is not None:
            group = optimizer.param_groups[self.group]
            if isinstance(group[self.key], Tensor):
                group[self.key].fill_(value)
            else:
                group[self.key] = value


class Catalogue:
    """Lists what belongs to a replica, and notices when there is more or less.

    Args:
        parameters: the module's, by name; also those that are frozen.

    Attributes:
        tensors: every tensor.
        options: every option.
        digest: equal on two ranks if they have the same names and descriptions.
        excluded: names that are left out, because not every rank has them; the same on every rank.
    """

    def __init__(self, parameters: Iterable[tuple[str, Parameter]]) -> None:
        watch_optimizers()
        self._parameters = [(name, parameter) for name, parameter in parameters if can_hash(parameter)]
        self._names = {id(parameter): name for name, parameter in self._parameters}
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._seen = 0
        self._counts: list[tuple[int, int]] = []
        self._known_states: list[Any] = []
        self._identities: list[list[tuple[int, int]]] = []
        self.excluded: frozenset[str] = frozenset()
        self.tensors: list[TensorEntry] = []
        self.options: list[OptionEntry] = []
        self.digest = b""
        self.build()

    def is_as_before(self, *, thoroughly: bool) -> bool:
        """Whether nothing has come or gone; only if thoroughly, each parameter's state is counted."""
        self._find_optimizers()
        if self._count() != self._counts or not all(map(is_, self._states(), self._known_states)):
            return False
        return not thoroughly or self._identify() == self._identities

    def build(self) -> None:
        """List everything anew."""
        self._find_optimizers()
        self._counts, self._known_states, self._identities = self._count(), self._states(), self._identify()
        tensors = {entry.name: entry for entry in self._list_tensors() if entry.name not in self.excluded}
        self.tensors = [*tensors.values()]
        self.options = [each for each in self._list_options() if each.name not in self.excluded]
        self.digest = hashlib.blake2b(repr(self.describe()).encode(), digest_size=8).digest()

    def describe(self) -> dict[str, str]:
        """Each name, and what has to be equal so that ranks can compare values."""
        named = {entry.name: entry.description for entry in self.tensors}
        return named | {option.name: "an option" for option in self.options}

    def _find_optimizers(self) -> None:
        new, self._seen = _stepped[self._seen :], len(_stepped)
        for reference in new:
            optimizer = reference()
            if optimizer is not None and any(id(each) in self._names for each in _parameters_of(optimizer)):
                self._optimizers.append(reference)

    def _count(self) -> list[tuple[int, int]]:
        alive = [each() for each in self._optimizers]
        return [(0, 0) if each is None else (len(each.state), len(each.param_groups)) for each in alive]

    def _states(self) -> list[Any]:
        alive = [each() for each in self._optimizers]
        return [None if each is None else each.state for each in alive]

    def _identify(self) -> list[list[tuple[int, int]]]:
        """Which dict holds each parameter's state, and its length."""
        return [
            [] if state is None else [*zip(map(id, state.values()), map(len, state.values()), strict=True)]
            for state in self._states()
        ]

    def _list_tensors(self) -> Iterator[TensorEntry]:
        for name, parameter in self._parameters:
            yield _entry(name, parameter, partial(_itself, parameter))
        listed: set[int] = set()
        for number, reference in enumerate(self._optimizers):
            if (optimizer := reference()) is None:
                continue
            for parameter in _parameters_of(optimizer):
                owner, state = self._names.get(id(parameter)), optimizer.state.get(parameter)
                if owner is not None and isinstance(state, dict):
                    yield from _state_entries(owner, state, number, listed)

    def _list_options(self) -> Iterator[OptionEntry]:
        for number, reference in enumerate(self._optimizers):
            optimizer = reference()
            for at, group in enumerate(() if optimizer is None else optimizer.param_groups):
                for key, value in group_options(group).items():
                    if is_plain(value):
                        name = f"{key} of optimizer{_suffix(number)} group {at}"
                        yield OptionEntry(name, reference, at, key)


@cache
def watch_optimizers() -> None:
    """Note from now on which optimizers step."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if optimizer not in _known:
        _known.add(optimizer)
        _stepped.append(weakref.ref(optimizer))


def can_hash(tensor: Any) -> bool:
    """Whether a value is a tensor whose bytes are in one piece of memory."""
    if not isinstance(tensor, Tensor):
        return False
    local = local_of(tensor)
    if local.layout is not torch.strided or local.device.type == "meta":
        return False
    return type(local).__torch_dispatch__ is Tensor.__torch_dispatch__ or _has_bytes(local)


def _has_bytes(tensor: Tensor) -> bool:
    """Whether a tensor that is written in Python has memory: one made of several tensors does not."""
    try:
        return as_words(tensor).numel() >= tensor.numel() and tensor.data_ptr() >= 0
    except Exception:  # it says so in its own way
        return False


def is_plain(value: Any) -> bool:
    """Whether an option's value can be compared: numbers, texts, and tuples of them."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.device.type == "cpu" and can_hash(value)
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str)


def plain(value: Any) -> Any:
    """An option's value such that it is equal on two ranks if the options are."""
    if isinstance(value, float):
        return value
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return float(value) if type(value) is int else value


def _state_entries(name: str, state: dict[str, Any], number: int, listed: set[int]) -> Iterator[TensorEntry]:
    """The state of one parameter; what another optimizer holds too is listed once."""
    for key, value in state.items():
        if can_hash(value) and id(value) not in listed:
            listed.add(id(value))
            suffix = f" of optimizer{_suffix(number)}" if number else ""
            yield _entry(f"{name}.{key}{suffix}", value, partial(state.get, key))


def _entry(name: str, tensor: Tensor, get: Callable[[], Any]) -> TensorEntry:
    local = local_of(tensor)
    if is_dtensor(tensor):
        get = partial(_local, get)
    return TensorEntry(name, describe_tensor(local), local.nbytes, local.element_size(), get)


def describe_tensor(tensor: Tensor) -> str:
    """A text that is equal for two tensors if their bytes can be compared."""
    return f"{tensor.dtype} {(*tensor.shape,)} {tensor.stride()}"


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _local(get: Callable[[], Tensor | None]) -> Tensor | None:
    found = get()
    return None if found is None else local_of(found)


def _parameters_of(optimizer: Optimizer) -> Sequence[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _suffix(number: int) -> str:
    return f" {number}" if number else ""


def not_on_all(described: Sequence[dict[str, str]]) -> frozenset[str]:
    """The names that some rank does not have, or has with another description."""
    pairs = [frozenset(each.items()) for each in described]
    apart = frozenset[tuple[str, str]]().union(*pairs) - pairs[0].intersection(*pairs)
    return frozenset(name for name, _ in apart)
