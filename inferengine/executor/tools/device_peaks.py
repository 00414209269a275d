"""The peak bandwidth and arithmetic of a device: from the configuration, its data sheet, or measured in milliseconds.

Figures of data sheets are not quite reached: a plain read kernel gets 4.45 of an H200's 4.8 TB/s, a large product 696
of its 989 TFLOP/s at the power limit. Others quote them too, so shares of them can be compared.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from inferengine.core.step_time import DevicePeaks

logger = logging.getLogger(__name__)


class DataSheet(NamedTuple):
    """One device: GB/s, and TFLOP/s without sparsity, 16-bit with 32-bit sums. `eight_bit` 0: no such units. `link`:
    GB/s that NVLink takes to other devices; 0: there is none, or not always."""

    gb_per_s: float
    fp32: float
    sixteen_bit: float
    eight_bit: float = 0.0
    link: float = 0.0


# Part of torch.cuda.get_device_name() -> data sheet. The first one that occurs in the name as whole words counts.
DATA_SHEETS = {
    "B200": DataSheet(8000, 75, 2250, 4500, 900),
    "GH200": DataSheet(4000, 67, 989, 1979, 450),
    "H200 NVL": DataSheet(4800, 60, 835, 1671, 450),
    "H200": DataSheet(4800, 67, 989, 1979, 450),
    "H100 NVL": DataSheet(3900, 60, 835, 1671),
    "H100 PCIe": DataSheet(2000, 51, 756, 1513),
    "H100": DataSheet(3350, 67, 989, 1979, 450),
    "H800": DataSheet(3350, 67, 989, 1979, 200),
    "H20": DataSheet(4000, 44, 148, 296, 450),
    "A100-SXM4-80GB": DataSheet(2039, 19.5, 312, 624, 300),
    "A100 80GB PCIe": DataSheet(1935, 19.5, 312, 624),
    "A100": DataSheet(1555, 19.5, 312, 624),
    "A40": DataSheet(696, 37.4, 149.7, 299.3),
    "A10": DataSheet(600, 31.2, 125, 250),
    "L40S": DataSheet(864, 91.6, 362, 733),
    "L40": DataSheet(864, 90.5, 181, 362),
    "L4": DataSheet(300, 30.3, 121, 242),
    "T4": DataSheet(320, 8.1, 65, 130),
    "V100": DataSheet(900, 15.7, 125),
    "RTX 6000 Ada": DataSheet(960, 91.1, 364, 728),
    "RTX A6000": DataSheet(768, 38.7, 155, 310),
    "RTX 5090": DataSheet(1792, 104.8, 209.5, 419),
    "RTX 4090": DataSheet(1008, 82.6, 165, 330),
    "RTX 3090": DataSheet(936, 35.6, 71, 284),
}
READ_BYTES = {"cpu": (8 << 20, 64 << 20), "cuda": (256 << 20, 256 << 20)}  # least and most of a buffer that is read
SIDE = {"cpu": 512, "cuda": 4096}  # of the square matrices multiplied
REPEATS = 8


def data_sheet_of(name: str) -> DataSheet | None:
    """Find the data sheet of a device by torch's name for it. A slice of a device (MIG) has none."""
    if not name or " MIG " in name:
        return None
    for part, sheet in DATA_SHEETS.items():
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(part)}(?![A-Za-z0-9])", name, re.IGNORECASE):
            return sheet
    return None


def device_peaks(
    device: torch.device, dtype: torch.dtype, *, weight_bytes: int, gb_per_s: float = 0.0, tflops: float = 0.0
) -> tuple[DevicePeaks, float] | None:
    """Return the peaks for products of `dtype`, and how many times faster 8-bit products are.

    `gb_per_s` and `tflops` above 0 are configured and win. `weight_bytes` is the size of the buffer to measure reading
    with: a CPU reads a small model from its caches. None where the device is unknown and has no free memory to measure.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sheet = data_sheet_of(name)
    faster = sheet.eight_bit / sheet.sixteen_bit if sheet is not None and sheet.eight_bit else 1.0
    if gb_per_s > 0 and tflops > 0:
        link = 0.0 if sheet is None else sheet.link * 1e9
        return DevicePeaks(gb_per_s * 1e9, tflops * 1e12, "configuration", link), faster
    if sheet is not None:
        peaks = DevicePeaks(
            sheet.gb_per_s * 1e9,
            (sheet.fp32 if dtype == torch.float32 else sheet.sixteen_bit) * 1e12,
            f"data sheet of {name}",
            sheet.link * 1e9,
        )
    else:
        try:
            peaks = measure(device, dtype, weight_bytes)
        except torch.OutOfMemoryError:
            logger.info("no share of the roofline: set engine.peak_gb_per_s and engine.peak_tflops for this device")
            return None
    if gb_per_s > 0 or tflops > 0:
        peaks = peaks._replace(
            bytes_per_s=gb_per_s * 1e9 or peaks.bytes_per_s,
            operations_per_s=tflops * 1e12 or peaks.operations_per_s,
            source=f"configuration, {peaks.source}",
            is_measured=False,  # a part of them is right, and steps do not tell which
        )
    return peaks, faster


@torch.inference_mode()
def measure(device: torch.device, dtype: torch.dtype, weight_bytes: int) -> DevicePeaks:
    """Measure the best of a few reads and products, on the calling thread's number of torch threads: some 30 ms on a
    CPU. On a CPU that others use the peaks come out too low, until steps show it. Raises torch.OutOfMemoryError."""
    least, most = READ_BYTES[device.type]
    size = min(most, max(least, weight_bytes))
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    number = torch.float32 if device.type == "cpu" else dtype  # what a CPU computes in, whatever it stores
    matrix = torch.zeros(size // 4096, 1024, dtype=torch.float32, device=device)
    vector = torch.zeros(1024, dtype=torch.float32, device=device)
    read_s = _best_s(lambda: torch.mv(matrix, vector), wait)
    square = torch.zeros(SIDE[device.type], SIDE[device.type], dtype=number, device=device)
    product_s = _best_s(lambda: torch.mm(square, square), wait)
    operations_per_s = 2.0 * SIDE[device.type] ** 3 / product_s
    return DevicePeaks(matrix.nbytes / read_s, operations_per_s, "measured at start", is_measured=True)


def _best_s(work: Callable[[], object], wait: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times)
