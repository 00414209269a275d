"""KV events as cache-aware routers read them: vLLM's frames, numbers without a gap, replay from any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import msgspec
import pytest
import zmq

from inferengine.core.kv_cache import BlockRemoved, BlockStored
from inferengine.engine.kv_events import KVEventPublisher
from inferengine.engine.service import EngineService
from inferengine.errors import ConfigError
from inferengine.wire import sockets
from inferengine.wire.messages import Admin, AdminReply
from tests.engine.builders import address_of, run_service
from tests.engine.conftest import Connect
from tests.ports import free_port

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


def replayed(
    context: zmq.Context[zmq.Socket[bytes]],
    engine: EngineService,
    start: int,
    topic: bytes = b"kv@engine@simulated",
    *,
    of: str = "",
) -> list[tuple[int, Any]]:
    """Return batches from `start` on, as a router asks for them. `of`: one of several addresses of the wire."""
    events = engine.config.cache.events_address
    address = sockets.replay_address_of_events(events) if events else sockets.replay_address(of or address_of(engine))
    with context.socket(zmq.DEALER) as asker:
        asker.linger = 0
        asker.connect(address)
        asker.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[tuple[int, Any]] = []
        while asker.poll(5000):
            empty, sent_topic, number, payload = asker.recv_multipart()
            assert empty == b""
            if payload == b"":
                assert (sent_topic, number) == (b"", END)
                return batches
            assert sent_topic == topic
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


def test_it_is_replayed_beside_a_second_address_too(connect: Connect, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """STATUS and events are published there too: who misses some of them asks at the next port."""
    over_tcp = f"tcp://127.0.0.1:{free_port()}"
    with run_service(cache={"events": True}, wire={"tcp": over_tcp}) as service:
        client = connect(service)
        client.submit(1, prompt=PROMPT)
        client.collect({1})
        batches = replayed(context, service, 0, of=over_tcp)
        assert batches
        assert replayed(context, service, 0) == batches


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


# -- what routers read -------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """vLLM 0.32's KVCacheEvent."""


class Stored(Event, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    """vLLM 0.32's KVEventBatch."""

    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


def read_as_llm_d(topic: str, payload: bytes) -> tuple[str, str, list[list[Any]]]:
    """Return pod, model and events as llm-d's router takes them (llm-d-router pkg/kvevents/engineadapter): the topic
    has three parts, a map becomes the list of its fields in order, and each field must have the type that it
    expects."""
    _, pod, model = topic.split("@")
    orders = {
        "BlockStored": [
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
        ],
        "BlockRemoved": ["block_hashes", "medium"],
        "AllBlocksCleared": [],
    }
    _ts, events, _rank = msgpack.unpackb(payload)
    rows = [[event["type"], *(event.get(name) for name in orders[event["type"]])] for event in events]
    for tag, *fields in rows:
        if tag != "AllBlocksCleared":
            assert all(0 <= digest < 1 << 64 for digest in fields[0])
        if tag == "BlockStored":
            assert all(0 <= token < 1 << 32 for token in fields[2])
            assert isinstance(fields[3], int)
    return pod, model, rows


def test_routers_read_events_at_an_address_of_their_own_without_keys(
    connect: Connect, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    port, topic = free_port(), b"kv@10.0.0.7:8000@llama"
    sections = {"events": True, "events_address": f"tcp://127.0.0.1:{port}", "events_topic": topic.decode()}
    with run_service(cache=sections) as service, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        subscriber.connect(f"tcp://127.0.0.1:{port}")
        client = connect(service)
        frames: list[bytes] = []
        stream = 0
        while not frames:  # a subscriber that has just connected may miss the first
            stream += 1
            client.send(Admin("flush", 1))
            client.expect(AdminReply)
            client.submit(stream, prompt=PROMPT)
            client.collect({stream})
            while subscriber.poll(50):
                frames = subscriber.recv_multipart()
        assert frames[0] == topic
        batches = replayed(context, service, 0, topic)
        assert len(batches) > int.from_bytes(frames[1], "big")
        kinds: set[str] = set()
        for number, content in batches:
            payload = msgpack.packb(content)
            batch = msgspec.msgpack.decode(payload, type=Batch)
            assert batch.data_parallel_rank == 0, number
            pod, model, rows = read_as_llm_d(topic.decode(), payload)
            assert (pod, model) == ("10.0.0.7:8000", "llama")
            kinds |= {row[0] for row in rows}
        assert {"BlockStored", "AllBlocksCleared"} <= kinds


@pytest.mark.parametrize("address", ["ipc:///run/events", "tcp://127.0.0.1", "tcp://127.0.0.1:65535", "127.0.0.1:5557"])
def test_an_address_without_host_or_room_for_the_replay_is_refused(address: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"cache\.events_address"),
        run_service(cache={"events": True, "events_address": address}),
    ):
        pass


def test_publishing_where_others_can_read_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with run_service(cache={"events": True, "events_address": f"tcp://0.0.0.0:{free_port()}"}):
        assert "can read the tokens of all prompts" in caplog.text
