"""Statistics of the engine: STATUS for every subscriber, statistics and configuration for operators, Prometheus text.

GPU utilisation and memory come from NVML, where nvidia-ml-py (the `gpu-telemetry` extra) and a driver are installed.
They are read when somebody asks for statistics, never by the loop.

MetricsServer: Prometheus text from the engine itself, for a scraper that should not depend on any front end. It has one
thread of its own, on loopback, and two paths: /metrics and /health. It asks the I/O thread for the figures, never the
loop.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from inferengine.config import Config, visible_cards
from inferengine.core.scheduler.scheduler_state import SchedulerSnapshot
from inferengine.engine.counters import Counters
from inferengine.engine.io.publisher import Publisher
from inferengine.engine.lifecycle import Lifecycle
from inferengine.engine.loop import EngineRef
from inferengine.engine.model_info import ModelCard
from inferengine.observability.prometheus import render
from inferengine.process.listen import AddressTaken
from inferengine.wire.messages import READY, STATES

logger = logging.getLogger(__name__)

_LIBRARY = "pynvml"


SECRET_WORDS = ("secret", "password", "api_key")


def load_nvml() -> Any:
    """Load NVML and initialise it; None where the library or the driver is missing."""
    try:
        nvml: Any = importlib.import_module(_LIBRARY)
        nvml.nvmlInit()
    except Exception as error:  # the library's own error types exist only where it does
        logger.debug("no GPU figures: %s", error)
        return None
    return nvml


class Gpus:
    """The GPUs that this process may see."""

    def __init__(self, nvml: Any = load_nvml) -> None:
        """`nvml`: the library, how to load it, or None for no figures."""
        self._nvml = nvml() if callable(nvml) else nvml
        self._handles: dict[str, Any] = {}
        if self._nvml is not None:
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = {str(index): self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)}
            named = [card for card in visible_cards() if card in self._handles]
            if named:  # NVML itself does not read CUDA_VISIBLE_DEVICES
                self._handles = {card: self._handles[card] for card in named}

    def read(self) -> dict[str, dict[str, float]]:
        """Return the values by name, then by the device's index: `utilization` [0, 1], `memory_used_bytes`,
        `memory_total_bytes`."""
        figures: dict[str, dict[str, float]] = {}
        for index, handle in self._handles.items():
            try:
                busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except Exception as error:
                logger.warning("NVML does not answer for device %s: %s", index, error)
                continue
            values = {"utilization": busy, "memory_used_bytes": memory.used, "memory_total_bytes": memory.total}
            for name, value in values.items():
                figures.setdefault(name, {})[index] = value
        return figures


class StatsReporter:
    """Reads the loop's latest snapshot and counters; never waits for the loop."""

    def __init__(
        self,
        config: Config,
        lifecycle: Lifecycle,
        card: ModelCard,
        engine: EngineRef,
        publisher: Publisher,
        counters: Counters,
        adapters: Mapping[str, int],
    ) -> None:
        """`adapters`: the numbers of the LoRA adapters by name, kept up to date by its owner."""
        self._config = config
        self._lifecycle = lifecycle
        self._card = card
        self._engine = engine
        self._publisher = publisher
        self._counters = counters
        self._adapters = adapters
        self._gpus = Gpus() if config.engine.device != "cpu" else Gpus(None)

    def status(self) -> dict[str, Any]:
        """Return STATUS, which is small and sent often: what choosing an engine and a live panel need."""
        lifecycle, publisher, engine = self._lifecycle, self._publisher, self._engine.engine
        values: dict[str, Any] = {
            "engine": lifecycle.engine,
            "epoch": lifecycle.epoch,
            "state": lifecycle.state,
            "progress": list(lifecycle.progress),
            "model": self._card.name,
            "loop_age_ms": round(lifecycle.loop_age_s() * 1e3, 1),
            "uptime_s": round(lifecycle.clock() - lifecycle.started_s, 3),
            "peers": self._counters.num_connections,
            "active_requests": publisher.num_open,
            "stalled_steps": lifecycle.num_stalled_steps,
        }
        if engine is None:
            return values
        loop, stats = engine.loop, engine.loop.stats
        snapshot = loop.snapshot
        waiting, waiting_tokens = loop.queued()
        return values | {
            "running_requests": snapshot.num_running,
            "waiting_requests": waiting,
            "waiting_tokens": waiting_tokens,
            "kv_usage": snapshot.kv_usage,
            "free_blocks": snapshot.num_blocks_free + snapshot.num_blocks_cached,
            "steps": stats.num_steps,
            "prompt_tokens": stats.num_prompt_tokens,
            "cached_tokens": stats.num_cached_tokens,
            "output_tokens": stats.num_output_tokens,
            "finished_requests": stats.num_finished,
            "preemptions": stats.num_preemptions,
            "failed_steps": loop.num_failed_steps,
            "prefill_tokens_per_s": round(loop.prefill_tokens_per_s, 1),
            "roofline_share": loop.roofline.shares() if loop.roofline is not None else {},
        }

    def stats(self) -> dict[str, Any]:
        """Return the counters and gauges of STATUS, the cache, histograms, percentiles, configuration."""
        counters, engine = self._counters, self._engine.engine
        values = self.status() | {
            "running": self._lifecycle.state == READY,
            "last_error": self._lifecycle.last_error,
            "accepted_requests": counters.num_accepted,
            "rejected_requests": dict(counters.rejected),
            "finished_by_reason": dict(counters.finished),
            "requests_by_status": counters.by_status(),
            "protocol_errors": counters.num_protocol_errors,
            "percentiles": counters.percentiles(),
            "histograms": counters.histograms(),
            "config": self.config(),
            "startup_seconds": {phase: round(seconds, 3) for phase, seconds in list(self._lifecycle.phases.items())},
            "sleep_state": {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            "state_flags": {state: int(state == self._lifecycle.state) for state in STATES},
            "gpu": self._gpus.read(),
        }
        if engine is None:
            return values
        loop, stats, snapshot = engine.loop, engine.loop.stats, engine.loop.snapshot
        return values | {
            "completed_requests": stats.num_finished,
            "decode_steps": stats.num_steps,
            "scheduled_tokens": stats.num_scheduled_tokens,
            "embeddings": stats.num_embeddings,
            "compilations": loop.num_compilations,
            "average_batch_size": stats.num_scheduled_rows / stats.num_steps if stats.num_steps else 0.0,
            "max_batch_observed": stats.max_batch,
            "last_error": self._lifecycle.last_error or loop.last_error,
            "waiting_by_reason": {
                "capacity": max(0, values["waiting_requests"] - snapshot.num_deferred),
                "deferred": min(values["waiting_requests"], snapshot.num_deferred),
            },
            "held": {"slots": snapshot.num_slots_held, "outputs": len(self._publisher.submissions)},
            "prompt_tokens_by_source": {
                "local_compute": stats.num_prompt_tokens - stats.num_cached_tokens,
                "local_cache_hit": stats.num_cached_tokens,
            },
            "cached_tokens_by_source": {"device": snapshot.num_prefix_hit_tokens},
            "corrupted_requests": stats.num_corrupted,
            "adapters": self._adapter_requests(snapshot.running_adapters),
            "histograms": {**values["histograms"], **snapshot.block_ages},
            "speculation": _speculation(engine.speculation_method, snapshot),
            "upstreams": loop.upstreams,
            "roofline": loop.roofline.to_map() if loop.roofline is not None else {},
            "prefix_cache_queries": snapshot.num_prefix_lookup_tokens,
            "prefix_cache_hits": snapshot.num_prefix_hit_tokens,
            "cache": _cache(snapshot, stats.num_failed_allocations, self._config.cache.eviction),
        }

    def _adapter_requests(self, running: Sequence[int]) -> dict[str, Any]:
        """Return how many adapters may run at once (all that are loaded), the names of those that run, and of those
        that some request waits for. `running`: of each running sequence with an adapter its number. Empty without
        adapters."""
        if not self._adapters:
            return {}
        num_open = Counter(log.submission.adapter for log in self._publisher.open_logs())
        num_running = Counter(running)
        named = sorted(self._adapters.items())
        return {
            "loaded": len(named),
            "running": [name for name, number in named if num_running[number]],
            "waiting": [name for name, number in named if num_open[number] > num_running[number]],
        }

    def config(self) -> dict[str, dict[str, Any]]:
        """Return the resolved configuration without its secrets."""
        return {
            section: {
                key: "(hidden)" if value and any(word in key for word in SECRET_WORDS) else value
                for key, value in values.items()
            }
            for section, values in self._config.resolved().items()
        }


# -- the server for scrapers -------------------------------------------------------------------------------------------


HOST = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_TIMEOUT_S = 5.0  # one scraper is served at a time


class MetricsServer:
    """Serves until `close`."""

    def __init__(self, port: int, read: Callable[[], dict[str, Any] | None]) -> None:
        """`read` gives the statistics, or None when the engine does not answer. Raises AddressTaken."""

        class Handler(BaseHTTPRequestHandler):
            timeout = CLIENT_TIMEOUT_S
            server_version = "inferengine"
            sys_version = ""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path not in ("/metrics", "/health"):
                    self._answer(404, b"there are /metrics and /health\n", "text/plain")
                    return
                stats = read()
                if stats is None:
                    self._answer(503, b"the engine does not answer\n", "text/plain")
                elif path == "/health":
                    self._answer(200, f"{stats['state']}\n".encode(), "text/plain")
                else:
                    self._answer(200, render([stats]), CONTENT_TYPE)

            def log_message(self, format: str, *arguments: Any) -> None:
                logger.debug(format, *arguments)

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        try:
            self._server = HTTPServer((HOST, port), Handler)
        except OSError as error:
            message = f"engine.metrics_port {port} on {HOST} cannot be bound ({error.strerror}): choose another"
            raise AddressTaken(message) from None
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="inferengine-metrics", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLIENT_TIMEOUT_S)


