"""Bodies of what an engine says to a client, read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from inferengine.wire import read
from inferengine.wire.body import Decoder, Encoder, Frames, encode_fields
from inferengine.wire.messages import (
    EPOCH_BYTES,
    FINISH_REASONS,
    PROTOCOL_MAJOR,
    STATES,
    Accept,
    AdminReply,
    Done,
    Goodbye,
    Kind,
    ModelFiles,
    ModelInfo,
    Pong,
    Reject,
    Status,
    Step,
    Welcome,
)
from inferengine.wire.read import MAX_LIST_ITEMS, WireError
from inferengine.wire.u32 import from_u32, to_u32

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


ENCODERS: Mapping[type, Encoder] = {
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
DECODERS: Mapping[int, Decoder] = {
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
