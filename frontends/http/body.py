"""A request's body as a JSON object, within limits of size and time."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from frontends.common.fields import parse_object
from frontends.common.json_text import Beside
from inferengine.errors import InferEngineError, InvalidRequest


async def read_json(request: Request, most_bytes: int) -> dict[str, Any]:
    """Raises request_too_large, invalid_request, or `cancelled` when the client left in the middle."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequest(
            "Content-Type", "The Content-Type must be application/json (curl: -H 'Content-Type: application/json')."
        )
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise InvalidRequest(
            "Content-Encoding", f"{coding[:40]} is not read here: send the body as it is", code="unsupported"
        )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most_bytes:
        raise _too_large(most_bytes)
    try:
        async with asyncio.timeout(request.app.state.service.config.http.body_timeout_s):
            body = await _read(request, most_bytes)
    except TimeoutError:
        raise InferEngineError("request_timeout", "The body did not arrive within http.body_timeout_s.") from None
    except ClientDisconnect:
        raise InferEngineError("cancelled", "The client went away.") from None
    beside: Beside = request.app.state.service.beside
    document = await beside.do(len(body), parse_object, body)
    request.scope["body"], request.scope["document"] = body, document  # for whoever keeps or limits this request
    return document


async def _read(request: Request, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise _too_large(most_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(most_bytes: int) -> InferEngineError:
    return InferEngineError("request_too_large", f"The body must have at most {most_bytes} bytes.")
