"""Errors as HTTP shows them: `{"error": {message, type, param, code}}`, whatever went wrong."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from inferengine.errors import InferEngineError, InvalidRequest, bounded

logger = logging.getLogger(__name__)

# Whatever looks like a place on this machine: paths of two or more parts, but for this API's own, and socket addresses.
_PLACES = re.compile(r"(?:[a-z]+://[^\s\"']+)|(?<![\w<./])/(?!v1/)(?:[\w.+-]+/)+[\w.+-]*")


def scrubbed(message: str) -> str:
    """A message fit for strangers: bounded, without paths or addresses."""
    return bounded(_PLACES.sub("...", message))


def sentence(error: InferEngineError) -> str:
    """What a person reads who sees nothing but this: `max_tokens: must be a whole number`."""
    whole = error.field is None or error.message[:1].isupper()  # a message in small letters says something of its field
    return scrubbed(error.message if whole else f"{error.field}: {error.message}")


def error_object(error: InferEngineError) -> dict[str, Any]:
    """The value of `error` in a body or an event."""
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
    """Write down a failure of ours: the client learns that there was one, the log why. Refusals, and what is over when
    it is tried again, are no failures."""
    if error.http_status == 500:
        fields = {"request_id": request_id, "code": error.code, "reason": error.message}
        logger.error("a request failed", extra={"fields": fields})


def retry_after(error: InferEngineError) -> str | None:
    """The Retry-After header in whole seconds, for the statuses that promise one."""
    if error.http_status not in (429, 503):
        return None
    return str(max(1, math.ceil(error.retry_after_s or 1.0)))


def unexpected() -> InferEngineError:
    """What a client learns of a bug here; the log has the rest."""
    return InferEngineError("engine_error", "The server failed on this request.")


def rename_field(error: InferEngineError, names: Mapping[str, str]) -> None:
    """Say a dialect's name of the field instead of the one behind it, in the message too: who sent `max_new_tokens` is
    not to look for a `max_tokens`. Names that are words of the language, such as `stop`, stay in the message."""
    field = error.field
    if field is None or field not in names:
        return
    error.field = names[field]
    if "_" in field:
        error.message = re.sub(rf"(?<![\w.]){re.escape(field)}(?!\w)", error.field, error.message)


def as_unprocessable(error: InvalidRequest) -> InferEngineError:
    """The same complaint for dialects that answer 422 to a field of the wrong type or range."""
    if error.code != "invalid_request":
        return error
    return InferEngineError("unprocessable", error.message, field=error.field)
