"""Device memory that devices of other processes can write to: the inboxes of kernels/cuda/peers/all_reduce.py.

It is allocated by the driver, outside of torch's allocator. Its handle is sent to the other processes on this host,
which map it. Source: CUDA driver API, "Interprocess communication".
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, NamedTuple

import torch

WORD = 8  # bytes
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class InboxShape(NamedTuple):
    """The layout of an inbox: packets, whole rows, and flags.

    Each part exists twice, for even and odd epochs, and for each of the other ranks.
    """

    ranks: int
    row_words: int  # of the longest row
    packet_rows: int
    rows: int

    @property
    def rows_at(self) -> int:
        """Offset of the whole rows, in words."""
        return 2 * (self.ranks - 1) * self.packet_rows * 2 * self.row_words

    @property
    def flags_at(self) -> int:
        """Offset of the flags, in words."""
        return self.rows_at + 2 * (self.ranks - 1) * self.rows * self.row_words

    @property
    def num_bytes(self) -> int:
        """Size of an inbox, in bytes."""
        return (self.flags_at + 2 * (self.ranks - 1) * self.rows) * WORD


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class PeerMemory:
    """Zeroed memory of this device, and mappings of other devices' memory."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Allocate the memory. Raises OSError if the driver refuses."""
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._own, self._opened = ctypes.c_uint64(), list[ctypes.c_uint64]()
        self._device, handle = device, _IpcHandle()
        torch.zeros(1, device=device)  # makes the device's context this thread's
        try:
            self._call("cuMemAlloc_v2", ctypes.byref(self._own), ctypes.c_size_t(num_bytes))
            self._call("cuMemsetD8_v2", self._own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), self._own)
        except OSError:
            self.close()
            raise
        torch.cuda.synchronize(device)
        self.handle = bytes(handle)  # for `open` of the others
        self.address = int(self._own.value)

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's memory, on CUDA device `device`. Returns its address for this process.

        Raises OSError if this device cannot read, write and do atomic operations there.
        """
        own, other, works = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(own), ctypes.c_int(self._device.index))
        self._call("cuDeviceGet", ctypes.byref(other), ctypes.c_int(device))
        self._call("cuDeviceCanAccessPeer", ctypes.byref(works), own, other)
        if works.value:
            self._call("cuDeviceGetP2PAttribute", ctypes.byref(works), ctypes.c_int(NATIVE_ATOMICS), own, other)
        if not works.value:
            raise OSError(f"GPU {self._device.index} does not reach the memory of GPU {device}")
        address = ctypes.c_uint64()
        theirs = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), theirs, ctypes.c_uint(LAZY_PEER_ACCESS))
        self._opened.append(address)
        return int(address.value)

    def close(self) -> None:
        """Free the memory and unmap the others'. No kernel may be using them. May be called repeatedly."""
        for address in self._opened:
            with suppress(OSError):
                self._call("cuIpcCloseMemHandle", address)
        if self._own.value:
            with suppress(OSError):
                self._call("cuMemFree_v2", self._own)
        self._opened, self._own = [], ctypes.c_uint64()

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise OSError(f"{name} returned {status}")
