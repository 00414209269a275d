"""Bodies of what a client says to an engine, read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferengine.wire import read
from inferengine.wire.body import Decoder, Encoder, Frames, encode_fields
from inferengine.wire.messages import (
    EPOCH_BYTES,
    ID_BYTES,
    PROTOCOL_MAJOR,
    REPLIES,
    Admin,
    Attach,
    Bye,
    Cancel,
    Credit,
    Hello,
    Kind,
    Model,
    Ping,
    StopFound,
    Submit,
)
from inferengine.wire.read import MAX_I64, MAX_SALT_BYTES, MAX_U32, WireError

MAX_STOP_CHARACTERS = 65_536  # of a stop string that a peer found

# Fields of SUBMIT that are left out where they are empty.
SELDOM = (
    "params",
    "priority",
    "tenant",
    "salt",
    "detached",
    "label",
    "note",
    "adapter",
    "pooling",
    "traceparent",
    "stalls",
)


def _decode_hello(body: Any, raw: Sequence[bytes]) -> Hello:
    body = read.map_body(body)
    protocol = read.protocol(body.get("protocol", [PROTOCOL_MAJOR, 0]))
    if protocol[0] != PROTOCOL_MAJOR:
        raise WireError(
            f"this end speaks protocol major {PROTOCOL_MAJOR}, HELLO names {protocol[0]}", code="version_mismatch"
        )
    return Hello(
        protocol,
        read.string(body.get("role", "client"), "role"),
        read.string(body.get("name", ""), "name"),
        read.each(body.get("features", []), "features", read.string),
        read.optional(body.get("window"), read.integer, "window", 1, MAX_U32),
        read.optional(body.get("epoch"), read.binary, "epoch", EPOCH_BYTES),
        read.integer(body.get("last_seq", 0), "last_seq"),
    )


def _encode_hello(message: Hello) -> tuple[int, Any, Frames]:
    body: dict[str, Any] = {"protocol": message.protocol, "role": message.role, "name": message.name}
    body["features"] = message.features
    if message.window is not None:
        body["window"] = message.window
    if message.epoch is not None:
        body |= {"epoch": message.epoch, "last_seq": message.last_seq}
    return Kind.HELLO, body, []


def _decode_submit(body: Any, raw: Sequence[bytes]) -> Submit:
    body = read.map_body(body)
    id, stream = body.get("id"), body.get("stream")
    try:
        return _submit_from(body, raw)
    except WireError as error:  # the client can match the answer if it got so far as to name the request
        error.id = id if isinstance(id, bytes) and len(id) == ID_BYTES else None
        error.stream = stream if type(stream) is int and 0 <= stream <= MAX_U32 else None
        raise


def _submit_from(body: dict[str, Any], raw: Sequence[bytes]) -> Submit:
    text, messages = body.get("text"), body.get("messages")
    given = (text is not None) + (messages is not None) + bool(raw)
    if given != 1:
        raise WireError(
            "give the prompt once: as a raw u32[] frame, as 'text' or as 'messages'",
            code="invalid_request",
            field="prompt",
        )
    if raw:
        if len(raw[0]) % 4:
            raise WireError("prompt: the raw frame must be u32[]: a multiple of 4 bytes", field="prompt")
        if not raw[0]:
            raise WireError("prompt: must not be empty", code="invalid_request", field="prompt")
    salt = body.get("salt", b"")
    if isinstance(salt, str):
        salt = salt.encode()
    if not isinstance(salt, bytes) or len(salt) > MAX_SALT_BYTES:
        raise WireError(f"salt: must be bytes (bin), at most {MAX_SALT_BYTES}", field="salt")
    return Submit(
        read.request_id(body.get("id"), "id"),
        read.u32(body.get("stream"), "stream"),
        raw[0] if raw else None,
        read.optional(text, read.string, "text", MAX_I64),
        None if messages is None else list(read.each(messages, "messages", _chat_message)),
        read.mapping(body.get("params", {}), "params"),
        read.choice(body.get("reply", "tokens"), "reply", REPLIES),
        read.integer(body.get("priority", 0), "priority", -(2**31), 2**31 - 1),
        read.string(body.get("tenant", ""), "tenant"),
        salt,
        read.optional(body.get("deadline_ms"), read.integer, "deadline_ms", 1, MAX_U32),
        read.boolean(body.get("detached", False), "detached"),
        read.string(body.get("label", ""), "label"),
        read.optional(body.get("grammar"), read.each, "grammar", _string_or_nil),
        read.note(body),
        read.string(body.get("adapter", ""), "adapter"),
        read.string(body.get("pooling", ""), "pooling"),
        read.string(body.get("traceparent", ""), "traceparent"),
        read.optional(body.get("resume"), read.each, "resume", _tokens_or_nil),
        read.integer(body.get("stalls", 0), "stalls", 0, MAX_U32),
    )


def _tokens_or_nil(value: Any, field: str) -> bytes | None:
    if value is not None and (not isinstance(value, bytes) or len(value) % 4):
        raise WireError(f"{field}: must be u32[] (bin of a multiple of 4 bytes) or nil", field=field)
    return value


def _string_or_nil(value: Any, field: str) -> str | None:
    return None if value is None else read.string(value, field, MAX_I64)


def _chat_message(value: Any, field: str) -> dict[str, Any]:
    message = read.mapping(value, field)
    read.string(message.get("role"), f"{field}.role")
    if not isinstance(message.get("content"), str | list | None):
        raise WireError(f"{field}.content: must be a string or an array of parts", field=f"{field}.content")
    return message


def _encode_submit(message: Submit) -> tuple[int, Any, Frames]:
    body: dict[str, Any] = {"id": message.id, "stream": message.stream}
    for name in ("text", "messages", "deadline_ms", "grammar", "resume"):
        if (value := getattr(message, name)) is not None:
            body[name] = value
    for name in SELDOM:
        if value := getattr(message, name):
            body[name] = value
    if message.reply != "tokens":
        body["reply"] = message.reply
    return Kind.SUBMIT, body, [] if message.prompt is None else [message.prompt]


def _encode_cancel(message: Cancel) -> tuple[int, Any, Frames]:
    body: dict[str, Any] = {"streams": message.streams, "ids": message.ids}
    if message.leave:
        body["leave"] = True
    if message.stopped:
        body["stopped"] = message.stopped
    return Kind.CANCEL, body, []


def _decode_cancel(body: Any, raw: Sequence[bytes]) -> Cancel:
    body = read.map_body(body)
    return Cancel(
        read.each(body.get("streams", []), "streams", read.u32),
        read.each(body.get("ids", []), "ids", read.request_id),
        read.boolean(body.get("leave", False), "leave"),
        read.each(body.get("stopped", []), "stopped", _stop_found),
    )


def _stop_found(value: Any, field: str) -> StopFound:
    if not isinstance(value, list) or len(value) < 3:
        raise WireError(f"{field}: must be [stream, tokens, text]", field=field)
    text = read.string(value[2], field, MAX_STOP_CHARACTERS)
    return StopFound(read.u32(value[0], field), read.integer(value[1], field), text)


def _decode_attach(body: Any, raw: Sequence[bytes]) -> Attach:
    body = read.map_body(body)
    id, stream = read.request_id(body.get("id"), "id"), read.u32(body.get("stream"), "stream")
    try:
        cursors = read.each(body.get("cursors", []), "cursors", read.integer)
        return Attach(id, stream, cursors, read.choice(body.get("reply", "tokens"), "reply", REPLIES))
    except WireError as error:
        error.id, error.stream = id, stream
        raise


def _decode_model(body: Any, raw: Sequence[bytes]) -> Model:
    return Model(read.optional(read.map_body(body).get("files"), read.each, "files", read.string))


def _decode_ping(body: Any, raw: Sequence[bytes]) -> Ping:
    return Ping(read.integer(read.array_body(body, 1)[0], "nonce"))


def _decode_admin(body: Any, raw: Sequence[bytes]) -> Admin:
    body = read.map_body(body)
    arguments = {key: value for key, value in body.items() if key not in ("op", "nonce")}
    return Admin(read.string(body.get("op"), "op"), read.integer(body.get("nonce", 0), "nonce"), arguments)


def _encode_admin(message: Admin) -> tuple[int, Any, Frames]:
    return Kind.ADMIN, {**message.arguments, "op": message.op, "nonce": message.nonce}, []


ENCODERS: Mapping[type, Encoder] = {
    Hello: _encode_hello,
    Submit: _encode_submit,
    Cancel: _encode_cancel,
    Attach: encode_fields(Kind.ATTACH),
    Credit: lambda message: (Kind.CREDIT, [message.seq], []),
    Model: encode_fields(Kind.MODEL, without_none=True),
    Ping: lambda message: (Kind.PING, [message.nonce], []),
    Admin: _encode_admin,
    Bye: lambda message: (Kind.BYE, {}, []),
}
DECODERS: Mapping[int, Decoder] = {
    Kind.HELLO: _decode_hello,
    Kind.SUBMIT: _decode_submit,
    Kind.CANCEL: _decode_cancel,
    Kind.ATTACH: _decode_attach,
    Kind.CREDIT: lambda body, raw: Credit(read.integer(read.array_body(body, 1)[0], "seq")),
    Kind.MODEL: _decode_model,
    Kind.PING: _decode_ping,
    Kind.ADMIN: _decode_admin,
    Kind.BYE: lambda body, raw: Bye(),
}
