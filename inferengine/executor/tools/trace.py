"""StepRecorder: what steps of a running executor do on the host and the device, as a Chrome trace, by torch's profiler.

Recording costs each step some microseconds an operation, and its end stops the calling thread for 3 ms a step or so:
what the profiler collected is put in order then. Nothing stays behind.
"""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function

COMPRESSION = 5
STEP = "step "  # what the range of one step is called, before its number


class StepRecorder:
    """Implements core.executor.StepRecorder. One recording; the next needs another object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch.profiler.profile would do the same and import a compiler first, two seconds in which nothing is computed
        self._profile = profile(use_device="cuda" if device.type == "cuda" else None, use_kineto=True)
        self._range: record_function | None = None
        self._num_steps = 0

    def start(self) -> None:
        """From here on. In the thread that executes, between two steps."""
        self._profile.__enter__()

    def begin_step(self) -> None:
        """The range of a step in the trace."""
        self._range = record_function(f"{STEP}{self._num_steps}")
        self._range.__enter__()

    def end_step(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None
        self._num_steps += 1

    def stop(self) -> None:
        """Up to here, what the device has been given included. In the same thread as `start`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profile.__exit__(None, None, None)

    def trace(self) -> bytes:
        """The Chrome trace, compressed by gzip. After `stop`, in any thread."""
        with tempfile.TemporaryDirectory(prefix="inferengine-") as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return gzip.compress(path.read_bytes(), COMPRESSION)
