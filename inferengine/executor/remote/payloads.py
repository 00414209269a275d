"""Messages between engine and remote device: MessagePack in a BytesValue (executor.proto), never pickle."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import BytesValue

from inferengine.core.executor import Capacity, StepPlan, StepResult, TokenLogprobs
from inferengine.core.sequence import RowFailure
from inferengine.executor.remote.plan_codec import encode_plan, encoder
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
MOST = 2**31 - 1  # largest size that a device may tell
NO_MESSAGE = (ValueError, TypeError, LookupError, msgspec.MsgspecError, DecodeError)  # raised by reading what is none
Size = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
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
    """Return the kind of a message and its parts, which are still encoded. Raises one of NO_MESSAGE."""
    kind, *parts = _read_message(BytesValue.FromString(message).value)
    return msgspec.msgpack.decode(kind, type=str), parts


def decode_whole(message: bytes) -> Sequence[msgspec.Raw]:
    """Return the parts of a message without a kind, still encoded. Raises one of NO_MESSAGE."""
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


def check_result(result: StepResult, plan: StepPlan, vocab_size: int) -> None:
    """Raise ValueError unless a result has tokens of the vocabulary for the rows of its plan, and names no others."""
    num_rows, token_ids = len(plan.slots), result.token_ids
    counts = result.num_emitted
    if counts is None:
        num_tokens = sum(plan.samples)
    else:
        num_tokens = sum(counts)
        drafts = plan.num_drafts or [0] * num_rows
        most = [1 + drafts[row] for row, samples in enumerate(plan.samples) if samples]
        if len(counts) != len(most) or any(not 1 <= count <= top for count, top in zip(counts, most, strict=True)):
            raise ValueError("numbers of tokens that its rows cannot have")
    if len(token_ids) != num_tokens:
        raise ValueError(f"{len(token_ids)} tokens for a step of {num_tokens}")
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise ValueError(f"a token outside the vocabulary of {vocab_size}")
    for by_row in (result.logprobs, result.failed_rows, result.prompt_logprobs, result.embeddings):
        if by_row and not (min(by_row) >= 0 and max(by_row) < num_rows):
            raise ValueError(f"a row that a step of {num_rows} does not have")


def read_capacity(value: Any) -> Capacity:
    """Convert a Capacity. A field that a device of another version lacks gets its default.

    Raises ValidationError or ValueError for sizes that no device has: with none of something, requests would wait for
    ever.
    """
    capacity = msgspec.convert(value, Capacity)
    sizes = [capacity.block_size, capacity.max_num_seqs, capacity.max_num_batched_tokens, capacity.max_model_len]
    sizes += [capacity.vocab_size, *(group.num_blocks for group in capacity.groups)]
    has_sizes = all(1 <= size <= MOST for size in sizes) and 0 <= capacity.num_snapshots <= MOST
    if not capacity.groups or not has_sizes:
        raise ValueError("a capacity that no device has")
    return capacity


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
