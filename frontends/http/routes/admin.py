"""Serve operators: pause and resume, abort, profile, reset the cache, load and unload adapters, reload keys.

AuthMiddleware asks for an admin's key before any of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontends.common.json import read_string
from frontends.http.bodies import read_json
from frontends.http.respond import JsonBytes
from frontends.http.state import HttpState
from inferengine.client import AsyncClient
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.wire.messages import DRAINING


async def profile(request: Request) -> Response:
    """Record N steps, or those of S seconds (`?steps=N&wait_s=S`); the answer is a trace compressed by gzip.
    `?engine=NAME` where there are several."""
    client = _engine(request.app.state.service, request.query_params.get("engine", ""))
    arguments = {
        name: _number(name, text) for name, text in request.query_params.items() if name in ("steps", "wait_s")
    }
    result = await _ask(client, "profile", **arguments)
    headers = {
        "content-disposition": 'attachment; filename="trace.json.gz"',
        "x-steps": str(result["steps"]),
    }
    return Response(result["trace"], media_type="application/gzip", headers=headers)


def _engine(service: HttpState, name: str) -> AsyncClient:
    connected = {client.welcome.engine: client for client in service.engines.clients if client.connected}
    if not connected:
        raise InferEngineError("engine_unavailable", "No engine is connected.", retry_after_s=1.0)
    if not name and len(connected) == 1:
        return next(iter(connected.values()))
    if name not in connected:
        raise InvalidRequest("engine", f"must be one of {', '.join(sorted(connected))}")
    return connected[name]


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if name == "steps" else float(text)
    except ValueError:
        raise InvalidRequest(name, "must be a number") from None


def _flag(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise InvalidRequest(name, "must be true or false")
    return text == "true"


async def pause(request: Request) -> Response:
    """Refuse new requests; running ones go on. `?wait=true`: answer when they have ended."""
    service: HttpState = request.app.state.service
    waits = _flag("wait", request.query_params.get("wait", "false"))
    results = await _all(service, "drain", exit=False)
    if waits:
        try:
            async with asyncio.timeout(service.config.http.request_timeout_s):
                await _until_idle(service)
        except TimeoutError:
            raise InferEngineError("deadline_exceeded", "Paused, but some requests still run.") from None
    return JsonBytes({"status": "paused", "engines": results})


async def resume(request: Request) -> Response:
    """Accept requests again."""
    return JsonBytes({"status": "resumed", "engines": await _all(request.app.state.service, "resume")})


async def is_paused(request: Request) -> Response:
    """Return whether all engines refuse new requests."""
    states = [item.state for item in request.app.state.service.engines.health() if item.connected]
    return JsonBytes({"is_paused": bool(states) and all(state == DRAINING for state in states)})


async def abort_requests(request: Request) -> Response:
    """End all requests of all clients with `abort`."""
    return JsonBytes({"status": "aborted", "engines": await _all(request.app.state.service, "cancel_all")})


async def reset_prefix_cache(request: Request) -> Response:
    """Drop all cached prefixes that no running request holds."""
    return JsonBytes({"status": "reset", "engines": await _all(request.app.state.service, "flush")})


async def load_adapter(request: Request) -> Response:
    """Load an adapter: `lora_name` is a sub-folder of the engine's `model.adapters`. Answers when it can be used."""
    service, name = request.app.state.service, await _adapter_name(request)
    return JsonBytes({"status": "loaded", "engines": await _all(service, "load_adapter", name=name)})


async def unload_adapter(request: Request) -> Response:
    """Unload the adapter `lora_name`: new requests with it are refused, running ones go on."""
    service, name = request.app.state.service, await _adapter_name(request)
    return JsonBytes({"status": "unloaded", "engines": await _all(service, "unload_adapter", name=name)})


async def reload_keys(request: Request) -> Response:
    """Read the keys file now; 400 with what is wrong with it, and then the old keys hold.

    Every worker looks at the file by itself within a second: this tells whether it can be used."""
    keys = request.app.state.service.keys
    keys.reload()
    if keys.complaint:
        raise InferEngineError("invalid_request", f"The old keys hold: {keys.complaint}")
    return JsonBytes({"status": "read", "keys": len(keys.keys)})


ROUTES = (
    Route("/reload_keys", reload_keys, methods=["POST"]),
    Route("/profile", profile, methods=["POST"]),
    Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
    Route("/pause", pause, methods=["POST"]),
    Route("/resume", resume, methods=["POST"]),
    Route("/is_paused", is_paused),
    Route("/abort_requests", abort_requests, methods=["POST"]),
    Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
)
PATHS = frozenset(route.path for route in ROUTES)


async def _adapter_name(request: Request) -> str:
    """Return the adapter's name. No path of a request is ever opened: `lora_path` may only say the name again."""
    service: HttpState = request.app.state.service
    body = await read_json(request, service.config.http.max_body_bytes)
    name = read_string(body, "lora_name")
    if not name:
        raise InvalidRequest("lora_name", "is required")
    if read_string(body, "lora_path", name) != name:
        raise InvalidRequest("lora_path", "adapters come from the engine's own folder, by lora_name: leave it out")
    return name


async def _all(service: HttpState, op: str, **arguments: Any) -> dict[str, Any]:
    """Run an operation on each connected engine and return the results by the engine's name; an engine that refuses
    says why."""
    clients = [client for client in service.engines.clients if client.connected]
    if not clients:
        raise InferEngineError("engine_unavailable", "No engine is connected.", retry_after_s=1.0)

    async def one(client: AsyncClient) -> Any:
        try:
            return await _ask(client, op, **arguments)
        except InferEngineError as error:
            if len(clients) == 1:
                raise
            return {"error": error.code, "message": error.message}

    results = await asyncio.gather(*map(one, clients))
    return {client.welcome.engine: result for client, result in zip(clients, results, strict=True)}


async def _ask(client: AsyncClient, op: str, **arguments: Any) -> Any:
    """Run an operation on one engine. Its error names no field: `op` is the wire's, and no field of a request here."""
    try:
        return await client.admin(op, **arguments)
    except InferEngineError as error:
        error.field = None
        raise


async def _until_idle(service: HttpState) -> None:
    while any(int(figures.get("active_requests", 0)) for figures in (await _all(service, "stats")).values()):
        await asyncio.sleep(0.05)
