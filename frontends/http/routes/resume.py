"""Serve GET and DELETE /v1/streams/{id}: resume the stream of a detached request at any front end, or cancel it."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from frontends.common.auth import key_of
from frontends.common.json import parse_object
from frontends.common.resumable import RequestMetadata, unpack_metadata
from frontends.http.detached import StreamState, read_position, read_stream_id
from frontends.http.state import HttpState
from inferengine.errors import InferEngineError


async def read_stream(request: Request) -> Response:
    """Resume a detached stream after `Last-Event-ID`: the rest of the answer to its POST."""
    service: HttpState = request.app.state.service
    text = request.path_params["id"]
    state = StreamState(read_stream_id(text), read_position(request.headers.get("last-event-id"), text))
    metadata = await _metadata_of(service, request, state)
    route = next((one for one in request.app.routes if isinstance(one, Route) and one.path == metadata.path), None)
    body = metadata.request_body(service.config.http.max_body_bytes)
    if route is None or not body:
        message = "This stream's request is not kept: send it again with the header x-stream-id to read on."
        raise InferEngineError("not_found", message)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {**request.scope, "method": "POST", "path": metadata.path, "headers": headers, "request_id": metadata.label}
    request.scope["stream"] = scope["stream"] = state
    answer: Response = await route.endpoint(Request(scope, _Replay(request, body).receive))
    return answer


async def cancel_stream(request: Request) -> Response:
    """Cancel a detached request. For its readers the choices end with `abort`."""
    service: HttpState = request.app.state.service
    state = StreamState(read_stream_id(request.path_params["id"]), read_position(None, ""))
    metadata = await _metadata_of(service, request, state)
    for prompt in range(_num_prompts(metadata, service.config.http.max_body_bytes)):
        service.engines.cancel_request(state.request_id(prompt))
    return Response(status_code=204)


async def _metadata_of(service: HttpState, request: Request, state: StreamState) -> RequestMetadata:
    """Return a stream's metadata. Raises not_found for a stream that no engine has, or of another tenant."""
    key = key_of(request.scope)
    log = service.registry.resume(state.id, 1, detached=True, context_ids=())
    known = False
    try:
        await log.accepted()
        known = True
    finally:
        service.registry.leave(log, forget=not known)
    metadata = unpack_metadata(log.note)
    if metadata.tenant != key.tenant:
        raise InferEngineError("not_found", "There is no such stream.")
    return metadata


def _num_prompts(metadata: RequestMetadata, most_body_bytes: int) -> int:
    try:
        prompt = parse_object(metadata.request_body(most_body_bytes)).get("prompt")
    except InferEngineError:
        return 1
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


class _Replay:
    """Stands in for ASGI's receive: the stored body, then the messages of the real connection."""

    def __init__(self, request: Request, body: bytes) -> None:
        self._request = request
        self._body: bytes | None = body

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message: dict[str, Any] = {"type": "http.request"}
        while message["type"] == "http.request":  # the GET's own, without a body
            message = dict(await self._request.receive())
        return message
