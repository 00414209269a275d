"""Messages to frames and back. Whatever the bytes are, decoding ends in a message or in a WireError.

Every length and range that the wire itself promises is checked here; what depends on the model (token ids, context)
is checked by the engine's link.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgpack

from inferengine.errors import KINDS, bounded
from inferengine.wire.messages import (
    EPOCH_BYTES,
    FINISH_REASONS,
    ID_BYTES,
    MAGIC,
    PROTOCOL_MAJOR,
    REPLIES,
    STATES,
    Accept,
    Admin,
    AdminReply,
    Attach,
    Bye,
    Cancel,
    Credit,
    Done,
    Goodbye,
    Hello,
    Kind,
    Message,
    Model,
    ModelFiles,
    ModelInfo,
    Ping,
    Pong,
    Reject,
    Status,
    Step,
    Submit,
    Welcome,
)

Frames = list[bytes]

MAX_NAME_CHARACTERS = 256  # role, name, tenant, label, file names
MAX_SALT_BYTES = 1024
MAX_NOTE_BYTES = 256 * 1024
MAX_LIST_ITEMS = 65_536  # entries of one list in a message, beyond which no honest client goes
MAX_U32 = 2**32 - 1
MAX_I64 = 2**63 - 1
_SWAP = sys.byteorder == "big"
_HEADER = {kind: MAGIC + bytes((PROTOCOL_MAJOR, kind)) for name, kind in vars(Kind).items() if not name.startswith("_")}


class WireError(Exception):
    """A message that cannot be used. `id` and `stream` are given where they could still be read."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "protocol_error",
        field: str | None = None,
        id: bytes | None = None,
        stream: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.id = id
        self.stream = stream

    def reject(self) -> Reject:
        """The answer to it."""
        return Reject(self.id, self.stream, self.code, bounded(self.message), self.field, KINDS[self.code].retryable)


def to_u32(values: Iterable[int]) -> bytes:
    """Little-endian unsigned 32-bit. Raises OverflowError or TypeError for what does not fit."""
    packed = values if isinstance(values, array) and values.typecode == "I" else array("I", values)
    if _SWAP:
        packed = array("I", packed)
        packed.byteswap()
    return packed.tobytes()


def from_u32(data: bytes, field: str = "tokens") -> array[int]:
    """The inverse of `to_u32`."""
    if len(data) % 4:
        raise WireError(f"{field}: a u32[] has a length that is a multiple of 4, not {len(data)}", field=field)
    values = array("I")
    values.frombytes(data)
    if _SWAP:
        values.byteswap()
    return values


def pack(value: Any) -> bytes:
    """One msgpack value."""
    return cast(bytes, msgpack.packb(value))


def header(kind: int) -> bytes:
    """The first frame of a message of this kind."""
    return _HEADER[kind]


def encode(message: Message) -> Frames:
    """The frames of a message, without a routing id."""
    kind, body, raw = _ENCODERS[type(message)](message)
    return [_HEADER[kind], pack(body), *raw]


def decode(frames: Sequence[bytes]) -> Message:
    """The message in these frames (without a routing id). Raises WireError and nothing else."""
    if len(frames) < 2:
        raise WireError(f"a message has a header and a body frame, got {len(frames)} frame(s)")
    head = frames[0]
    if len(head) != 4 or head[:2] != MAGIC:
        raise WireError("the header is 4 bytes: 'IE', major version, kind")
    if head[2] != PROTOCOL_MAJOR:
        raise WireError(
            f"this end speaks protocol major {PROTOCOL_MAJOR}, the message has {head[2]}", code="version_mismatch"
        )
    decoder = _DECODERS.get(head[3])
    if decoder is None:
        raise WireError(f"unknown message kind {head[3]}")
    try:
        body = msgpack.unpackb(frames[1], ext_hook=_refuse_ext, max_ext_len=0)
    except WireError:
        raise
    except Exception as error:  # msgpack raises a dozen types; all of them mean the same to the peer
        raise WireError(f"the body is not one msgpack value: {type(error).__name__}") from None
    return decoder(body, frames[2:])


def _refuse_ext(code: int, data: bytes) -> Any:
    raise WireError(f"msgpack ext type {code} is not part of this wire")


# ---- reading values, each with an error that names the key -----------------------------------------------------------

_T = TypeVar("_T")


