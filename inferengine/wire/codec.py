"""Messages to frames and back. Whatever the bytes are, decoding ends in a message or in a WireError.

Every length and range that the wire itself promises is checked here and below (`read`); what depends on the model
(token ids, context) is checked by the engine's link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgpack

from inferengine.wire import client_messages, engine_messages
from inferengine.wire.body import Frames
from inferengine.wire.messages import MAGIC, PROTOCOL_MAJOR, Done, Kind, Message
from inferengine.wire.read import MAX_NAME_CHARACTERS, MAX_NOTE_BYTES, MAX_SALT_BYTES, MAX_U32, WireError
from inferengine.wire.u32 import from_u32, to_u32

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
_ENCODERS = {**client_messages.ENCODERS, **engine_messages.ENCODERS}
_DECODERS = {**client_messages.DECODERS, **engine_messages.DECODERS}


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
