"""Tensors of the toy device, and how torch's operations run on them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.testing.toy.device_module import NAME, StreamOperation, ToyModule
from paceline.torch_private import TO_COPY, make_wrapper_subclass, tree_leaves, tree_map

_aten = torch.ops.aten

# The operations whose operands may be on different devices.
_MOVES = (_aten.copy_.default, TO_COPY)


class ToyTensor(torch.Tensor):
    """A tensor on the toy device that wraps a tensor in CPU memory."""

    memory: torch.Tensor

    def __new__(cls, memory: torch.Tensor, device: torch.device) -> "ToyTensor":
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
        made.memory = memory
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ToyTensor({self.memory}, device='{self.device}')"

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
        """Run the operation on the memory."""
        return _run(func, args, kwargs or {})


# Kept for the life of the process: a library takes its kernels with it when it goes.
_libraries: list[torch.library.Library] = []


def _library(namespace: str) -> Any:
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)
    return library


def register_kernels() -> None:
    """Register the kernels that torch looks up under the device's dispatch keys."""
    # These get no toy tensor to dispatch on, because they create one.
    for func in (_aten.empty.memory_format, _aten.empty_strided.default):
        _library("aten").impl(func, _factory(func), "PrivateUse1")
    # Autocast can be on, but casts nothing.
    _library("_").fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def _module() -> ToyModule:
    module: ToyModule = torch.get_device_module(NAME)
    return module


def _factory(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(func, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is _aten.record_stream.default:
        return _module().operations.append(StreamOperation("record", args[1]))
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if func not in _MOVES:
        _check_one_device(func, operands)
    device = args[0].device if func is _aten.copy_.default else _target(operands, kwargs)
    if func in _MOVES and device.type == NAME:
        _module().operations.append(StreamOperation("copy", _module().current_stream(device)))
    result = func(*tree_map(_memory, args), **_on_cpu(tree_map(_memory, kwargs)))
    return result if device.type != NAME else _wrap(result, device, operands)


def _wrap(result: Any, device: torch.device, operands: Sequence[torch.Tensor]) -> Any:
    # An in-place operation returns its operand: so must we, and not another tensor on the same memory.
    known = {id(operand.memory): operand for operand in operands if isinstance(operand, ToyTensor)}

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else ToyTensor(leaf, device)

    return tree_map(wrap, result)


def _memory(leaf: Any) -> Any:
    return leaf.memory if isinstance(leaf, ToyTensor) else leaf


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


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
