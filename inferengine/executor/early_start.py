"""What an engine on CUDA begins before it imports torch, which takes seconds: the processes that compile kernels, the
hash of Triton's files, and the device's context. Imports no torch itself.

The driver takes tenths of a second to make a context, and longer on a machine with many devices. The CUDA runtime uses
the device's primary context, so torch finds it made, or waits for it.
"""

from __future__ import annotations

import ctypes
import threading
from importlib.metadata import PackageNotFoundError, version

from inferengine.config import keep_compiled_kernels
from inferengine.kernels.cuda.compilation import has_driver, start_hashing, start_workers

DRIVER = "libcuda.so.1"
CPU_BUILD = "+cpu"  # at the end of the version of a torch that knows no CUDA


def start_early(device: str) -> None:
    """Begin where an engine with this `engine.device` runs on CUDA. `TorchExecutor.load` takes the processes over, or
    ends them on a CPU."""
    if device == "cpu" or not has_driver() or not torch_knows_cuda():
        return
    keep_compiled_kernels()  # in the environment that the processes get
    start_workers()
    start_hashing()
    threading.Thread(target=make_context, name="inferengine-context", daemon=True).start()


def torch_knows_cuda() -> bool:
    """Return whether the installed torch is built for CUDA."""
    try:
        return not version("torch").endswith(CPU_BUILD)
    except PackageNotFoundError:
        return False


def make_context() -> bool:
    """Make the primary context of the first device, for as long as this process lives. False: the driver refuses, which
    torch will report."""
    try:
        driver = ctypes.CDLL(DRIVER)
        number, context = ctypes.c_int(), ctypes.c_void_p()
        return not (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(number), 0)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
        )
    except (OSError, AttributeError):  # no library, or an older one
        return False
