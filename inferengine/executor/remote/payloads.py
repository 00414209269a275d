"""Messages between engine and remote device: MessagePack in a BytesValue (executor.proto), never pickle."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from google.protobuf.wrappers_pb2 import BytesValue

from inferengine.core.executor import Capacity, StepPlan, StepResult, TokenLogprobs
from inferengine.core.sequence import RowFailure
from inferengine.executor.plan_codec import encode_plan, encoder
from inferengine.gguf.reader import SUFFIX, header_bytes

SERVICE = "inferengine.v1.Executor"
MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # enough for the log-probabilities of a long prompt
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]
COMPARED_FILES = ("config.json", "tokenizer.json")


class WireResult(NamedTuple):
    """StepResult with failures as names, which MessagePack can hold."""

    token_ids: list[int]
    logprobs: dict[int, list[TokenLogprobs]] | None = None
    failed_rows: dict[int, str] | None = None
    num_emitted: list[int] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    embeddings: dict[int, bytes] | None = None


_read_result = msgspec.msgpack.Decoder(WireResult).decode
_read_message = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def encode(*parts: Any) -> bytes:
    """Encode a message. `parts`: its kind, then its contents."""
    message: bytes = BytesValue(value=encoder.encode(parts)).SerializeToString()
    return message


def decode(message: bytes) -> tuple[str, Sequence[msgspec.Raw]]:
    """Return the kind of a message and its parts, which are still encoded. Raises ValueError."""
    kind, *parts = _read_message(BytesValue.FromString(message).value)
    return msgspec.msgpack.decode(kind, type=str), parts


def decode_whole(message: bytes) -> Sequence[msgspec.Raw]:
    """Return the parts of a message without a kind, still encoded. Raises ValueError."""
    return _read_message(BytesValue.FromString(message).value)


def plain(part: msgspec.Raw, type: Any = Any) -> Any:
    """Decode a part of a message."""
    return msgspec.msgpack.decode(part, type=type)


def encode_step(plan: StepPlan) -> bytes:
    """Encode a step's plan as a message."""
    return encode("step", msgspec.Raw(encode_plan(plan)))


def encode_result(result: StepResult) -> bytes:
    """Encode a step's result as a message."""
    failed = result.failed_rows
    names = None if failed is None else {row: failure.name for row, failure in failed.items()}
    return encode("result", (*result[:2], names, *result[3:]))


def read_result(part: msgspec.Raw) -> StepResult:
    """Decode the result of a step."""
    found = _read_result(part)
    names = found.failed_rows
    failed = None if names is None else {row: RowFailure[name] for row, name in names.items()}
    return StepResult(
        found.token_ids, found.logprobs, failed, found.num_emitted, found.prompt_logprobs, found.embeddings
    )


def read_capacity(value: Any) -> Capacity:
    """Convert a Capacity. A field that a device of another version lacks gets its default."""
    return msgspec.convert(value, Capacity)


def model_fingerprint(folder: Path) -> str:
    """Return the SHA-256, in hex, of the files that must be the same for engine and device."""
    digest = hashlib.sha256()
    if folder.suffix == SUFFIX:  # a GGUF file: its header, without the tensors
        return hashlib.sha256(header_bytes(folder)).hexdigest()
    for name in COMPARED_FILES:
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
