"""The engines' own figures, for whoever asks a front end: /stats and /metrics are the same on all of them."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import Gauge
from prometheus_client.registry import Collector

from inferengine.client import AsyncClient, EnginePool
from inferengine.errors import InferEngineError
from inferengine.exposition import render

__all__ = ["CONTENT_TYPE", "engine_figures", "metrics_text", "stats_document"]

ENGINE_ANSWER_S = 2.0  # an engine that takes longer to tell its figures shows those it told last


async def engine_figures(engines: EnginePool) -> list[dict[str, Any]]:
    """The statistics of each engine, in the order of their addresses."""
    return await asyncio.gather(*(_figures_of(client) for client in engines.clients))


async def stats_document(engines: EnginePool) -> dict[str, Any]:
    """With several engines: of the first that is there, and of each under `engines`."""
    figures = await engine_figures(engines)
    connected = [one for one in figures if one["running"]] or figures
    document = dict(connected[0])
    if len(figures) > 1:
        document["engines"] = dict(zip([client.address for client in engines.clients], figures, strict=True))
    return document


async def metrics_text(engines: EnginePool, *collectors: Collector) -> bytes:
    """Prometheus text: the engines' figures, then this front end's own."""
    figures = await engine_figures(engines)
    up = Gauge("inferengine_engines_connected", "Engines that this front end is connected to.", registry=None)
    up.set(sum(client.connected for client in engines.clients))
    return render([one for one in figures if "engine" in one], up, *collectors)


async def _figures_of(client: AsyncClient) -> dict[str, Any]:
    if not client.connected:
        return {"running": False, "last_error": "no engine is connected"}
    try:
        async with asyncio.timeout(ENGINE_ANSWER_S):
            answer = await client.admin("stats")
    except (TimeoutError, InferEngineError):
        answer = {**(client.status or {}), "stale": True}
    if not isinstance(answer, dict):
        return {"running": True}
    # the wire has bytes (the epoch), JSON has not
    readable = {name: value.hex() if isinstance(value, bytes) else value for name, value in answer.items()}
    return {"running": True, **readable}
