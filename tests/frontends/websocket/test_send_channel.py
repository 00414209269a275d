"""The window of a socket, without a socket."""

from __future__ import annotations

import pytest

from frontends.websocket.channel import JsonCodec, SendChannel
from inferengine.errors import InvalidRequest


async def nowhere(data: bytes) -> None:
    """Take everything."""


def test_a_late_acknowledgement_is_ignored() -> None:
    channel = SendChannel(nowhere, JsonCodec(), max_window=8, stall_limit_s=1.0)
    assert channel.open_window(2) == 2
    head = channel.delta_head("r1", 0)
    for cursor in (1, 2):
        channel.delta(head, cursor, "a")
    assert channel.is_full
    channel.acknowledge(2)
    channel.acknowledge(0)
    assert not channel.is_full
    with pytest.raises(InvalidRequest):
        channel.acknowledge(3)
