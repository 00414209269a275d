"""The window of a socket, without a socket."""

from __future__ import annotations

import pytest

from frontends.websocket.codec import JsonCodec
from frontends.websocket.send_channel import Channel
from inferengine.errors import InvalidRequest


async def nowhere(data: bytes) -> None:
    """Takes everything."""


def test_a_late_acknowledgement_takes_nothing_back() -> None:
    channel = Channel(nowhere, JsonCodec(), most_window=8, stall_limit_s=1.0)
    assert channel.open_window(2) == 2
    head = channel.delta_head("r1", 0)
    for cursor in (1, 2):
        channel.delta(head, cursor, "a")
    assert channel.is_braked
    channel.acknowledge(2)
    channel.acknowledge(0)
    assert not channel.is_braked
    with pytest.raises(InvalidRequest):
        channel.acknowledge(3)
