"""What a device can do at most: from its data sheet by name, from the configuration, or measured in a few milliseconds.

Data sheets promise what nothing quite reaches: a plain read kernel gets 4.45 of an H200's 4.8 TB/s, a large product 696
of its 989 TFLOP/s at the power limit. They are what others quote, so shares can be compared.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from inferengine.core.step_roofline import DevicePeaks

logger = logging.getLogger(__name__)


class Sheet(NamedTuple):
    """Of one device: GB/s, and TFLOP/s without sparsity, 16-bit with 32-bit sums. `eight_bit` 0: no such units."""

    gb_per_s: float
    fp32: float
    sixteen_bit: float
    eight_bit: float = 0.0


# What of torch.cuda.get_device_name() -> its data sheet. The first that occurs in the name as whole words counts.
SHEETS = {
    "B200": Sheet(8000, 75, 2250, 4500),
    "GH200": Sheet(4000, 67, 989, 1979),
    "H200 NVL": Sheet(4800, 60, 835, 1671),
    "H200": Sheet(4800, 67, 989, 1979),
    "H100 NVL": Sheet(3900, 60, 835, 1671),
    "H100 PCIe": Sheet(2000, 51, 756, 1513),
    "H100": Sheet(3350, 67, 989, 1979),
    "H800": Sheet(3350, 67, 989, 1979),
    "H20": Sheet(4000, 44, 148, 296),
    "A100-SXM4-80GB": Sheet(2039, 19.5, 312, 624),
    "A100 80GB PCIe": Sheet(1935, 19.5, 312, 624),
    "A100": Sheet(1555, 19.5, 312, 624),
    "A40": Sheet(696, 37.4, 149.7, 299.3),
    "A10": Sheet(600, 31.2, 125, 250),
    "L40S": Sheet(864, 91.6, 362, 733),
    "L40": Sheet(864, 90.5, 181, 362),
    "L4": Sheet(300, 30.3, 121, 242),
    "T4": Sheet(320, 8.1, 65, 130),
    "V100": Sheet(900, 15.7, 125),
    "RTX 6000 Ada": Sheet(960, 91.1, 364, 728),
    "RTX A6000": Sheet(768, 38.7, 155, 310),
    "RTX 5090": Sheet(1792, 104.8, 209.5, 419),
    "RTX 4090": Sheet(1008, 82.6, 165, 330),
    "RTX 3090": Sheet(936, 35.6, 71, 284),
}
READ_BYTES = {"cpu": (8 << 20, 64 << 20), "cuda": (256 << 20, 256 << 20)}  # least and most of a buffer that is read
SIDE = {"cpu": 512, "cuda": 4096}  # of the square matrices multiplied
REPEATS = 8


def sheet_of(name: str) -> Sheet | None:
    """The data sheet of a device by torch's name for it. A slice of a device (MIG) has none."""
    if not name or " MIG " in name:
        return None
    for part, sheet in SHEETS.items():
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(part)}(?![A-Za-z0-9])", name, re.IGNORECASE):
            return sheet
    return None


def device_peaks(
    device: torch.device, dtype: torch.dtype, *, weight_bytes: int, gb_per_s: float = 0.0, tflops: float = 0.0
) -> tuple[DevicePeaks, float] | None:
    """The peaks for products of `dtype`, and how much faster 8-bit products are. `gb_per_s` and `tflops` above 0 are
    the configuration's word. `weight_bytes`: a CPU reads a small model from its caches, so a buffer as large is read.

    None where the device is unknown and has no memory left to be measured in.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sheet = sheet_of(name)
    faster = sheet.eight_bit / sheet.sixteen_bit if sheet is not None and sheet.eight_bit else 1.0
    if gb_per_s > 0 and tflops > 0:
        return DevicePeaks(gb_per_s * 1e9, tflops * 1e12, "configuration"), faster
    if sheet is not None:
        peaks = DevicePeaks(
            sheet.gb_per_s * 1e9,
            (sheet.fp32 if dtype == torch.float32 else sheet.sixteen_bit) * 1e12,
            f"data sheet of {name}",
        )
    else:
        try:
            peaks = measure(device, dtype, weight_bytes)
        except torch.OutOfMemoryError:
            logger.info("no share of the roofline: set engine.peak_gb_per_s and engine.peak_tflops for this device")
            return None
    if gb_per_s > 0 or tflops > 0:
        peaks = DevicePeaks(
            gb_per_s * 1e9 or peaks.bytes_per_s,
            tflops * 1e12 or peaks.operations_per_s,
            f"configuration, {peaks.source}",
        )
    return peaks, faster


@torch.inference_mode()
def measure(device: torch.device, dtype: torch.dtype, weight_bytes: int) -> DevicePeaks:
    """The best of a few reads and products: some 30 ms on a CPU. On one that others use it comes out too low, and
    shares too high. The calling thread's number of torch threads is what it measures. Raises torch.OutOfMemoryError."""
    least, most = READ_BYTES[device.type]
    size = min(most, max(least, weight_bytes))
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    number = torch.float32 if device.type == "cpu" else dtype  # what a CPU computes in, whatever it stores
    matrix = torch.zeros(size // 4096, 1024, dtype=torch.float32, device=device)
    vector = torch.zeros(1024, dtype=torch.float32, device=device)
    read_s = _best_s(lambda: torch.mv(matrix, vector), wait)
    square = torch.zeros(SIDE[device.type], SIDE[device.type], dtype=number, device=device)
    product_s = _best_s(lambda: torch.mm(square, square), wait)
    return DevicePeaks(matrix.nbytes / read_s, 2.0 * SIDE[device.type] ** 3 / product_s, "measured at start")


def _best_s(work: Callable[[], object], wait: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times)
