"""The embedded model behind the real wire: what runs beside a request, and what happens to it, changes no token."""

from __future__ import annotations

import gzip
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from inferengine.cli.profile import summarize
from inferengine.client import Client
from inferengine.engine.model_info import read_model_card
from inferengine.engine.process import build_executor
from inferengine.engine.service import EngineService
from inferengine.wire.messages import Cancel, Step
from tests.engine.builders import RawClient, address_of, check_idle, make_config, wait_until

PROMPTS = [
    "Once upon a time",
    "What is a KV cache?",
    "The little robot walked to the edge of the forest and looked at the river for a very long time before it",
    "2 + 2 =",
    "Name: Ada. City: Paris.",
    "A queue is",
]
LENGTHS = [24, 5, 17, 1, 30, 12]

# Enough to run everything at once; and so little that prompts are chunked and requests preempted. Without speculation,
# with which requests may be over before they are in each other's way.
SIZES: dict[str, dict[str, Any]] = {
    "roomy": {"cache": {"num_blocks": 256}},
    "tight": {
        "cache": {"num_blocks": 8, "block_size": 8},
        "engine": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        "scheduler": {"prefill_chunk": 7},
    },
    "overlapping": {"cache": {"num_blocks": 64}, "engine": {"overlap": "on"}},
}


@pytest.fixture(scope="module", params=SIZES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineService]:
    sections = {name: dict(values) for name, values in SIZES[request.param].items()}
    sections.setdefault("engine", {})["threads"] = 1
    sections["speculation"] = {"method": "none"}
    config = make_config(str(tmp_path_factory.mktemp("e")), model={"max_model_len": 64}, **sections)
    service = EngineService(config, read_model_card(config), lambda: build_executor(config))
    service.start()
    wait_until(lambda: service.lifecycle.state == "READY" or service.wait(0.0) is not None, 90.0)
    assert service.wait(0.0) is None
    yield service
    service.abort()
    service.wait(20.0)


@pytest.fixture
def raw(engine: EngineService) -> Iterator[RawClient]:
    raw = RawClient(address_of(engine))
    yield raw
    raw.close()


def submit(raw: RawClient, stream: int, index: int) -> None:
    params = {"temperature": 0.0, "ignore_eos": True}
    raw.submit(stream, text=PROMPTS[index], max_tokens=LENGTHS[index], params=params)


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """Return outputs of each prompt by itself, filled by the first test that needs them and shared by all sizes."""
    return {}


def expected(raw: RawClient, alone: dict[int, list[int]]) -> dict[int, list[int]]:
    for index in range(len(PROMPTS)):
        if index not in alone:
            submit(raw, 1000 + index, index)
            alone[index] = raw.collect({1000 + index}, 60.0).tokens[1000 + index]
    return alone


def test_together_they_give_what_each_gives_alone(
    engine: EngineService, raw: RawClient, alone: dict[int, list[int]]
) -> None:
    outputs = expected(raw, alone)
    for stream in range(1, 25):
        submit(raw, stream, stream % len(PROMPTS))
    collected = raw.collect(set(range(1, 25)), 100.0)
    for stream in range(1, 25):
        assert collected.tokens[stream] == outputs[stream % len(PROMPTS)]
    check_idle(engine)
    core = engine.core
    assert core is not None
    if core.scheduler.kv.pools[0].num_blocks == 8:
        assert core.scheduler.stats.num_preemptions > 0


def test_cancelling_others_changes_nothing(engine: EngineService, raw: RawClient, alone: dict[int, list[int]]) -> None:
    outputs = expected(raw, alone)
    generator = random.Random(5)
    for stream in range(1, 19):
        submit(raw, stream, stream % len(PROMPTS))
    step = raw.expect(Step, 30.0)
    raw.pending.insert(0, step)  # seen, and still to be collected
    victims = set(generator.sample(range(1, 19), 8))
    for stream in victims:
        raw.send(Cancel((stream,)))
    collected = raw.collect(set(range(1, 19)), 100.0)
    for stream in set(range(1, 19)) - victims:
        assert collected.tokens[stream] == outputs[stream % len(PROMPTS)]
    for stream in victims & collected.done.keys():
        assert collected.done[stream][0].reason in ("abort", "length")
        tokens = collected.tokens.get(stream, [])
        assert tokens == outputs[stream % len(PROMPTS)][: len(tokens)]
    check_idle(engine)


def test_steps_that_a_profile_records_give_the_same_tokens(
    engine: EngineService, raw: RawClient, alone: dict[int, list[int]]
) -> None:
    want = expected(raw, alone)
    answers: list[dict[str, Any]] = []
    operator = Client(address_of(engine))
    operator.connect()
    asker = threading.Thread(target=lambda: answers.append(operator.admin("profile", steps=10, wait_s=20)), daemon=True)
    asker.start()
    wait_until(lambda: is_recording(engine))
    for index in range(len(PROMPTS)):
        submit(raw, 3000 + index, index)
    got = raw.collect({3000 + index for index in range(len(PROMPTS))}, 60.0)
    asker.join(30.0)
    operator.close()
    assert {index: got.tokens[3000 + index] for index in range(len(PROMPTS))} == want
    summary = summarize(json.loads(gzip.decompress(answers[0]["trace"])))
    assert answers[0]["steps"] == 10
    assert len(summary.steps_us) >= 10, "with overlap the last results come in a turn that computes nothing"
    assert not summary.on_device
    assert any(row.name.startswith("aten::") for row in summary.rows)
    check_idle(engine)


def is_recording(engine: EngineService) -> bool:
    return engine.loaded.loop.observer is not None
