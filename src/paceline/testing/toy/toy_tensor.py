"""Tensors of the toy device, and how torch's operations run on them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.testing.toy.counts import count
from paceline.testing.toy.device_module import NAME, StreamOperation, ToyModule, ToyStream
from paceline.testing.toy.device_storage import bytes_on_device
from paceline.testing.toy.kernels import launch
from paceline.testing.toy.queues import raise_failure, wait_on_host
from paceline.torch_private import (
    COPY_FROM,
    READ_SCALAR,
    TO_COPY,
    UNSAFE_VIEW,
    make_wrapper_subclass,
    share_storage,
    tree_leaves,
    tree_map,
)

_aten = torch.ops.aten
_CPU = torch.device("cpu")
# A property that is written in C++, which does not know of the memory.
_DATA: Any = torch.Tensor.data

# These get no toy tensor to dispatch on, because they create one. All others are made of the first two.
_FACTORIES = (
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    # Otherwise they would resize an empty tensor, which a toy tensor cannot be.
    _aten.arange.default,
    _aten.arange.start,
    _aten.arange.start_step,
    _aten.eye.default,
    _aten.eye.m,
    # Draws random numbers, in the order in which the host asks for them.
    _aten.randperm.default,
    _aten.randperm.generator,
)
# The operations whose operands may be on different devices.
_MOVES = (_aten.copy_.default, TO_COPY)
# Those that allocate memory and run no kernel.
_EMPTY = (_aten.empty_like.default, _aten.new_empty.default, _aten.new_empty_strided.default)
# Those that give values to the host.
_READS = (READ_SCALAR, _aten.equal.default)
# Those that look where a mask is true, as if they were given the indexes.
_MASKED = (_aten.index_put.default, _aten.index_put_.default)


class ToyTensor(torch.Tensor):
    """A tensor on the toy device that wraps a tensor in CPU memory, which its stream fills.

    Args:
        memory: its values, once the stream has come so far.
        device: the device where it seems to be.
        base: the tensor that it is a view of.
    """

    memory: torch.Tensor

    def __new__(
        cls, memory: torch.Tensor, device: torch.device, base: "ToyTensor | None" = None
    ) -> "ToyTensor":
        """Put memory on the device."""
        made: ToyTensor = make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            layout=memory.layout,
            device=device,
        )
        if base is None:
            count("allocations", f"{memory.nbytes} bytes")
        share_storage(made, bytes_on_device(memory, device.index) if base is None else base)
        made.memory = memory
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        _wait_to_read("repr", self.device)
        return f"ToyTensor({self.memory}, device='{self.device}')"

    def tolist(self) -> Any:
        """The values; torch refuses to list those of a subclass."""
        return self.cpu().tolist()

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its graph; another one can be put in its place."""
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        assert isinstance(other, ToyTensor)
        _DATA.__set__(self, other)
        self.memory = other.memory

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy the values; torch would copy the storage, and find no way to do so."""
        made = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, self.requires_grad)
        if self.grad is not None:
            made.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, _protocol: object) -> Any:
        """Pickle the values."""
        return ToyTensor, (self.cpu(), self.device)

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        """Lets nn.Module.to swap parameters, as it does for any wrapper."""
        return ["memory"], self.device

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], device: torch.device, _size: object, _stride: object
    ) -> "ToyTensor":
        """The reverse of __tensor_flatten__."""
        return ToyTensor(inner["memory"], device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves out the function
        cls, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Queue the operation on the memory."""
        return _run(func, args, kwargs or {})


# Kept for the life of the process: a library takes its kernels with it when it goes.
_libraries: list[torch.library.Library] = []


def _library(namespace: str) -> Any:
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    return library


def register_kernels() -> None:
    """Register the kernels that torch looks up under the device's dispatch keys."""
    for func in _FACTORIES:
        _library("aten").impl(func, _factory(func), "PrivateUse1")
    # torch.tensor copies what it has made on the CPU, and only the device knows how.
    copy = _aten.copy_.default
    _library("aten").impl(
        COPY_FROM, lambda source, to, *args: _run(copy, (to, source, *args), {}), "PrivateUse1"
    )
    # Autocast can be on, but casts nothing.
    _library("_").fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def _module() -> ToyModule:
    module: ToyModule = torch.get_device_module(NAME)
    return module


