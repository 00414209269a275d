"""Golden frames in both codecs: clients in other languages rely on these very bytes."""

from __future__ import annotations

import json

import msgpack
import pytest

from frontends.websocket.channel import JsonCodec, MsgpackCodec, choose_codec

DELTA = {"type": "delta", "id": "r1", "choice": 0, "cursor": 7, "text": 'a "b"\n\u2028🎉'}
GOLDEN = [
    (
        DELTA,
        '{"type":"delta","id":"r1","choice":0,"cursor":7,"text":"a \\"b\\"\\n\\u2028\\ud83c\\udf89"}',
        "85a474797065a564656c7461a26964a27231a663686f69636500a6637572736f7207a474657874"
        "ad612022 6222 0a e280a8 f09f8e89",
    ),
    (
        {"type": "accepted", "id": "r1", "request_id": "ab" * 16, "prompt_tokens": 5, "n": 1, "attached": False,
         "context_ids": []},
        '{"type":"accepted","id":"r1","request_id":"abababababababababababababababab","prompt_tokens":5,"n":1,'
        '"attached":false,"context_ids":[]}',
        "87a474797065a86163636570746564a26964a27231aa726571756573745f6964d92061626162616261626162616261626162616261"
        "62616261626162616261626162ad70726f6d70745f746f6b656e7305a16e01a86174746163686564c2ab636f6e746578745f69647390",
    ),
    (
        {"type": "pong", "nonce": None},
        '{"type":"pong","nonce":null}',
        "82a474797065a4706f6e67a56e6f6e6365c0",
    ),
    (
        {"type": "window", "window": 64},
        '{"type":"window","window":64}',
        "82a474797065a677696e646f77a677696e646f7740",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("frame", "text", "packed"), GOLDEN, ids=[frame["type"] for frame, _, _ in GOLDEN])
def test_frames_have_their_golden_bytes(frame, text, packed):
    assert JsonCodec().encode(frame) == text.encode()
    assert MsgpackCodec().encode(frame) == bytes.fromhex(packed)
    assert json.loads(text) == msgpack.unpackb(bytes.fromhex(packed)) == frame


@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()], ids=["json", "msgpack"])
def test_encode_delta_gives_the_bytes_of_encode(codec):
    assert codec.encode_delta(codec.delta_head("r1", 0), 7, DELTA["text"]) == codec.encode(DELTA)


def test_the_first_known_subprotocol_is_chosen():
    assert isinstance(choose_codec(["inferengine.v1.msgpack", "inferengine.v1.json"]), MsgpackCodec)
    assert isinstance(choose_codec(["graphql-ws", "inferengine.v1.json"]), JsonCodec)
    assert isinstance(choose_codec([]), JsonCodec)
    assert choose_codec(["graphql-ws"]) is None
