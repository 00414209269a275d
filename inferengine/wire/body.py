"""What an encoder and a decoder of one message's body are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from inferengine.wire.messages import Message

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
