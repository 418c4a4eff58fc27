"""Storages that torch takes for the toy device's: they have the addresses of CPU memory, and do not own it.

Tensors whose storage torch can see have addresses, and views have the storage of their base. Whoever asks
where a tensor lies, or how many tensors use its storage, gets an answer as on a real device. What is queued
does not count as a use, because it has the CPU memory and not this storage.
"""

import ctypes
import os
import threading

import torch
from torch.utils.dlpack import from_dlpack

# DLPack's number for devices from outside, and its code for unsigned integers.
_OUTSIDE = 12
_UNSIGNED = 1


class _DLManagedTensor(ctypes.Structure):
    """DLPack's description of memory, and who frees it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_size = (ctypes.c_int64 * 1)()
_stride = (ctypes.c_int64 * 1)(1)
# One for all: torch copies everything but the deleter, which it looks up when the storage is freed.
_described = _DLManagedTensor(None, _OUTSIDE, 0, 1, _UNSIGNED, 8, 1, _size, _stride, 0, None, None)
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def bytes_on_device(memory: torch.Tensor, index: int) -> torch.Tensor:
    """A plain tensor on the device, whose storage is at the address of the memory's storage."""
    storage = memory.untyped_storage()
    with _lock:
        _described.data, _described.device_index = storage.data_ptr(), index
        _size[0] = storage.nbytes()
        return from_dlpack(_new_capsule(ctypes.addressof(_described), b"dltensor", None))
