"""Messages to frames and back. Whatever the bytes are, decoding ends in a message or in a WireError.

Every length and range that the wire itself promises is checked here and below (`read`); what depends on the model
(token ids, context) is checked by the engine's link.

What an encoder and a decoder of one message's body are.

Bodies of what a client says to an engine, read and written.

Columns of unsigned 32-bit integers, little-endian: prompts, streams, counts and tokens.

Bodies of what an engine says to a client, read and written.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgpack

from inferengine.wire import fields as read
from inferengine.wire.fields import (
    MAX_I64,
    MAX_LIST_ITEMS,
    MAX_NAME_CHARACTERS,
    MAX_NOTE_BYTES,
    MAX_SALT_BYTES,
    MAX_U32,
    WireError,
)
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
    StopFound,
    Submit,
    Welcome,
)

Frames = list[bytes]
Encoder = Callable[[Any], tuple[int, Any, Frames]]  # a message to its kind, its body and its raw frames
Decoder = Callable[[Any, Sequence[bytes]], Message]  # body and raw frames to the message; raises WireError


def encode_fields(kind: int, *, without_none: bool = False) -> Encoder:
    """An encoder for messages whose body is the map of their fields."""
    """An encoder for messages whose body is the map of their fields."""

    def encode_map(message: Any) -> tuple[int, Any, Frames]:
        body = message._asdict()
        return kind, {k: v for k, v in body.items() if v is not None} if without_none else body, []

    return encode_map


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


_CLIENT_ENCODERS: Mapping[type, Encoder] = {
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
_CLIENT_DECODERS: Mapping[int, Decoder] = {
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


_SWAP = sys.byteorder == "big"


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


_T = TypeVar("_T")
TERMINAL_ROW = 9  # elements that every one has

_LATER_MODEL_KEYS = ("adapters", "embedding_size", "pooling")  # left out where there is nothing to say


def _decode_welcome(body: Any, raw: Sequence[bytes]) -> Welcome:
    body = read.map_body(body)
    progress = body.get("progress", ["", 0.0])
    if not isinstance(progress, list) or len(progress) < 2:
        raise WireError("progress: must be [phase, share]", field="progress")
    return Welcome(
        read.string(body.get("engine", ""), "engine"),
        read.binary(body.get("epoch"), "epoch", EPOCH_BYTES),
        read.choice(body.get("state"), "state", STATES),
        (read.string(progress[0], "progress"), read.number(progress[1], "progress")),
        read.optional(body.get("model"), _model_info),
        read.mapping(body.get("limits", {}), "limits"),
        read.integer(body.get("window", 64), "window", 1),
        read.number(body.get("heartbeat_s", 2.0), "heartbeat_s"),
        read.number(body.get("lease_s", 6.0), "lease_s"),
        read.each(body.get("features", []), "features", read.string),
        read.protocol(body.get("protocol", [PROTOCOL_MAJOR, 0])),
        read.optional(body.get("resumed"), read.boolean, "resumed"),
    )


def _model_info(value: Any) -> ModelInfo:
    values = read.mapping(value, "model")
    return ModelInfo(
        read.string(values.get("name"), "model.name", 4096),
        read.string(values.get("fingerprint"), "model.fingerprint"),
        read.integer(values.get("vocab_size"), "model.vocab_size", 1),
        read.integer(values.get("max_model_len"), "model.max_model_len", 1),
        read.each(values.get("eos_token_ids", []), "model.eos_token_ids", read.u32),
        read.integer(values.get("block_size", 0), "model.block_size"),
        read.integer(values.get("num_kv_tokens", 0), "model.num_kv_tokens"),
        read.string(values.get("dtype", ""), "model.dtype"),
        read.each(values.get("adapters", []), "model.adapters", read.string),
        read.integer(values.get("embedding_size", 0), "model.embedding_size"),
        read.string(values.get("pooling", ""), "model.pooling"),
    )


def _encode_welcome(message: Welcome) -> tuple[int, Any, Frames]:
    body = message._asdict()
    model = body["model"] = None if message.model is None else message.model._asdict()
    if model is not None:
        body["model"] = {key: value for key, value in model.items() if value or key not in _LATER_MODEL_KEYS}
    if message.resumed is None:
        del body["resumed"]
    return Kind.WELCOME, body, []


def _decode_accept(body: Any, raw: Sequence[bytes]) -> Accept:
    body = read.map_body(body)
    return Accept(
        read.request_id(body.get("id"), "id"),
        read.u32(body.get("stream"), "stream"),
        read.integer(body.get("prompt_tokens", 0), "prompt_tokens"),
        read.integer(body.get("n", 1), "n", 1, MAX_LIST_ITEMS),
        read.boolean(body.get("attached", False), "attached"),
        read.note(body),
        read.optional(body.get("seed"), read.integer, "seed", -(2**63), 2**64 - 1),
    )


def _encode_accept(message: Accept) -> tuple[int, Any, Frames]:
    body = message._asdict()
    if not message.note:
        del body["note"]
    if message.seed is None:
        del body["seed"]
    return Kind.ACCEPT, body, []


def _decode_reject(body: Any, raw: Sequence[bytes]) -> Reject:
    body = read.map_body(body)
    return Reject(
        read.optional(body.get("id"), read.request_id, "id"),
        read.optional(body.get("stream"), read.u32, "stream"),
        read.string(body.get("code"), "code"),
        read.string(body.get("message", ""), "message", MAX_LIST_ITEMS),
        read.optional(body.get("field"), read.string, "field", MAX_LIST_ITEMS),
        read.boolean(body.get("retryable", False), "retryable"),
        read.optional(body.get("retry_after_ms"), read.integer, "retry_after_ms"),
    )


def _decode_step(body: Any, raw: Sequence[bytes]) -> Step:
    body = read.array_body(body, 6)
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
    embeddings: list[tuple[int, bytes]] = []
    if extras:
        text = [_stream_and(row, str, "text") for row in extras.get("text") or ()]
        logprobs = [_stream_and(row, list, "logprobs") for row in extras.get("logprobs") or ()]
        prompts = [_stream_and(row, list, "prompt_logprobs") for row in extras.get("prompt_logprobs") or ()]
        embeddings = [_stream_and(row, bytes, "embedding") for row in extras.get("embedding") or ()]
        for _, vector in embeddings:
            if len(vector) % 4:
                raise WireError("extras.embedding: an f32[] has a length that is a multiple of 4", field="embedding")
        for _, positions in (*logprobs, *prompts):
            for position in positions:
                _check_logprobs(position)
    done = [_done(row) for row in done_rows] if done_rows else []
    return Step(
        read.integer(seq, "seq", 1),
        read.integer(step, "step"),
        streams,
        tokens,
        counts,
        done,
        text,
        logprobs,
        prompts,
        embeddings,
    )


def _stream_and(row: Any, kind: type[_T], field: str) -> tuple[int, _T]:
    if not isinstance(row, list) or len(row) < 2 or not isinstance(row[1], kind):
        raise WireError(f"extras.{field}: must be [[stream, {kind.__name__}], ...]", field=field)
    return read.u32(row[0], field), row[1]


def _check_logprobs(row: Any) -> None:
    good = isinstance(row, list) and len(row) >= 4 and isinstance(row[2], list) and isinstance(row[3], list)
    if not good or len(row[2]) != len(row[3]):
        raise WireError("extras.logprobs: a position is [logprob, rank, [ids], [logprobs]]", field="logprobs")
    read.number(row[0], "logprobs")
    read.integer(row[1], "logprobs")


def _done(row: Any) -> Done:
    if not isinstance(row, list) or len(row) < TERMINAL_ROW:
        raise WireError(f"a terminal row has {TERMINAL_ROW} elements", field="done")
    return Done(
        read.u32(row[0], "done"),
        read.choice(row[1], "done", FINISH_REASONS),
        row[2],
        *(read.integer(value, "done") for value in row[3:6]),
        *(read.number(value, "done") for value in row[6:9]),
        *(read.integer(value, "done") for value in row[9:11]),
    )


def _encode_step(message: Step) -> tuple[int, Any, Frames]:
    extras: dict[str, Any] = {}
    if message.text:
        extras["text"] = message.text
    if message.logprobs:
        extras["logprobs"] = message.logprobs
    if message.prompt_logprobs:
        extras["prompt_logprobs"] = message.prompt_logprobs
    if message.embeddings:
        extras["embedding"] = message.embeddings
    counts = None if message.counts is None else to_u32(message.counts)
    done = [row if row.accepted_tokens or row.rejected_tokens else row[:TERMINAL_ROW] for row in message.done]
    body = [message.seq, message.step, to_u32(message.streams), counts, done, extras or None]
    return Kind.STEP, body, [to_u32(message.tokens)]


def _decode_model_files(body: Any, raw: Sequence[bytes]) -> ModelFiles:
    body = read.map_body(body)
    names = read.each(body.get("files", []), "files", read.string)
    if len(names) != len(raw):
        raise WireError(f"files: {len(names)} names but {len(raw)} raw frames", field="files")
    return ModelFiles(read.string(body.get("fingerprint", ""), "fingerprint"), dict(zip(names, raw, strict=True)))


def _decode_pong(body: Any, raw: Sequence[bytes]) -> Pong:
    body = read.array_body(body, 4)
    return Pong(
        read.integer(body[0], "nonce"),
        read.number(body[1], "loop_age_ms"),
        read.choice(body[2], "state", STATES),
        read.binary(body[3], "epoch", EPOCH_BYTES),
    )


def _decode_admin_reply(body: Any, raw: Sequence[bytes]) -> AdminReply:
    body = read.map_body(body)
    return AdminReply(
        read.string(body.get("op", ""), "op"),
        read.integer(body.get("nonce", 0), "nonce"),
        read.boolean(body.get("ok"), "ok"),
        body.get("result"),
        read.optional(body.get("code"), read.string, "code"),
        read.optional(body.get("message"), read.string, "message", MAX_LIST_ITEMS),
    )


def _decode_goodbye(body: Any, raw: Sequence[bytes]) -> Goodbye:
    return Goodbye(read.string(read.map_body(body).get("reason", ""), "reason", MAX_LIST_ITEMS))


_ENGINE_ENCODERS: Mapping[type, Encoder] = {
    Welcome: _encode_welcome,
    Accept: _encode_accept,
    Reject: encode_fields(Kind.REJECT),
    Step: _encode_step,
    ModelFiles: lambda message: (
        Kind.MODEL_FILES,
        {"fingerprint": message.fingerprint, "files": list(message.files)},
        list(message.files.values()),
    ),
    Pong: lambda message: (Kind.PONG, list(message), []),
    Status: lambda message: (Kind.STATUS, message.values, []),
    AdminReply: encode_fields(Kind.ADMIN_REPLY, without_none=True),
    Goodbye: encode_fields(Kind.GOODBYE),
}
_ENGINE_DECODERS: Mapping[int, Decoder] = {
    Kind.WELCOME: _decode_welcome,
    Kind.ACCEPT: _decode_accept,
    Kind.REJECT: _decode_reject,
    Kind.STEP: _decode_step,
    Kind.MODEL_FILES: _decode_model_files,
    Kind.PONG: _decode_pong,
    Kind.STATUS: lambda body, raw: Status(read.map_body(body)),
    Kind.ADMIN_REPLY: _decode_admin_reply,
    Kind.GOODBYE: lambda body, raw: Goodbye(
        read.string(read.map_body(body).get("reason", ""), "reason", MAX_LIST_ITEMS)
    ),
}


__all__ = [
    "MAX_NAME_CHARACTERS",
    "MAX_NOTE_BYTES",
    "MAX_SALT_BYTES",
    "MAX_U32",
    "Frames",
    "StepWriter",
    "WireError",
    "decode",
    "encode",
    "from_u32",
    "header",
    "pack",
    "step_frames",
    "to_u32",
]

_HEADER = {kind: MAGIC + bytes((PROTOCOL_MAJOR, kind)) for name, kind in vars(Kind).items() if not name.startswith("_")}
_ENCODERS = {**_CLIENT_ENCODERS, **_ENGINE_ENCODERS}
_DECODERS = {**_CLIENT_DECODERS, **_ENGINE_DECODERS}


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
        raise WireError(_complaint(error)) from None
    return decoder(body, frames[2:])


def _complaint(error: Exception) -> str:
    """What of msgpack's errors somebody can act on."""
    if isinstance(error, UnicodeDecodeError):
        return "a string in the body is not UTF-8"
    if isinstance(error, msgpack.StackError):
        return "the body is nested too deeply"
    if "map key" in str(error):
        return "a map in the body has a key that is no string: write numbers as strings, or as [[number, value], …]"
    return f"the body is not one msgpack value: {type(error).__name__}"


class StepWriter:
    """Frames of STEPs that carry tokens and terminal rows alone, one after the other: a packer that is kept needs no
    new buffer for each. For one thread."""

    def __init__(self) -> None:
        self._pack: Callable[[Any], bytes] = msgpack.Packer().pack

    def frames(self, seq: int, step: int, streams: bytes, done: Sequence[Done], tokens: bytes) -> Frames:
        """As `step_frames`, each stream with one token."""
        return [_HEADER[Kind.STEP], self._pack((seq, step, streams, None, done, None)), tokens]


def step_frames(
    seq: int,
    step: int,
    streams: bytes,
    counts: bytes | None,
    done: Sequence[Done],
    extras: Mapping[str, Any] | None,
    tokens: bytes,
) -> Frames:
    """A STEP whose columns are u32[] already."""
    return [_HEADER[Kind.STEP], pack([seq, step, streams, counts, done, extras]), tokens]


def _refuse_ext(code: int, data: bytes) -> Any:
    raise WireError(f"msgpack ext type {code} is not part of this wire")
