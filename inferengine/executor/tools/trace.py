"""StepRecorder: records the steps of a running executor on the host and the device, by torch's profiler.

The result is a Chrome trace. Recording costs each step some microseconds an operation. Stopping blocks the calling
thread for some 3 ms a step, in which the profiler sorts what it collected. Afterwards there is no cost.
"""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function

COMPRESSION = 5
STEP = "step "  # name of a step's range, before its number


class StepRecorder:
    """Implements core.executor.ProfileRecorder. One recording; the next needs another object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch.profiler.profile would do the same, but imports a compiler first: two seconds without steps
        self._profile = profile(use_device="cuda" if device.type == "cuda" else None, use_kineto=True)
        self._range: record_function | None = None
        self._num_steps = 0

    def start(self) -> None:
        """Start recording. Called by the thread that executes, between two steps."""
        self._profile.__enter__()

    def begin_step(self) -> None:
        """Open the range of a step in the trace."""
        self._range = record_function(f"{STEP}{self._num_steps}")
        self._range.__enter__()

    def end_step(self) -> None:
        """Close the range of the step."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None
        self._num_steps += 1

    def stop(self) -> None:
        """Stop recording, after the device has finished its work. Called by the same thread as `start`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profile.__exit__(None, None, None)

    def trace(self) -> bytes:
        """Return the Chrome trace, compressed by gzip. Called after `stop`, by any thread."""
        with tempfile.TemporaryDirectory(prefix="inferengine-") as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return gzip.compress(path.read_bytes(), COMPRESSION)
