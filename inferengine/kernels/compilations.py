"""Counts kernels that Triton compiles, or reads from its disk cache, once an engine serves.

Each costs the requests that wait tenths of a second to tens of seconds. The number must stay 0: every kernel that a
step can launch is compiled before the engine is READY (runtime/rehearsal.py).
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class Compilations:
    """Counts from its construction on. Nothing is counted where Triton is not in use."""

    def __init__(self, *, device_type: str) -> None:
        self.count = 0
        self.names: list[str] = []  # of the kernels, in order, at most MOST_NAMES
        if device_type != "cpu":
            from triton import knobs

            self._next = knobs.runtime.jit_post_compile_hook
            knobs.runtime.jit_post_compile_hook = self._seen

    MOST_NAMES = 100

    def _seen(self, **event: Any) -> Any:
        """Triton's hook: a kernel is ready to be launched for the first time."""
        self.count += 1
        name = str(event.get("repr", "a kernel"))
        if len(self.names) < self.MOST_NAMES:
            self.names.append(name)
        logger.warning("a kernel was compiled while serving: %s", name)
        return None if self._next is None else self._next(**event)

    def close(self) -> None:
        """Count no more."""
        if hasattr(self, "_next"):
            from triton import knobs

            if knobs.runtime.jit_post_compile_hook == self._seen:
                knobs.runtime.jit_post_compile_hook = self._next
