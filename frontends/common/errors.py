"""Errors as clients see them: OpenAI's `{"error": {message, type, param, code}}`, without paths or addresses."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from inferengine.errors import InferEngineError, InvalidRequest, bounded

logger = logging.getLogger(__name__)

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


def as_unprocessable(error: InvalidRequest) -> InferEngineError:
    """Return the error for dialects that answer 422 to a field of the wrong type or range."""
    if error.code != "invalid_request":
        return error
    return InferEngineError("unprocessable", error.message, field=error.field)
