"""What NVML says of the devices: utilisation and memory. Needs nvidia-ml-py (the `gpu-telemetry` extra) and a driver;
without them nothing is said. Asked when somebody reads the figures, never by the loop."""

from __future__ import annotations

import importlib
import logging
from typing import Any

logger = logging.getLogger(__name__)

_LIBRARY = "pynvml"


def load_nvml() -> Any:
    """The library, initialised; None where it or the driver is missing."""
    try:
        nvml: Any = importlib.import_module(_LIBRARY)
        nvml.nvmlInit()
    except Exception as error:  # the library's own error types exist only where it does
        logger.debug("no GPU figures: %s", error)
        return None
    return nvml


class Gpus:
    """All devices that this process may see."""

    def __init__(self, nvml: Any = load_nvml) -> None:
        """`nvml`: the library, how to load it, or None for no figures."""
        self._nvml = nvml() if callable(nvml) else nvml
        self._handles: list[Any] = []
        if self._nvml is not None:
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def read(self) -> dict[str, dict[str, float]]:
        """By figure, then by the device's index: `utilization` [0, 1], `memory_used_bytes`, `memory_total_bytes`."""
        figures: dict[str, dict[str, float]] = {}
        for index, handle in enumerate(self._handles):
            try:
                busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except Exception as error:
                logger.warning("NVML does not answer for device %d: %s", index, error)
                continue
            values = {"utilization": busy, "memory_used_bytes": memory.used, "memory_total_bytes": memory.total}
            for name, value in values.items():
                figures.setdefault(name, {})[str(index)] = value
        return figures
