"""Errors as clients see them, without paths or addresses, in the shape of the API whose path was asked.

OpenAI's, which all other paths have too: `{"error": {message, type, param, code}}`. Anthropic's: `{"type": "error",
"error": {type, message}, "request_id"}`. Ollama's: `{"error": message}`.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from inferengine.errors import InferEngineError, InvalidRequest, bounded

logger = logging.getLogger(__name__)

Dialect = Literal["openai", "anthropic", "ollama"]
Headers = Iterable[tuple[bytes, bytes]]

# Anthropic's names of errors, by status.
ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",  # cancelled by an operator: a client that is gone reads no error
    503: "overloaded_error",
    504: "timeout_error",
}

# Paths of two or more parts, except those of this API, and URLs.
_PLACES = re.compile(r"(?:[a-z]+://[^\s\"']+)|(?<![\w<./])/(?!v1/)(?:[\w.+-]+/)+[\w.+-]*")


def scrubbed(message: str) -> str:
    """Return a message for clients: of bounded length, without paths and addresses of this machine."""
    return bounded(_PLACES.sub("...", message))


def sentence(error: InferEngineError) -> str:
    """Return a message that names its field: `max_tokens: must be a whole number`."""
    whole = error.field is None or error.message[:1].isupper()  # a message in lower case is about its field
    return scrubbed(error.message if whole else f"{error.field}: {error.message}")


def error_object(error: InferEngineError) -> dict[str, Any]:
    """Return the value of `error` in a body or an event."""
    return {
        "message": sentence(error),
        "type": error.kind.openai_type,
        "param": error.field,
        "code": error.code,
    }


def error_body(error: InferEngineError) -> bytes:
    """Return the JSON body of an error response, in OpenAI's format."""
    return json.dumps({"error": error_object(error)}, ensure_ascii=False, separators=(",", ":")).encode()


def dialect_of(path: str, headers: Headers = ()) -> Dialect:
    """Return whose API a request speaks. Anthropic's SDKs send a header of their own on every path."""
    if path.removeprefix("/v1").startswith("/messages"):
        return "anthropic"
    if any(name == b"anthropic-version" for name, _ in headers):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return an error as Anthropic writes it."""
    kind = ANTHROPIC_ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def in_dialect(dialect: Dialect, status: int, body: bytes, request_id: str) -> bytes:
    """Rewrite the body of an error from OpenAI's shape. A body of another shape is returned as it is."""
    if dialect == "openai":
        return body
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body
    if dialect == "ollama":
        document = {"error": message}
    else:
        document = {**anthropic_error(status, message), "request_id": request_id}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def early_refusal(error: InferEngineError, path: str, headers: Headers = ()) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return headers and body of an answer that is written before the application sees the request.

    `path` and `headers`: of the request, as far as they have arrived. The request id is a new one."""
    dialect = dialect_of(path, headers)
    request_id = secrets.token_hex(16)
    body = in_dialect(dialect, error.http_status, error_body(error), request_id)
    answer = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    answer.append((b"x-request-id", request_id.encode()))
    if dialect == "anthropic":
        answer.append((b"request-id", request_id.encode()))
    if (wait := retry_after(error)) is not None:
        answer.append((b"retry-after", wait.encode()))
    answer.append((b"connection", b"close"))
    return answer, body


def report(error: InferEngineError, request_id: str) -> None:
    """Log a failure of this server (status 500). Its reason is in the log only; refusals and retryable errors are not
    logged."""
    if error.http_status == 500:
        fields = {"request_id": request_id, "code": error.code, "reason": error.message}
        logger.error("a request failed", extra={"fields": fields})


def retry_after(error: InferEngineError) -> str | None:
    """Return the Retry-After header in whole seconds for the statuses 429 and 503, else None."""
    if error.http_status not in (429, 503):
        return None
    return str(max(1, math.ceil(error.retry_after_s or 1.0)))


def unexpected() -> InferEngineError:
    """Return the error that a client gets for an unexpected exception."""
    return InferEngineError("engine_error", "The server failed on this request.")


def rename_field(error: InferEngineError, names: Mapping[str, str]) -> None:
    """Replace an internal field name by the dialect's (`max_tokens` by `max_new_tokens`), in the message too. Names
    without an underscore, such as `stop`, are also ordinary words and stay in the message."""
    field = error.field
    if field is None or field not in names:
        return
    error.field = names[field]
    if "_" in field:
        error.message = re.sub(rf"(?<![\w.]){re.escape(field)}(?!\w)", error.field, error.message)


def flatten_tool_field(error: InferEngineError, parameters: str = "parameters") -> None:
    """Name a field of a tool as dialects do whose tools have no `function` around them, and call their schema
    `parameters`."""
    if error.field is not None and error.field.startswith("tools["):
        place, found, name = error.field.partition(".function.")
        if found:
            error.field = f"{place}.{parameters if name == 'parameters' else name}"


def name_default(error: InferEngineError, field: str, default: int) -> None:
    """Say in an error about a field that the request left it out, and what it then is."""
    if error.field == field:
        error.message = bounded(f"{error.message} The request does not say it: {default} is the default here.")


def as_unprocessable(error: InvalidRequest) -> InferEngineError:
    """Return the error for dialects that answer 422 to a field of the wrong type or range."""
    if error.code != "invalid_request":
        return error
    return InferEngineError("unprocessable", error.message, field=error.field)