def _factory(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _allocate(func, args, kwargs, _target((), kwargs))


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Operations that are made of others come here whole if a tensor was made in inference mode.
    if (whole := func.decompose(*args, **kwargs)) is not NotImplemented:
        return whole
    if func is _aten.record_stream.default:
        return _module().operations.append(StreamOperation("record", args[1]))
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if func in _MOVES:
        device = args[0].device if func is _aten.copy_.default else _target(operands, kwargs)
        return _move(func, args, kwargs, device)
    _check_one_device(func, operands)
    device = _target(operands, kwargs)
    if func.is_view or func is UNSAFE_VIEW:
        return _wrap(_on_memory(func, args, kwargs), device, operands, base=args[0])
    if func in _EMPTY or device.type != NAME:
        return _allocate(func, args, kwargs, device)
    if func in _READS or (func in _MASKED and any(_is_mask(index) for index in args[1])):
        return _run_now(func, args, kwargs, device)
    try:
        return _launch(func, args, kwargs, _module().current_stream(device))
    except NotImplementedError:  # the shapes of the results depend on values
        return _run_now(func, args, kwargs, device)


def _launch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stream: ToyStream) -> Any:
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ToyTensor)]
    results = launch(func, stream.queue, tree_map(_memory, args), _on_cpu(tree_map(_memory, kwargs)))
    return _wrap(results, stream.device, operands)


def _run_now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Run an operation whose result the host needs."""
    _wait_to_read(str(func), device)
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ToyTensor)]
    return _wrap(_on_memory(func, args, kwargs), device, operands)


def _allocate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    result = _on_memory(func, args, kwargs)
    return _wrap(result, device, ()) if device.type == NAME else result


def _move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Copy to a device, or to another type."""
    source = args[1] if func is _aten.copy_.default else args[0]
    if device.type != NAME:
        _wait_to_read(str(func), source.device)
        return _on_memory(func, args, kwargs)
    stream = _module().current_stream(device)
    _module().operations.append(StreamOperation("copy", stream))
    if source.device == device:
        return _launch(func, args, kwargs, stream)
    if source.device.type == NAME:
        return _move_between_devices(func, args, kwargs, source.device, stream)
    is_async = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    count("host_copies", str(func))
    # ``_launch`` copies what is on the host at once, so that the host may change it.
    result = _launch(func, args, kwargs, stream)
    if not is_async:
        count("blocking_copies", str(func))
        _wait(stream)
    return result


def _move_between_devices(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: torch.device, stream: ToyStream
) -> Any:
    """Copy when both devices' streams have come so far; the source's goes on when it is done."""
    giving = _module().current_stream(source)
    stream.queue.wait_for(giving.queue.end)
    result = _launch(func, args, kwargs, stream)
    giving.queue.wait_for(stream.queue.end)
    return result


def _wait_to_read(what: str, device: torch.device) -> None:
    count("reads", what)
    _wait(_module().current_stream(device))


def _wait(stream: ToyStream) -> None:
    wait_on_host([stream.queue.end])
    raise_failure()


def _on_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*tree_map(_as_it_is, args), **_on_cpu(tree_map(_as_it_is, kwargs)))


def _wrap(
    result: Any, device: torch.device, operands: Sequence[torch.Tensor], base: ToyTensor | None = None
) -> Any:
    # An in-place operation returns its operand: so must we, and not another tensor on the same memory.
    known = {id(operand.memory): operand for operand in operands if isinstance(operand, ToyTensor)}

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else ToyTensor(leaf, device, base)

    return tree_map(wrap, result)


def _as_it_is(leaf: Any) -> Any:
    return leaf.memory if isinstance(leaf, ToyTensor) else leaf


def _memory(leaf: Any) -> Any:
    """What a queued operation works on; it sees a CPU tensor as it is now."""
    is_on_host = isinstance(leaf, torch.Tensor) and not isinstance(leaf, ToyTensor)
    return leaf.clone() if is_on_host else _as_it_is(leaf)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    is_on_toy = kwargs.get("device") is not None and kwargs["device"].type == NAME
    return {**kwargs, "device": _CPU} if is_on_toy else kwargs


def _target(operands: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> torch.device:
    """Where the result goes: where it was asked for, else where the operands are."""
    if (device := kwargs.get("device")) is not None:
        unsaid = device.type == NAME and device.index is None
        return torch.device(NAME, _module().current_device()) if unsaid else device
    return next(operand.device for operand in operands if isinstance(operand, ToyTensor))


def _check_one_device(func: Any, operands: Sequence[torch.Tensor]) -> None:
    # As on any accelerator, a CPU scalar may join in.
    found = {operand.device for operand in operands if isinstance(operand, ToyTensor) or operand.dim() > 0}
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {names} ({func})")
