"""The engine's state, model, limits and live statistics, as hello, state and stats frames report them.

STATUS messages may be lost: every figure here is None where the engine did not report it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from frontends.common.engine_stats import together
from frontends.common.model import ModelContext
from inferengine.client import EnginePool
from inferengine.config import Config

WATCH_INTERVAL_S = 0.25
RATE_WINDOW_S = 2.0
UNAVAILABLE = "UNAVAILABLE"


class EngineState:
    """Reports what the engine has sent already: nothing here waits."""

    def __init__(self, engine: EnginePool, config: Config, models: ModelContext) -> None:
        self._engine = engine
        self._models = models
        self._limits = {
            "max_requests": config.ws.max_requests,
            "max_message_bytes": config.ws.max_message_bytes,
            "window": config.ws.send_queue_messages,
            "resume_window_s": config.wire.resume_ttl_s,
        }
        self._samples: deque[tuple[float, float, float]] = deque()  # time, output tokens, prompt tokens
        self.draining = False  # this front end drains

    @property
    def state(self) -> str:
        """The engine's state, UNAVAILABLE without a connection, or DRAINING while this front end drains."""
        if not self._engine.connected:
            return UNAVAILABLE
        return "DRAINING" if self.draining else self._engine.welcome.state

    def stats(self) -> dict[str, Any]:
        """Return a stats frame."""
        status = self._status()
        rates = self._rates()
        prompts, cached = number(status, "prompt_tokens"), number(status, "cached_tokens")
        return {
            "type": "stats",
            "state": self.state,
            "running": number(status, "running_requests"),
            "waiting": number(status, "waiting_requests"),
            "tokens_per_s": rates[0],
            "prompt_tokens_per_s": rates[1],
            "kv_usage": number(status, "kv_usage"),
            "prefix_hit_rate": cached / prompts if prompts and cached is not None else None,
            "preemptions": number(status, "preemptions"),
            "completed": number(status, "finished_requests"),
            "uptime_s": number(status, "uptime_s"),
        }

    async def watch(self, on_sample: Callable[[], None]) -> None:
        """Sample the engine's counters forever, and call `on_sample` each time."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            self.sample()
            on_sample()

    def sample(self) -> None:
        """Record the current counters. Rates are differences over the last RATE_WINDOW_S."""
        status = self._status()
        tokens = number(status, "output_tokens")
        prompts = number(status, "prompt_tokens")
        samples = self._samples
        if tokens is None or (samples and tokens < samples[-1][1]):  # not connected, or restarted
            samples.clear()
        if tokens is None:
            return
        now = asyncio.get_running_loop().time()
        samples.append((now, tokens, prompts or 0))
        while len(samples) > 2 and samples[1][0] <= now - RATE_WINDOW_S:
            samples.popleft()

    def _status(self) -> dict[str, Any]:
        """Return the last STATUS of the connected engine, or of all together."""
        found = [item.status for item in self._engine.health() if item.connected and item.status]
        return together(found) if len(found) > 1 else found[0] if found else {}

    def _rates(self) -> tuple[float | None, float | None]:
        if len(self._samples) < 2:
            return None, None
        first, last = self._samples[0], self._samples[-1]
        seconds = last[0] - first[0]
        if seconds <= 0:
            return None, None
        return (last[1] - first[1]) / seconds, (last[2] - first[2]) / seconds

    def describe(self) -> dict[str, Any]:
        """Return the content of hello and state frames."""
        connected = self._engine.connected
        welcome = self._engine.welcome if connected else None
        model = welcome.model if welcome is not None else None
        served = self._models.served
        return {
            "engine": {
                "state": self.state,
                "progress": list(welcome.progress) if welcome is not None and welcome.state == "STARTING" else None,
                "epoch": None if welcome is None else welcome.epoch.hex(),
                "name": None if welcome is None else welcome.engine,
            },
            "model": None
            if model is None
            else {
                "name": model.name,
                "fingerprint": model.fingerprint,
                "vocab_size": model.vocab_size,
                "max_model_len": model.max_model_len,
                "adapters": list(model.adapters),
                "chat": None if served is None else served.template is not None,
                "defaults": None if served is None else served.defaults,
            },
            "limits": self._limits,
        }


def number(status: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of STATUS, None where it is absent or no number."""
    value = status.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
