"""Every error that can leave this system, in one table: a stable code, an HTTP status and the remedy.

The code is what programs match on; it never changes once released. A message names the field at fault and what to
do about it; it is bounded and carries no path, address or traceback, because it may be shown to strangers.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_MESSAGE_CHARACTERS = 1000
HALF_PAIR = "has half of a surrogate pair, which is no character: send both halves or none"


class ErrorKind(NamedTuple):
    """What is known about a code without looking at the request."""

    http_status: int
    openai_type: str
    retryable: bool
    remedy: str


KINDS: dict[str, ErrorKind] = {
    "invalid_request": ErrorKind(400, "invalid_request_error", False, "Correct the named field."),
    "unsupported": ErrorKind(
        400, "invalid_request_error", False, "Leave the named field out; this engine cannot honour it."
    ),
    "context_length_exceeded": ErrorKind(
        400, "invalid_request_error", False, "Shorten the prompt or lower max_tokens."
    ),
    "prompt_never_fits": ErrorKind(
        400, "invalid_request_error", False, "Shorten the prompt, or give the engine more KV blocks."
    ),
    "unauthorized": ErrorKind(
        401, "authentication_error", False, "Send a valid API key as 'Authorization: Bearer KEY'."
    ),
    "forbidden": ErrorKind(403, "permission_error", False, "Use a key that may do this."),
    "model_not_found": ErrorKind(404, "invalid_request_error", False, "Use a name that /v1/models lists."),
    "not_found": ErrorKind(
        404, "invalid_request_error", False, "Check the id; finished requests are kept for resume_ttl_s."
    ),
    "request_timeout": ErrorKind(408, "invalid_request_error", True, "Send the request without pauses."),
    "conflict": ErrorKind(409, "invalid_request_error", False, "Choose another id, or attach to the running request."),
    "request_too_large": ErrorKind(413, "invalid_request_error", False, "Send a smaller body."),
    "unprocessable": ErrorKind(422, "invalid_request_error", False, "Correct the named field."),
    "rate_limited": ErrorKind(429, "rate_limit_error", True, "Wait for Retry-After, then try again."),
    "cancelled": ErrorKind(499, "cancelled", False, "The client went away or cancelled."),
    "overloaded": ErrorKind(503, "overloaded_error", True, "Wait for Retry-After, then try again."),
    "draining": ErrorKind(
        503, "overloaded_error", True, "Send the request to another engine, or wait for the restart."
    ),
    "engine_unavailable": ErrorKind(
        503, "overloaded_error", True, "Wait until the engine is up; see 'inferengine check'."
    ),
    "engine_restarted": ErrorKind(503, "overloaded_error", True, "Submit the request again."),
    "engine_stalled": ErrorKind(
        503, "overloaded_error", True, "Submit the request again; one that stalls each time is refused."
    ),
    "deadline_exceeded": ErrorKind(504, "timeout_error", True, "Allow more time, or ask for fewer tokens."),
    "engine_error": ErrorKind(500, "server_error", True, "Try again; the engine's log has the cause."),
    "client_stalled": ErrorKind(499, "cancelled", False, "Read faster, or attach again to resume."),
    "protocol_error": ErrorKind(400, "protocol_error", False, "Speak the wire as wire/PROTOCOL.md says."),
    "version_mismatch": ErrorKind(400, "protocol_error", False, "Use a client of the engine's protocol major."),
}


def bounded(message: str) -> str:
    """Cut a message to MAX_MESSAGE_CHARACTERS, saying so."""
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    return message[: MAX_MESSAGE_CHARACTERS - 4] + " ..."


class InferEngineError(Exception):
    """An error with a stable code. `field` names what the caller must change, where there is such a thing."""

    def __init__(
        self, code: str, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        if code not in KINDS:
            raise KeyError(f"unknown error code {code!r}: add it to errors.KINDS")
        super().__init__(bounded(message))
        self.code = code
        self.message = bounded(message)
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> ErrorKind:
        """What is known about its code."""
        return KINDS[self.code]

    @property
    def http_status(self) -> int:
        """The HTTP status of its code."""
        return KINDS[self.code].http_status

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" if self.field is None else f"{self.code}: {self.field}: {self.message}"


class InvalidRequest(InferEngineError):
    """A field of a request cannot be used as it stands."""

    def __init__(self, field: str, message: str, *, code: str = "invalid_request") -> None:
        super().__init__(code, message, field=field)


class ConfigError(InferEngineError):
    """The configuration cannot be used: names the key and the remedy. Ends the program with exit code 2."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__("invalid_request", message, field=key)

    def __str__(self) -> str:
        return f"configuration: {self.field}: {self.message}"


class DoesNotFit(ConfigError):
    """The model, or its KV cache, is larger than the memory there is. Ends the program with exit code 4."""

    def __init__(self, message: str, key: str = "engine.check_memory") -> None:
        super().__init__(key, message)

    def __str__(self) -> str:
        return self.message


class Unreachable(ConfigError):
    """A server or device that the configuration names does not answer. It may be back later: exit code 1."""


class ExitCode:
    """Exit codes of every command.

    systemd restarts a service after all of them but USAGE, MODEL and MEMORY, which a restart would not change.
    """

    OK = 0
    CRASH = 1
    USAGE = 2  # configuration or command line
    MODEL = 3  # the model cannot be loaded
    MEMORY = 4  # it does not fit
    ADDRESS = 5  # a socket cannot be bound
    FROZEN = 6  # the loop, or the I/O thread, stopped turning
    STALLED = 7  # a step took far longer than such steps take
    ABORTED = 130  # a second signal cut the drain short
    UNREAD = 141  # the reader of the output closed it, as `head` does
