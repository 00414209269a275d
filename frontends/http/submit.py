"""Between a route and the engines: a request goes out as its key allows, and detached ones by way of their log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from frontends.common import json as fields
from frontends.common.auth import ANYBODY, ApiKey
from frontends.common.generation import Submitter
from frontends.common.resumable.metadata import RequestMetadata, pack_metadata
from frontends.common.resumable.registry import Registry
from frontends.http.detached import LoggedSubmission, StreamState, new_stream
from inferengine.client import Submission
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams

STREAM_HEADER = "x-stream-id"


def submitter(
    request: Request,
    engines: Submitter,
    registry: Registry,
    served_name: str,
    adapters: Sequence[str] = (),
    *,
    detachable: bool = True,
) -> Any:
    """What this request's generation is given to. Its body has been read. A model's name may be that of one of the
    LoRA `adapters`.

    Detached are those that say so (`detached: true`) and those that bring an id of their own for their stream.
    Nothing is where there is no stream to read on (`detachable` false).
    Raises `forbidden` for a model that the key may not use.
    """
    scope = request.scope
    key: ApiKey = scope.get("api_key", ANYBODY)
    document: dict[str, Any] = scope.get("document", {})
    model = document.get("model") or served_name
    if not key.may_use(str(model)):
        raise InferEngineError("forbidden", "This key may not use that model.", field="model")
    adapter = str(model) if model != served_name and model in adapters else ""
    if not detachable:
        return KeyedSubmitter(engines, key, adapter)
    state: StreamState | None = scope.get("stream")  # a stream that is read on
    if state is not None:
        return LogSubmitter(registry, state, key, None, adapter)
    chosen = request.headers.get(STREAM_HEADER)
    if chosen is None and not fields.flag(document, "detached"):
        return KeyedSubmitter(engines, key, adapter)
    state = scope["stream"] = new_stream(chosen, request.headers.get("last-event-id"))
    note = RequestMetadata(key.tenant, scope["path"], scope["request_id"], int(time.time()), scope.get("body", b""))
    return LogSubmitter(registry, state, key, note, adapter)


class KeyedSubmitter:
    """Straight to the engines, with what the key decides."""

    def __init__(self, engines: Submitter, key: ApiKey, adapter: str) -> None:
        self._engines = engines
        self._key = key
        self._adapter = adapter

    def submit(
        self, prompt_ids: Sequence[int] | None = None, params: SamplingParams | None = None, **arguments: Any
    ) -> Submission:
        return self._engines.submit(prompt_ids, params, **_as(self._key, self._adapter, arguments))


class LogSubmitter:
    """By way of a log that other connections may read too. With `note` None it only reads what runs already."""

    def __init__(
        self, registry: Registry, state: StreamState, key: ApiKey, note: RequestMetadata | None, adapter: str
    ) -> None:
        self._registry = registry
        self._state = state
        self._key = key
        self._note = note
        self._adapter = adapter
        self._num_prompts = self._num_choices = 0

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, **arguments: Any) -> LoggedSubmission:
        """The next prompt of the request."""
        request_id, n = self._state.request_id(self._num_prompts), params.n
        if self._note is None:
            log = self._registry.resume(request_id, n, detached=True, context_ids=())
        else:
            log = self._registry.submit(
                prompt_ids,
                params,
                request_id=request_id,
                detached=True,
                context_ids=(),
                note=pack_metadata(self._note),
                **_as(self._key, self._adapter, arguments),
            )
        submission = LoggedSubmission(self._registry, log, self._state, self._num_choices, n, self._key.tenant)
        self._num_prompts += 1
        self._num_choices += n
        return submission


def _as(key: ApiKey, adapter: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A request's own wishes within what its key allows."""
    if adapter:
        arguments = arguments | {"adapter": adapter}
    if key is ANYBODY:
        return arguments
    return arguments | {
        "tenant": key.tenant,
        "salt": key.salt(arguments.get("salt", b"")),
        "priority": key.urgency(arguments.get("priority", 0)),
    }
