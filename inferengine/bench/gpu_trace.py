"""GpuTrace: clocks, power, utilisation and memory of the GPUs during a measurement, from NVML.

A measurement means little without them: at its power limit an H200 runs a fifth below its highest clock. Needs
nvidia-ml-py (`pip install inferengine[gpu-telemetry]`) and a driver; without them the trace says "not available".
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from inferengine.engine.stats import load_nvml

INTERVAL_S = 0.1
MIB = 1 << 20
# nvmlClocksEventReasons: what keeps the clock below its highest.
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (driver)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
Summary = dict[str, Any]


class GpuTrace:
    """Samples all devices in a thread of its own, between `with` and its end. `lap` returns the summary of the time
    since the last lap, for benchmarks of several phases."""

    def __init__(self, nvml: Any = load_nvml, *, interval_s: float = INTERVAL_S) -> None:
        """`nvml`: the library, how to load it, or None."""
        self._nvml = nvml() if callable(nvml) else nvml
        self._interval_s = interval_s
        self._handles: list[Any] = []
        if self._nvml is not None:
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        self._samples: list[dict[str, list[float]]] = [{} for _ in self._handles]
        self._reasons: list[Counter[str]] = [Counter() for _ in self._handles]
        self._num_samples = 0
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GpuTrace:
        if self._handles:
            self._thread = threading.Thread(target=self._run, name="gpu-trace", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def sample(self) -> None:
        """Add one sample of every device."""
        for index, handle in enumerate(self._handles):
            figures = {name: value for name, read in self._figures() if (value := _answer(read, handle)) is not None}
            reasons = _answer(self._read_reasons, handle)
            with self._lock:
                for name, value in figures.items():
                    self._samples[index].setdefault(name, []).append(value)
                if reasons is not None:
                    self._reasons[index].update(text for bit, text in REASONS.items() if int(reasons) & bit)
        with self._lock:
            self._num_samples += 1

    def summary(self) -> Summary:
        """Return minimum, median and maximum of each value by device, and the share of samples of each clock limit."""
        if not self._handles:
            return {"available": False, "why": "not available: nvidia-ml-py or the NVIDIA driver is missing"}
        with self._lock:
            devices = [
                {
                    "index": index,
                    "name": _answer(self._read_name, handle),
                    **{name: _spread(values) for name, values in self._samples[index].items()},
                    "clock_held_down_by": {
                        text: round(count / self._num_samples, 3) for text, count in self._reasons[index].most_common()
                    },
                }
                for index, handle in enumerate(self._handles)
            ]
            seconds, number = time.monotonic() - self._began_s, self._num_samples
        return {"available": True, "samples": number, "seconds": round(seconds, 2), "devices": devices}

    def lap(self) -> Summary:
        """Return the summary since the last lap, and start a new lap."""
        if self._handles and not self._num_samples:
            self.sample()  # shorter than the interval: take at least one sample
        found = self.summary()
        with self._lock:
            self._samples = [{} for _ in self._handles]
            self._reasons = [Counter() for _ in self._handles]
            self._num_samples, self._began_s = 0, time.monotonic()
        return found

    # -- inside ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.is_set():
            self.sample()
            self._ended.wait(self._interval_s)

    def _figures(self) -> list[tuple[str, Callable[[Any], float]]]:
        nvml = self._nvml
        return [
            ("sm_clock_mhz", lambda handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            ("memory_clock_mhz", lambda handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            ("power_w", lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            ("temperature_c", lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            ("utilisation_percent", lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            ("memory_used_mib", lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used / MIB),
        ]

    def _read_reasons(self, handle: Any) -> int:
        nvml = self._nvml
        newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        return int((newer or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))

    def _read_name(self, handle: Any) -> str:
        name = self._nvml.nvmlDeviceGetName(handle)
        return name.decode() if isinstance(name, bytes) else str(name)


def line(summary: Summary) -> str:
    """Return a summary as text, a line for each device."""
    if not summary["available"]:
        return f"GPU: {summary['why']}"
    lines = []
    for device in summary["devices"]:
        parts = [
            f"{device[name]['median']:,.0f} {unit} ({device[name]['min']:,.0f} to {device[name]['max']:,.0f})"
            for name, unit in (("sm_clock_mhz", "MHz"), ("power_w", "W"), ("utilisation_percent", "% busy"))
            if name in device
        ]
        brakes = [f"{text} {share:.0%}" for text, share in device["clock_held_down_by"].items() if text != "idle"]
        lines.append(
            f"GPU {device['index']}: {', '.join(parts)}{'; held down by ' if brakes else ''}{', '.join(brakes)}"
        )
    return "\n".join(lines)


def _spread(values: list[float]) -> dict[str, float]:
    shown = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(float(value), 1) for name, value in shown.items()}


def _answer(read: Callable[[Any], Any], handle: Any) -> Any:
    """Return the value of one NVML query, or None where the device does not support it."""
    try:
        return read(handle)
    except Exception:  # the library's own error types exist only where it does
        return None
