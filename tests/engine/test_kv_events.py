"""KV events as cache-aware routers read them: vLLM's frames, numbers without a gap, replay from any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from inferengine.core.kv_cache import BlockRemoved, BlockStored
from inferengine.engine.kv_events import KVEventPublisher
from inferengine.engine.service import EngineService
from inferengine.wire import sockets
from inferengine.wire.messages import Admin, AdminReply
from tests.engine.builders import address_of, run_service
from tests.engine.conftest import Connect

END = (-1).to_bytes(8, "big", signed=True)
PROMPT = list(range(40))


@pytest.fixture
def publishing() -> Iterator[EngineService]:
    with run_service(cache={"events": True}) as service:
        yield service


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def replayed(context: zmq.Context[zmq.Socket[bytes]], engine: EngineService, start: int) -> list[tuple[int, Any]]:
    """Batches from `start` on, as a router asks for them."""
    with context.socket(zmq.DEALER) as asker:
        asker.connect(sockets.replay_address(address_of(engine)))
        asker.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[tuple[int, Any]] = []
        while asker.poll(5000):
            empty, number, payload = asker.recv_multipart()
            assert empty == b""
            if number == END:
                return batches
            batches.append((int.from_bytes(number, "big"), msgpack.unpackb(payload)))
    raise AssertionError("the replay never ended")


def test_stored_blocks_are_published_with_their_tokens_and_parents(
    publishing: EngineService, connect: Connect, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        subscriber.connect(sockets.default_status_address(address_of(publishing)))
        client = connect(publishing)
        stored: dict[int, dict[str, Any]] = {}
        stream = 0
        while len(stored) < 2:  # a subscriber that has just connected may miss the first
            client.send(Admin("flush", 1))
            client.expect(AdminReply)
            stream += 1
            client.submit(stream, prompt=PROMPT)
            client.collect({stream})
            while subscriber.poll(50):
                topic, number, payload = subscriber.recv_multipart()
                assert topic == b"kv@engine@simulated"
                assert len(number) == 8
                _time, events, rank = msgpack.unpackb(payload)
                assert rank == 0
                for event in events:
                    if event["type"] == "BlockStored":
                        stored[event["block_hashes"][0]] = event
    first, second = sorted(stored.values(), key=lambda event: event["parent_block_hash"] is not None)[:2]
    assert first == {
        "type": "BlockStored", "block_hashes": first["block_hashes"], "parent_block_hash": None,
        "token_ids": PROMPT[:16], "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None,
    }  # fmt: skip
    assert all(0 <= digest < 1 << 64 for digest in first["block_hashes"])
    assert (second["parent_block_hash"], second["token_ids"]) == (first["block_hashes"][0], PROMPT[16:32])


def test_what_was_missed_is_replayed_from_a_number(
    publishing: EngineService, connect: Connect, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    client = connect(publishing)
    for stream in (1, 2):
        client.submit(stream, prompt=[stream] * 40)
        client.collect({stream})
    client.send(Admin("flush", 1))
    client.expect(AdminReply)
    client.submit(3, prompt=[3] * 40)
    client.collect({3})
    batches = replayed(context, publishing, 0)
    assert [number for number, _ in batches] == list(range(len(batches)))
    assert "AllBlocksCleared" in {event["type"] for _, (_, events, _) in batches for event in events}
    assert replayed(context, publishing, len(batches) - 1) == batches[-1:]
    assert replayed(context, publishing, 10**6) == []


def test_without_the_switch_nothing_is_recorded(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    client.submit(1, prompt=PROMPT)
    client.collect({1})
    assert engine.core is not None
    assert engine.core.scheduler.kv.events is None


def test_blocks_of_an_adapter_carry_its_number_and_name() -> None:
    """Routers that work out hashes themselves take the name into them."""
    sent: list[Any] = []
    publisher = KVEventPublisher("engine", "model", sent.append, {"cats": 1, "dogs": 2})
    publisher.publish(
        [BlockStored([bytes(24) + b"\1" * 8], b"\2" * 32, [5, 6], 2, adapter=2), BlockRemoved([b"\3" * 32])]
    )
    _time, (stored, removed), _rank = msgpack.unpackb(sent[0][2])
    assert (stored["lora_id"], stored["lora_name"]) == (2, "dogs")
    assert (stored["block_hashes"], stored["parent_block_hash"]) == ([0x0101010101010101], 0x0202020202020202)
    assert removed == {"type": "BlockRemoved", "block_hashes": [0x0303030303030303], "medium": "GPU"}


def test_an_adapter_that_has_gone_meanwhile_is_still_told_apart_from_the_base_model() -> None:
    sent: list[Any] = []
    KVEventPublisher("engine", "model", sent.append, {}).publish(
        [BlockStored([b"\1" * 32], None, [5, 6], 2, adapter=2)]
    )
    assert msgpack.unpackb(sent[0][2])[1][0]["lora_name"] == "adapter 2"