def _map(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise WireError(f"the body must be a map, not {type(body).__name__}")
    return body


def _array(body: Any, least: int) -> list[Any]:
    if not isinstance(body, list) or len(body) < least:
        raise WireError(f"the body must be an array of at least {least} element(s)")
    return body


def _int(value: Any, field: str, low: int = 0, high: int = MAX_I64) -> int:
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"{field}: must be a whole number in [{low}, {high}]", field=field)
    return value


def _float(value: Any, field: str) -> float:
    if type(value) not in (int, float) or not -1e300 < value < 1e300:
        raise WireError(f"{field}: must be a finite number", field=field)
    return float(value)


def _str(value: Any, field: str, most: int = MAX_NAME_CHARACTERS) -> str:
    if not isinstance(value, str):
        raise WireError(f"{field}: must be a string", field=field)
    if len(value) > most:
        raise WireError(f"{field}: at most {most} characters", field=field)
    return value


def _bytes(value: Any, field: str, length: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != length:
        raise WireError(f"{field}: must be {length} bytes (bin)", field=field)
    return value


def _bool(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise WireError(f"{field}: must be true or false", field=field)
    return value


def _dict(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(f"{field}: must be a map", field=field)
    return value


def _choice(value: Any, field: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise WireError(f"{field}: must be one of {', '.join(choices)}", field=field)
    return cast(str, value)


def _each(value: Any, field: str, read: Callable[[Any, str], _T]) -> tuple[_T, ...]:
    if not isinstance(value, list):
        raise WireError(f"{field}: must be an array", field=field)
    if len(value) > MAX_LIST_ITEMS:
        raise WireError(f"{field}: at most {MAX_LIST_ITEMS} entries", field=field)
    return tuple(read(item, field) for item in value)


def _optional(value: Any, read: Callable[..., _T], *arguments: Any) -> _T | None:
    return None if value is None else read(value, *arguments)


def _u32(value: Any, field: str) -> int:
    return _int(value, field, 0, MAX_U32)


def _id(value: Any, field: str) -> bytes:
    return _bytes(value, field, ID_BYTES)


def _protocol(value: Any) -> tuple[int, int]:
    pair = _each(value, "protocol", _u32)
    if len(pair) < 2:
        raise WireError("protocol: must be [major, minor]", field="protocol")
    return (pair[0], pair[1])


# ---- client to engine -----------------------------------------------------------------------------------------------


def _decode_hello(body: Any, raw: Sequence[bytes]) -> Hello:
    body = _map(body)
    protocol = _protocol(body.get("protocol", [PROTOCOL_MAJOR, 0]))
    if protocol[0] != PROTOCOL_MAJOR:
        raise WireError(
            f"this end speaks protocol major {PROTOCOL_MAJOR}, HELLO names {protocol[0]}", code="version_mismatch"
        )
    return Hello(
        protocol,
        _str(body.get("role", "client"), "role"),
        _str(body.get("name", ""), "name"),
        _each(body.get("features", []), "features", _str),
        _optional(body.get("window"), _int, "window", 1, MAX_U32),
        _optional(body.get("epoch"), _bytes, "epoch", EPOCH_BYTES),
        _int(body.get("last_seq", 0), "last_seq"),
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
    body = _map(body)
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
        raise WireError(f"salt: must be at most {MAX_SALT_BYTES} bytes", field="salt")
    return Submit(
        _id(body.get("id"), "id"),
        _u32(body.get("stream"), "stream"),
        raw[0] if raw else None,
        _optional(text, _str, "text", MAX_I64),
        None if messages is None else list(_each(messages, "messages", _chat_message)),
        _dict(body.get("params", {}), "params"),
        _choice(body.get("reply", "tokens"), "reply", REPLIES),
        _int(body.get("priority", 0), "priority", -(2**31), 2**31 - 1),
        _str(body.get("tenant", ""), "tenant"),
        salt,
        _optional(body.get("deadline_ms"), _int, "deadline_ms", 1, MAX_U32),
        _bool(body.get("detached", False), "detached"),
        _str(body.get("label", ""), "label"),
        _optional(body.get("grammar"), _each, "grammar", _string_or_nil),
        _note(body),
        _str(body.get("adapter", ""), "adapter"),
    )


def _note(body: dict[str, Any]) -> bytes:
    note = body.get("note", b"")
    if not isinstance(note, bytes) or len(note) > MAX_NOTE_BYTES:
        raise WireError(f"note: must be at most {MAX_NOTE_BYTES} bytes", field="note")
    return note


def _string_or_nil(value: Any, field: str) -> str | None:
    return None if value is None else _str(value, field, MAX_I64)


def _chat_message(value: Any, field: str) -> dict[str, Any]:
    message = _dict(value, field)
    _str(message.get("role"), f"{field}.role")
    if not isinstance(message.get("content"), str | list | None):
        raise WireError(f"{field}.content: must be a string or an array of parts", field=f"{field}.content")
    return message


def _encode_submit(message: Submit) -> tuple[int, Any, Frames]:
    body: dict[str, Any] = {"id": message.id, "stream": message.stream}
    for name in ("text", "messages", "deadline_ms", "grammar"):
        if (value := getattr(message, name)) is not None:
            body[name] = value
    for name in ("params", "priority", "tenant", "salt", "detached", "label", "note", "adapter"):
        if value := getattr(message, name):
            body[name] = value
    if message.reply != "tokens":
        body["reply"] = message.reply
    return Kind.SUBMIT, body, [] if message.prompt is None else [message.prompt]


def _decode_cancel(body: Any, raw: Sequence[bytes]) -> Cancel:
    body = _map(body)
    return Cancel(_each(body.get("streams", []), "streams", _u32), _each(body.get("ids", []), "ids", _id))


def _decode_attach(body: Any, raw: Sequence[bytes]) -> Attach:
    body = _map(body)
    id, stream = _id(body.get("id"), "id"), _u32(body.get("stream"), "stream")
    try:
        cursors = _each(body.get("cursors", []), "cursors", _int)
        return Attach(id, stream, cursors, _choice(body.get("reply", "tokens"), "reply", REPLIES))
    except WireError as error:
        error.id, error.stream = id, stream
        raise


def _decode_model(body: Any, raw: Sequence[bytes]) -> Model:
    return Model(_optional(_map(body).get("files"), _each, "files", _str))


def _decode_ping(body: Any, raw: Sequence[bytes]) -> Ping:
    return Ping(_int(_array(body, 1)[0], "nonce"))


def _decode_admin(body: Any, raw: Sequence[bytes]) -> Admin:
    body = _map(body)
    arguments = {key: value for key, value in body.items() if key not in ("op", "nonce")}
    return Admin(_str(body.get("op"), "op"), _int(body.get("nonce", 0), "nonce"), arguments)


# ---- engine to client -----------------------------------------------------------------------------------------------


def _decode_welcome(body: Any, raw: Sequence[bytes]) -> Welcome:
    body = _map(body)
    progress = body.get("progress", ["", 0.0])
    if not isinstance(progress, list) or len(progress) < 2:
        raise WireError("progress: must be [phase, share]", field="progress")
    return Welcome(
        _str(body.get("engine", ""), "engine"),
        _bytes(body.get("epoch"), "epoch", EPOCH_BYTES),
        _choice(body.get("state"), "state", STATES),
        (_str(progress[0], "progress"), _float(progress[1], "progress")),
        _optional(body.get("model"), _model_info),
        _dict(body.get("limits", {}), "limits"),
        _int(body.get("window", 64), "window", 1),
        _float(body.get("heartbeat_s", 2.0), "heartbeat_s"),
        _float(body.get("lease_s", 6.0), "lease_s"),
        _each(body.get("features", []), "features", _str),
        _protocol(body.get("protocol", [PROTOCOL_MAJOR, 0])),
        _optional(body.get("resumed"), _bool, "resumed"),
    )


def _model_info(value: Any) -> ModelInfo:
    values = _dict(value, "model")
    return ModelInfo(
        _str(values.get("name"), "model.name", 4096),
        _str(values.get("fingerprint"), "model.fingerprint"),
        _int(values.get("vocab_size"), "model.vocab_size", 1),
        _int(values.get("max_model_len"), "model.max_model_len", 1),
        _each(values.get("eos_token_ids", []), "model.eos_token_ids", _u32),
        _int(values.get("block_size", 0), "model.block_size"),
        _int(values.get("num_kv_tokens", 0), "model.num_kv_tokens"),
        _str(values.get("dtype", ""), "model.dtype"),
        _each(values.get("adapters", []), "model.adapters", _str),
    )


def _encode_welcome(message: Welcome) -> tuple[int, Any, Frames]:
    body = message._asdict()
    body["model"] = None if message.model is None else message.model._asdict()
    if message.model is not None and not message.model.adapters:
        del body["model"]["adapters"]
    if message.resumed is None:
        del body["resumed"]
    return Kind.WELCOME, body, []


def _decode_accept(body: Any, raw: Sequence[bytes]) -> Accept:
    body = _map(body)
    return Accept(
        _id(body.get("id"), "id"),
        _u32(body.get("stream"), "stream"),
        _int(body.get("prompt_tokens", 0), "prompt_tokens"),
        _int(body.get("n", 1), "n", 1, MAX_LIST_ITEMS),
        _bool(body.get("attached", False), "attached"),
        _note(body),
    )


def _encode_accept(message: Accept) -> tuple[int, Any, Frames]:
    body = message._asdict()
    if not message.note:
        del body["note"]
    return Kind.ACCEPT, body, []


def _decode_reject(body: Any, raw: Sequence[bytes]) -> Reject:
    body = _map(body)
    return Reject(
        _optional(body.get("id"), _id, "id"),
        _optional(body.get("stream"), _u32, "stream"),
        _str(body.get("code"), "code"),
        _str(body.get("message", ""), "message", MAX_LIST_ITEMS),
        _optional(body.get("field"), _str, "field", MAX_LIST_ITEMS),
        _bool(body.get("retryable", False), "retryable"),
        _optional(body.get("retry_after_ms"), _int, "retry_after_ms"),
    )


def _decode_step(body: Any, raw: Sequence[bytes]) -> Step:
    body = _array(body, 6)
    seq, step, streams_data, counts_data, done_rows, extras = body[:6]
    if not isinstance(streams_data, bytes) or not isinstance(counts_data, bytes | None):
        raise WireError("streams and counts must be u32[] (bin)", field="streams")
    if not isinstance(done_rows, list) or not isinstance(extras, dict | None):
        raise WireError("done must be an array, extras a map or nil", field="done")
    streams = from_u32(streams_data, "streams")
    tokens = from_u32(raw[0] if raw else b"", "tokens")
    counts = None if counts_data is None else from_u32(counts_data, "counts")
    if (len(streams) if counts is None else sum(counts)) != len(tokens) or (counts and len(counts) != len(streams)):
        raise WireError("streams, counts and tokens do not add up", field="counts")
    text: list[tuple[int, str]] = []
    logprobs: list[tuple[int, list[Any]]] = []
    prompts: list[tuple[int, list[Any]]] = []
    if extras:
        text = [_stream_and(row, str, "text") for row in extras.get("text") or ()]
        logprobs = [_stream_and(row, list, "logprobs") for row in extras.get("logprobs") or ()]
        prompts = [_stream_and(row, list, "prompt_logprobs") for row in extras.get("prompt_logprobs") or ()]
        for _, positions in (*logprobs, *prompts):
            for position in positions:
                _check_logprobs(position)
    done = [_done(row) for row in done_rows] if done_rows else []
    return Step(_int(seq, "seq", 1), _int(step, "step"), streams, tokens, counts, done, text, logprobs, prompts)


def _stream_and(row: Any, kind: type[_T], field: str) -> tuple[int, _T]:
    if not isinstance(row, list) or len(row) < 2 or not isinstance(row[1], kind):
        raise WireError(f"extras.{field}: must be [[stream, {kind.__name__}], ...]", field=field)
    return _u32(row[0], field), row[1]


def _check_logprobs(row: Any) -> None:
    good = isinstance(row, list) and len(row) >= 4 and isinstance(row[2], list) and isinstance(row[3], list)
    if not good or len(row[2]) != len(row[3]):
        raise WireError("extras.logprobs: a position is [logprob, rank, [ids], [logprobs]]", field="logprobs")
    _float(row[0], "logprobs")
    _int(row[1], "logprobs")


def _done(row: Any) -> Done:
    if not isinstance(row, list) or len(row) < 9:
        raise WireError("a terminal row has 9 elements", field="done")
    return Done(
        _u32(row[0], "done"),
        _choice(row[1], "done", FINISH_REASONS),
        row[2],
        *(_int(value, "done") for value in row[3:6]),
        *(_float(value, "done") for value in row[6:9]),
    )


def _encode_step(message: Step) -> tuple[int, Any, Frames]:
    extras: dict[str, Any] = {}
    if message.text:
        extras["text"] = message.text
    if message.logprobs:
        extras["logprobs"] = message.logprobs
    if message.prompt_logprobs:
        extras["prompt_logprobs"] = message.prompt_logprobs
    counts = None if message.counts is None else to_u32(message.counts)
    body = [message.seq, message.step, to_u32(message.streams), counts, message.done, extras or None]
    return Kind.STEP, body, [to_u32(message.tokens)]


def step_frames(
    seq: int,
    step: int,
    streams: bytes,
    counts: bytes | None,
    done: Sequence[Done],
    extras: Mapping[str, Any] | None,
    tokens: bytes,
) -> Frames:
    """A STEP whose columns are u32[] already: what the engine sends at every step, without the arrays in between."""
    return [_HEADER[Kind.STEP], pack([seq, step, streams, counts, done, extras]), tokens]


def _decode_model_files(body: Any, raw: Sequence[bytes]) -> ModelFiles:
    body = _map(body)
    names = _each(body.get("files", []), "files", _str)
    if len(names) != len(raw):
        raise WireError(f"files: {len(names)} names but {len(raw)} raw frames", field="files")
    return ModelFiles(_str(body.get("fingerprint", ""), "fingerprint"), dict(zip(names, raw, strict=True)))


def _decode_pong(body: Any, raw: Sequence[bytes]) -> Pong:
    body = _array(body, 4)
    return Pong(
        _int(body[0], "nonce"),
        _float(body[1], "loop_age_ms"),
        _choice(body[2], "state", STATES),
        _bytes(body[3], "epoch", EPOCH_BYTES),
    )


def _decode_admin_reply(body: Any, raw: Sequence[bytes]) -> AdminReply:
    body = _map(body)
    return AdminReply(
        _str(body.get("op", ""), "op"),
        _int(body.get("nonce", 0), "nonce"),
        _bool(body.get("ok"), "ok"),
        body.get("result"),
        _optional(body.get("code"), _str, "code"),
        _optional(body.get("message"), _str, "message", MAX_LIST_ITEMS),
    )


def _whole(kind: int, *, without_none: bool = False) -> Callable[[Any], tuple[int, Any, Frames]]:
    """An encoder for messages whose body is the map of their fields."""

    def encode_map(message: Any) -> tuple[int, Any, Frames]:
        body = message._asdict()
        return kind, {k: v for k, v in body.items() if v is not None} if without_none else body, []

    return encode_map


def _encode_admin(message: Admin) -> tuple[int, Any, Frames]:
    return Kind.ADMIN, {**message.arguments, "op": message.op, "nonce": message.nonce}, []


_ENCODERS: Mapping[type, Callable[[Any], tuple[int, Any, Frames]]] = {
    Hello: _encode_hello,
    Submit: _encode_submit,
    Cancel: _whole(Kind.CANCEL),
    Attach: _whole(Kind.ATTACH),
    Credit: lambda message: (Kind.CREDIT, [message.seq], []),
    Model: _whole(Kind.MODEL, without_none=True),
    Ping: lambda message: (Kind.PING, [message.nonce], []),
    Admin: _encode_admin,
    Bye: lambda message: (Kind.BYE, {}, []),
    Welcome: _encode_welcome,
    Accept: _encode_accept,
    Reject: _whole(Kind.REJECT),
    Step: _encode_step,
    ModelFiles: lambda message: (
        Kind.MODEL_FILES,
        {"fingerprint": message.fingerprint, "files": list(message.files)},
        list(message.files.values()),
    ),
    Pong: lambda message: (Kind.PONG, list(message), []),
    Status: lambda message: (Kind.STATUS, message.values, []),
    AdminReply: _whole(Kind.ADMIN_REPLY, without_none=True),
    Goodbye: _whole(Kind.GOODBYE),
}

_DECODERS: Mapping[int, Callable[[Any, Sequence[bytes]], Message]] = {
    Kind.HELLO: _decode_hello,
    Kind.SUBMIT: _decode_submit,
    Kind.CANCEL: _decode_cancel,
    Kind.ATTACH: _decode_attach,
    Kind.CREDIT: lambda body, raw: Credit(_int(_array(body, 1)[0], "seq")),
    Kind.MODEL: _decode_model,
    Kind.PING: _decode_ping,
    Kind.ADMIN: _decode_admin,
    Kind.BYE: lambda body, raw: Bye(),
    Kind.WELCOME: _decode_welcome,
    Kind.ACCEPT: _decode_accept,
    Kind.REJECT: _decode_reject,
    Kind.STEP: _decode_step,
    Kind.MODEL_FILES: _decode_model_files,
    Kind.PONG: _decode_pong,
    Kind.STATUS: lambda body, raw: Status(_map(body)),
    Kind.ADMIN_REPLY: _decode_admin_reply,
    Kind.GOODBYE: lambda body, raw: Goodbye(_str(_map(body).get("reason", ""), "reason", MAX_LIST_ITEMS)),
}
