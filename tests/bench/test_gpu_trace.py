"""What NVML says while something is measured, and that its absence is said."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from inferengine.bench.gpu_trace import GpuTrace, line

POWER_LIMIT, IDLE = 0x4, 0x1


class FakeNvml(SimpleNamespace):
    """One device whose clock falls by 100 MHz with each look, from 2,000; at its power limit below 1,900."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self) -> None:
        super().__init__()
        self.clock = 2100

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        if which == self.NVML_CLOCK_SM:
            self.clock -= 100
        return self.clock if which == self.NVML_CLOCK_SM else 3201

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 690_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=98)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=100 << 30, total=140 << 30)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return POWER_LIMIT if self.clock < 1900 else 0


def test_each_figure_has_its_least_median_and_most() -> None:
    trace = GpuTrace(FakeNvml())
    for _ in range(4):
        trace.sample()
    (device,) = trace.summary()["devices"]
    assert device["sm_clock_mhz"] == {"min": 1700.0, "median": 1850.0, "max": 2000.0}
    assert device["power_w"] == {"min": 690.5, "median": 690.5, "max": 690.5}
    assert device["memory_used_mib"]["max"] == 100 * 1024
    assert (device["name"], device["clock_held_down_by"]) == ("NVIDIA H200", {"power limit": 0.5})
    assert "temperature_c" not in device, "what a device does not tell is left out"


def test_a_lap_begins_anew() -> None:
    trace = GpuTrace(FakeNvml())
    trace.sample()
    assert trace.lap()["devices"][0]["sm_clock_mhz"]["max"] == 2000.0
    trace.sample()
    assert trace.lap()["devices"][0]["sm_clock_mhz"]["max"] == 1900.0


def test_a_lap_shorter_than_the_interval_has_one_look() -> None:
    assert GpuTrace(FakeNvml()).lap()["samples"] == 1


def test_a_thread_looks_again_and_again() -> None:
    with GpuTrace(FakeNvml(), interval_s=0.001) as trace:
        deadline = time.monotonic() + 10
        while trace.summary()["samples"] < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert trace.summary()["samples"] >= 3


def test_without_nvml_it_says_so() -> None:
    with GpuTrace(None) as trace:
        summary = trace.lap()
    assert summary == {
        "available": False,
        "why": "not available: nvidia-ml-py or the NVIDIA driver is missing",
    }
    assert line(summary) == "GPU: not available: nvidia-ml-py or the NVIDIA driver is missing"


def test_a_line_for_people_names_what_holds_the_clock_down() -> None:
    trace = GpuTrace(FakeNvml())
    for _ in range(4):
        trace.sample()
    shown = line(trace.summary())
    assert shown.startswith("GPU 0: 1,850 MHz (1,700 to 2,000), 690 W")
    assert shown.endswith("held down by power limit 50%")
