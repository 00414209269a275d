"""Starts the processes that compile kernels before this one imports torch. Imports no torch itself."""

from __future__ import annotations

from inferengine.config import keep_compiled_kernels
from inferengine.kernels.cuda.compilation import has_driver, start_workers


def start_early_workers(device: str) -> None:
    """Start them where an engine with this `engine.device` may run on CUDA. `TorchExecutor.load` takes them over, or
    ends them on a CPU."""
    if device != "cpu" and has_driver():
        keep_compiled_kernels()  # in the environment that they get
        start_workers()
