"""Tells torch's C++ code about the toy device's two indexes, and about each thread's current one."""

import ctypes
import re
from pathlib import Path
from typing import Any

import torch

from paceline.testing.toy.counts import count
from paceline.testing.toy.device_module import COUNT, ToyModule
from paceline.torch_private import OUTSIDE_DEVICE_TYPE

_TORCH = Path(torch.__file__).parent
# Declares the class; each version of torch has its own order of methods.
_HEADER = _TORCH / "include/c10/core/impl/DeviceGuardImplInterface.h"

# Before the first method the table has the offset to the top of the object and the type information.
_HEAD = 2

# A destructor has two entries: one also frees the object.
_DESTRUCTORS = 2

# A c10::Device as it is passed by value: the type in the low byte, the index in the high one.
_DEVICE = ctypes.c_uint16
_THIS = ctypes.c_void_p


class ToyDeviceGuard:
    """Overrides methods of torch's C++ device guard for a device that is implemented in Python.

    torch says in C++ that such a device has one index, which is always current; the autograd engine then
    refuses a gradient on index 1. These methods are virtual, so the registered object gets a copy of its
    virtual method table in which some of them are ours.
    """

    def __init__(self, module: ToyModule) -> None:
        self._module = module
        self._ours = {
            "exchangeDevice": ctypes.CFUNCTYPE(_DEVICE, _THIS, _DEVICE)(self._exchange),
            "getDevice": ctypes.CFUNCTYPE(_DEVICE, _THIS)(self._get),
            "setDevice": ctypes.CFUNCTYPE(None, _THIS, _DEVICE)(self._set),
            "uncheckedSetDevice": ctypes.CFUNCTYPE(None, _THIS, _DEVICE)(self._set),
            "deviceCount": ctypes.CFUNCTYPE(ctypes.c_int8, _THIS)(lambda _: COUNT),
            "synchronizeDevice": ctypes.CFUNCTYPE(None, _THIS, ctypes.c_int8)(self._synchronize),
        }

    def install(self) -> None:
        """Replace torch's methods by ours, until the process ends."""
        place, methods = _registered_guard(), _methods_in_order(_HEADER.read_text())
        head = _HEAD * ctypes.sizeof(ctypes.c_void_p)
        table_type = ctypes.c_void_p * (_HEAD + len(methods) + _DESTRUCTORS)
        table = table_type(*table_type.from_address((place.value or 0) - head))
        for name, function in self._ours.items():
            table[_HEAD + methods.index(name)] = ctypes.cast(function, ctypes.c_void_p).value
        _installed.append((self, table))
        place.value = ctypes.addressof(table) + head

    def _get(self, _this: int) -> int:
        return OUTSIDE_DEVICE_TYPE | self._module.current_device() << 8

    def _set(self, _this: int, device: int) -> None:
        self._module.set_device(device >> 8)

    def _exchange(self, this: int, device: int) -> int:
        before = self._get(this)
        self._set(this, device)
        return before

    def _synchronize(self, _this: int, index: int) -> None:
        count("waits", "torch.accelerator.synchronize")
        # C++ cannot take an error from here: the next read raises it.
        self._module.wait_for_device(index)


# torch calls into these until the process ends.
_installed: list[tuple[ToyDeviceGuard, Any]] = []


def _methods_in_order(header: str) -> list[str]:
    """The virtual methods of the class, in the order of its table, which ends with the destructor's."""
    declared = header[: header.index("virtual ~DeviceGuardImplInterface")]
    return re.findall(r"^  virtual [^(;]*?(\w+)\(", declared, re.MULTILINE)


def _registered_guard() -> ctypes.c_void_p:
    """The registered object's pointer to its virtual method table."""
    c10 = ctypes.CDLL(str(_TORCH / "lib" / "libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    registry = (ctypes.c_void_p * (OUTSIDE_DEVICE_TYPE + 1)).in_dll(c10, name)
    return ctypes.c_void_p.from_address(registry[OUTSIDE_DEVICE_TYPE] or 0)
