"""A parameter whose memory other processes have too, so that whoever writes to it changes theirs.

Note [Writes]. Each rank that runs ``parameter.data.mul_(0.9)`` multiplies the one copy that all of them have.
So what writes to a parameter outside its optimizer is looked for, by versions: torch counts the changes of
a tensor. ``parameter.data`` is another tensor in the same memory, with a count of its own. So those that were
handed out are kept until the next step, and their counts looked at. The line is noted when a method changes
the parameter, and when ``data`` is read.
"""

import inspect
import operator
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from sys import getrefcount
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from paceline.torch_private import version_of
from paceline.watch.stacks import CodeLine, stack_of, users_line

_data: Any = Tensor.data
# How many tensors are kept before those are dropped that nobody else has.
_MOST_KEPT = 64
# The references to a tensor that is in one tuple, and in a variable of a loop over such tuples.
_REFERENCES = next(getrefcount(each) for each, _ in [(object(), None)])


class Writes:
    """Who may have written to a module's shared parameters since their values were last said to be right.

    Args:
        owner: what moves the parameters to shared memory.
    """

    def __init__(self, owner: object) -> None:
        self._owner = weakref.ref(owner)
        self._parameters: list[SharedParameter] = []
        self._addresses: list[int] = []
        self._versions: list[int] = []
        self._lines: dict[int, CodeLine | None] = {}
        self._handed_out: dict[int, list[tuple[Tensor, CodeLine | None]]] = {}

    @property
    def is_in_use(self) -> bool:
        """Whether the owner still lives."""
        return self._owner() is not None

    def share(self, parameter: Parameter, memory: Tensor) -> None:
        """Have a parameter, which stays the same object, use other memory, and note who writes to it."""
        shared: Any = parameter
        use_memory(parameter, memory)
        shared.__class__ = SharedParameter
        shared.writes = self
        self._parameters.append(shared)
        self._addresses.append(memory.data_ptr())
        self._versions.append(version_of(parameter))

    def hand_out(self, parameter: "SharedParameter", tensor: Tensor) -> None:
        """Keep a tensor in the same memory, to see whether it is written to."""
        kept = self._handed_out.setdefault(id(parameter), [])
        if len(kept) >= _MOST_KEPT:
            # Nobody can write any more to those that are only here.
            kept[:] = [
                (each, line) for each, line in kept if version_of(each) or getrefcount(each) > _REFERENCES
            ]
        kept.append((tensor, _users_line()))

    def note_line(self, parameter: "SharedParameter") -> None:
        """The line that is running has changed a parameter."""
        self._lines[id(parameter)] = _users_line()

    def forget(self) -> None:
        """The values are right as they are."""
        self._versions = [*map(version_of, self._parameters)]
        self._lines.clear()
        self._handed_out.clear()

    def found(self, *, only_moved: bool = False) -> dict[int, str]:
        """What was written, in words, by the number of the parameter; usually nothing.

        Args:
            only_moved: whether only other memory counts, because nobody else has it.
        """
        # Not only after a note: a queue of torch.multiprocessing gives a storage other memory.
        addresses = [*map(Tensor.data_ptr, self._parameters)]
        if only_moved:
            pairs = enumerate(zip(addresses, self._addresses, strict=True))
            return {number: self._found(number) for number, (now, before) in pairs if now != before}
        versions = [*map(version_of, self._parameters)]
        if versions == self._versions and addresses == self._addresses and not self._handed_out:
            return {}
        found = {number: self._found(number) for number in range(len(self._parameters))}
        return {number: words for number, words in found.items() if words}

    def _found(self, number: int) -> str:
        parameter = self._parameters[number]
        line = self._lines.get(id(parameter))
        if parameter.data_ptr() != self._addresses[number]:
            return f"was given other memory{_at(line)}"
        for tensor, line in self._handed_out.get(id(parameter), ()):
            if version_of(tensor):
                return f"was written to through .data{_at(line)}"
        return f"was written to{_at(line)}" if version_of(parameter) != self._versions[number] else ""


class SharedParameter(Parameter):
    """A parameter that notes who writes to it: see Note [Writes]. Copies of it are plain parameters."""

    writes: Writes

    @property
    def data(self) -> Tensor:
        """The same memory as a tensor that autograd does not know."""
        tensor: Tensor = _data.__get__(self)
        self.writes.hand_out(self, tensor)
        return tensor

    @data.setter
    def data(self, value: Tensor) -> None:
        self.writes.note_line(self)
        _data.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        memo[id(self)] = copied = _plain(self, copies=True)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self, copies=False).__reduce_ex__(protocol)


def are_in_use(parameters: Iterable[Parameter]) -> bool:
    """Whether some of the parameters are shared, and what shares them still lives."""
    return any(isinstance(each, SharedParameter) and each.writes.is_in_use for each in parameters)


def make_private(references: "Iterable[weakref.ref[Parameter]]") -> None:
    """Give shared parameters memory of their own again."""
    for reference in references:
        parameter: Any = reference()
        if isinstance(parameter, SharedParameter) and not parameter.writes.is_in_use:
            use_memory(parameter, parameter.detach().clone())
            del parameter.writes
            parameter.__class__ = Parameter  # type: ignore[assignment]


def use_memory(parameter: Parameter, memory: Tensor) -> None:
    """Have a parameter use other memory, without a note."""
    _data.__set__(parameter, memory)


def _plain(parameter: SharedParameter, *, copies: bool) -> Parameter:
    values = parameter.detach()
    plain: Any = Parameter(values.clone() if copies else values, parameter.requires_grad)
    if not copies:
        vars(plain).update({name: value for name, value in vars(parameter).items() if name != "writes"})
    return plain  # type: ignore[no-any-return]


def _users_line() -> CodeLine | None:
    return users_line(stack_of(inspect.currentframe()))


def _at(line: CodeLine | None) -> str:
    return "" if line is None else f" ({line})"


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: SharedParameter, *args: Any, **kwargs: Any) -> Any:
        version = version_of(self)
        try:
            return method(self, *args, **kwargs)
        finally:
            if version_of(self) != version:
                self.writes.note_line(self)

    return call


def _changes(name: str) -> bool:
    """Whether a method of a tensor changes it."""
    is_method = name.endswith("_") and not name.startswith("_")
    return is_method or name == "__setitem__" or (name.startswith("__i") and name in vars(operator))


for _name in filter(_changes, dir(Tensor)):
    setattr(SharedParameter, _name, _noting(getattr(Tensor, _name)))
