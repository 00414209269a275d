"""What operators, balancers and dashboards ask: models, health, readiness, figures, versions."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Gauge, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from frontends.common.errors import scrubbed
from frontends.http.answer import JsonBytes
from frontends.http.service import Service
from inferengine import __version__
from inferengine.client import AsyncClient
from inferengine.client.pool import EngineHealth
from inferengine.errors import InferEngineError
from inferengine.exposition import EngineMetrics
from inferengine.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, READY, STOPPING

ENGINE_ANSWER_S = 2.0  # an engine that takes longer to tell its figures shows those it told last


async def models(request: Request) -> Response:
    service: Service = request.app.state.service
    return JsonBytes({"object": "list", "data": [await _model_card(service)]})


async def model(request: Request) -> Response:
    service: Service = request.app.state.service
    card = await _model_card(service)
    if request.path_params["model"] != card["id"]:
        name = scrubbed(request.path_params["model"][:200])
        raise InferEngineError("model_not_found", f"The model `{name}` does not exist.", field="model")
    return JsonBytes(card)


async def health(request: Request) -> Response:
    """200 while an engine is connected whose loop turns, loading included; 503 otherwise."""
    service: Service = request.app.state.service
    engines = [_engine_health(service, item) for item in service.engines.health()]
    good = any(engine["healthy"] for engine in engines)
    return JsonBytes({"status": "ok" if good else "unhealthy", "engines": engines}, 200 if good else 503)


async def ready(request: Request) -> Response:
    """200 when a request sent now would be taken; 503 with the reason otherwise."""
    service: Service = request.app.state.service
    if service.draining:
        return _not_ready("this front end is draining")
    states = [item.state for item in service.engines.health() if item.connected]
    if READY not in states:
        return _not_ready(f"the engine is {states[0]}" if states else "no engine is connected")
    await service.model.get()
    return JsonBytes({"status": "ready"})


async def ping(request: Request) -> Response:
    """200 as long as this front end runs, with or without an engine."""
    return Response(b"", 200)


async def version(request: Request) -> Response:
    return JsonBytes({"version": __version__, "protocol": [PROTOCOL_MAJOR, PROTOCOL_MINOR]})


async def load(request: Request) -> Response:
    """What runs and waits now, from the engines' last STATUS, and what this worker answers."""
    service: Service = request.app.state.service
    running = waiting = 0
    for item in service.engines.health():
        status = item.status or {}
        running += int(status.get("running_requests") or 0)
        waiting += int(status.get("waiting_requests") or 0)
    return JsonBytes({"server_load": service.num_calls, "running_requests": running, "waiting_requests": waiting})


async def stats(request: Request) -> Response:
    """The engine's live figures. With several engines: of the first, and of each under `engines`."""
    service: Service = request.app.state.service
    figures = await asyncio.gather(*(_engine_stats(client) for client in service.engines.clients))
    connected = [one for one in figures if one["running"]] or figures
    document = dict(connected[0])
    if len(figures) > 1:
        document["engines"] = dict(zip([client.address for client in service.engines.clients], figures, strict=True))
    document.setdefault("config", service.config.resolved())
    document["http"] = {"active_requests": service.num_calls, "worker": service.metrics.worker}
    return JsonBytes(document)


async def metrics(request: Request) -> Response:
    """Prometheus text: the engines' own figures, then those of this front end's workers."""
    service: Service = request.app.state.service
    figures = await asyncio.gather(*(_engine_stats(client) for client in service.engines.clients))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineMetrics([one for one in figures if "engine" in one]))
    registry.register(service.metrics)
    up = Gauge("inferengine_engines_connected", "Engines that this front end is connected to.", registry=registry)
    up.set(sum(client.connected for client in service.engines.clients))
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


async def _model_card(service: Service) -> dict[str, Any]:
    served = service.model.served or await service.model.get()
    return {
        "id": served.name,
        "object": "model",
        "created": int(service.started_s),
        "owned_by": "inferengine",
        "root": served.name,
        "parent": None,
        "max_model_len": served.info.max_model_len,
    }


def _engine_health(service: Service, item: EngineHealth) -> dict[str, Any]:
    frozen = item.loop_age_ms is not None and item.loop_age_ms > service.config.engine.frozen_after_s * 1000
    return {
        "connected": item.connected,
        "state": item.state,
        "loop_age_ms": item.loop_age_ms,
        "healthy": item.connected and not frozen and item.state != STOPPING,
    }


def _not_ready(reason: str) -> Response:
    response = JsonBytes({"status": "not ready", "reason": reason}, 503)
    response.headers["Retry-After"] = "1"
    return response


async def _engine_stats(client: AsyncClient) -> dict[str, Any]:
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