def _speculation(method: str, snapshot: SchedulerSnapshot) -> dict[str, Any]:
    """Return the part `speculation`: how many draft tokens there were, and how many the model confirmed."""
    return {
        "method": method,
        "verified": snapshot.num_verified,
        "drafted": snapshot.num_drafted,
        "accepted": snapshot.num_drafts_accepted,
        "acceptance_rate": snapshot.acceptance_rate,
        "mean_accepted_length": snapshot.mean_accepted_length,
        "accepted_by_position": {str(place): count for place, count in enumerate(snapshot.drafts_accepted_by_position)},
    }


def _cache(snapshot: SchedulerSnapshot, num_failed_allocations: int, policy: str) -> dict[str, Any]:
    """Return the part `cache`: what the blocks of the KV cache hold, and snapshots. Its keys call a block a page."""
    return {
        "page_size": snapshot.block_size,
        "max_pages": snapshot.num_blocks,
        "used_pages": snapshot.num_blocks_held,
        "free_pages": snapshot.num_blocks_free + snapshot.num_blocks_cached,
        "cached_pages": snapshot.num_blocks_cached,
        "active_sequences": snapshot.num_running,
        "pressure_events": num_failed_allocations,
        "evictions": snapshot.num_evictions,
        "utilization": snapshot.kv_usage,
        "internal_fragmentation": snapshot.internal_fragmentation,
        "policy": policy,
        "swapped_out_pages": snapshot.num_blocks_swapped_out,
        "swapped_in_pages": snapshot.num_blocks_swapped_in,
        "max_snapshots": snapshot.num_snapshots,
        "cached_snapshots": snapshot.num_snapshots_known,
        "snapshot_evictions": snapshot.num_snapshot_evictions,
    }
