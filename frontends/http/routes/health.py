"""Serve operators, load balancers and dashboards: models, health, readiness, load, statistics, versions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontends.common.auth import key_of
from frontends.common.engine_stats import CONTENT_TYPE, metrics_text, stats_document
from frontends.common.errors import dialect_of, scrubbed
from frontends.common.json import whole_number
from frontends.http.respond import JsonBytes
from frontends.http.state import HttpState
from inferengine import __version__
from inferengine.client.pool import EngineHealth
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, READY, STOPPING

MAX_PAGE = 1000  # models in one answer to Anthropic's clients


async def models(request: Request) -> Response:
    """List the model and its LoRA adapters, as far as the request's key may use them."""
    cards = _model_cards(request)
    if not _is_anthropic(request):
        return JsonBytes({"object": "list", "data": cards})
    page, more = _page([_anthropic_card(card) for card in cards], request.query_params)
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return JsonBytes({"data": page, "has_more": more, **ends})


async def model(request: Request) -> Response:
    """Return one model of the list; 404 for any other name."""
    card = next((card for card in _model_cards(request) if card["id"] == request.path_params["model"]), None)
    if card is None:
        name = scrubbed(request.path_params["model"][:200])
        raise InferEngineError("model_not_found", f"The model `{name}` does not exist.", field="model")
    return JsonBytes(_anthropic_card(card) if _is_anthropic(request) else card)


async def health(request: Request) -> Response:
    """Answer 200 while a connected engine makes progress, loading included; 503 otherwise."""
    service: HttpState = request.app.state.service
    engines = [_engine_health(service, item) for item in service.engines.health()]
    good = any(engine["healthy"] for engine in engines)
    return JsonBytes({"status": "ok" if good else "unhealthy", "engines": engines}, 200 if good else 503)


async def ready(request: Request) -> Response:
    """Answer 200 while an engine takes requests, however long its queue is; 503 with the reason otherwise."""
    service: HttpState = request.app.state.service
    if service.draining:
        return _not_ready("this front end is draining")
    states = [item.state for item in service.engines.health() if item.connected]
    if READY not in states:
        return _not_ready(f"the engine is {states[0]}" if states else "no engine is connected")
    try:
        await service.model.get()
    except InferEngineError as error:
        return _not_ready(error.message)
    return JsonBytes({"status": "ready"})


async def ping(request: Request) -> Response:
    """Answer 200 as long as this front end runs, with or without an engine."""
    return Response(b"", 200)


async def version(request: Request) -> Response:
    """Return the versions of the program and of the wire."""
    return JsonBytes({"version": __version__, "protocol": [PROTOCOL_MAJOR, PROTOCOL_MINOR]})


async def load(request: Request) -> Response:
    """Return how many requests run and wait in the engines, by their last STATUS, and how many this worker answers."""
    service: HttpState = request.app.state.service
    running = waiting = 0
    for item in service.engines.health():
        status = item.status or {}
        running += int(status.get("running_requests") or 0)
        waiting += int(status.get("waiting_requests") or 0)
    return JsonBytes({"server_load": service.num_calls, "running_requests": running, "waiting_requests": waiting})


async def stats(request: Request) -> Response:
    """Return the engine's statistics; with several engines those of all together, and of each under `engines`."""
    service: HttpState = request.app.state.service
    document = await stats_document(service.engines)
    document.setdefault("config", service.config.resolved())
    document["http"] = {"active_requests": service.num_calls, "worker": service.metrics.cells.worker}
    if service.keys.required:
        document["http"]["keys"] = {"count": len(service.keys.keys), "complaint": service.keys.complaint}
    return JsonBytes(document)


async def metrics(request: Request) -> Response:
    """Return Prometheus text: the metrics of the engines, then those of this front end's workers."""
    service: HttpState = request.app.state.service
    text = await metrics_text(service.engines, service.metrics)
    return Response(text, headers={"content-type": CONTENT_TYPE})


def _model_cards(request: Request) -> list[dict[str, Any]]:
    """Describe the model, then its LoRA adapters, of those that the key may use; without an engine as they were
    announced last."""
    service: HttpState = request.app.state.service
    info = service.model.info
    card = {
        "id": info.name,
        "object": "model",
        "created": int(service.started_s),
        "owned_by": "inferengine",
        "root": info.name,
        "parent": None,
        "max_model_len": info.max_model_len,
        "implementation": info.implementation or "native",
        "without": list(info.without),
    }
    cards = [card, *({**card, "id": name, "parent": info.name} for name in info.adapters)]
    key = key_of(request.scope)
    return [card for card in cards if key.may_use(str(card["id"]))]


def _is_anthropic(request: Request) -> bool:
    return dialect_of(request.scope["path"], request.scope["headers"]) == "anthropic"


def _anthropic_card(card: dict[str, Any]) -> dict[str, Any]:
    """Convert a model's description to Anthropic's format."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "capabilities": None,
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def _page(cards: list[dict[str, Any]], query: Mapping[str, str]) -> tuple[list[dict[str, Any]], bool]:
    """Return a page by Anthropic's `limit`, `after_id` and `before_id`, and whether there are more beyond it."""
    limit = whole_number(query.get("limit", "20"))
    if limit is None or not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest("limit", f"must be a whole number from 1 to {MAX_PAGE}")
    ids = [card["id"] for card in cards]
    for name in ("after_id", "before_id"):
        if (place := query.get(name)) is not None and place not in ids:
            raise InvalidRequest(name, "is not a model of this list")
    if (last := query.get("before_id")) is not None:
        before = cards[: ids.index(last)]
        return before[-limit:], len(before) > limit
    after = cards[ids.index(query["after_id"]) + 1 :] if "after_id" in query else cards
    return after[:limit], len(after) > limit


def _engine_health(service: HttpState, item: EngineHealth) -> dict[str, Any]:
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
