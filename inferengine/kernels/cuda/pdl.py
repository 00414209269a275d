"""Programmatic dependent launch (PDL): a kernel may start while the one before it still runs.

With PDL a kernel's blocks become resident early and do what depends on no earlier kernel (prefetching weights into L2),
then wait in `wait_for_previous` until everything written before is visible. Every kernel of this package that is
launched with PDL waits in *all* of its programs before it reads or writes anything a previous kernel touches; by
induction a kernel that passed its wait sees the whole past. Inside CUDA graphs the launch becomes a programmatic edge.

What may be read before the wait: weights, and what only kernels without PDL write, torch's own for one. Those let
nothing start before they end. So are the columns of a step, the block tables and the keys and values of earlier steps.

Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def allow_next(PDL: tl.constexpr):
    """Let the next kernel's programs become resident as soon as there is room."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Block until all memory operations of earlier kernels are visible."""
    if PDL:
        gdc_wait()


def supports_pdl(device: torch.device) -> bool:
    """True on Hopper and later; false on the CPU, where the interpreter runs the kernels."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(pdl: bool, *, exact: bool = False) -> dict[str, Any]:
    """Keyword arguments for a kernel launch. `launch_pdl` is only named where it exists: the interpreter has none.

    `exact` forbids the compiler to contract a product and a sum into one rounding: two loops of a kernel that do the
    same arithmetic then give the same bits.
    """
    options: dict[str, Any] = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
    if exact:
        options["enable_fp_fusion"] = False
    return options
