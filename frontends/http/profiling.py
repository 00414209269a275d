"""POST /profile: some steps of a running engine as a Chrome trace. The gate asks for an admin's key before."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from frontends.http.service import Service
from inferengine.client import AsyncClient
from inferengine.errors import InferEngineError, InvalidRequest


async def profile(request: Request) -> Response:
    """`?steps=N&wait_s=S`: answered when so many steps ran, or with those of that time, as a file compressed by gzip.
    `?engine=NAME` where there are several."""
    client = _engine(request.app.state.service, request.query_params.get("engine", ""))
    arguments = {
        name: _number(name, text) for name, text in request.query_params.items() if name in ("steps", "wait_s")
    }
    result = await client.admin("profile", **arguments)
    headers = {
        "content-disposition": 'attachment; filename="trace.json.gz"',
        "x-steps": str(result["steps"]),
    }
    return Response(result["trace"], media_type="application/gzip", headers=headers)


def _engine(service: Service, name: str) -> AsyncClient:
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
