"""scripts/fuzz_wire.py in short: whatever a client sends, the engine goes on, and an honest client notices nothing."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from inferengine.engine.io import lost_connections
from tests.engine.builders import address_of, check_idle, run_service

FILE = Path(__file__).resolve().parents[2] / "scripts" / "fuzz_wire.py"
FRAMES = 600


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_wire", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_wire"] = module
    spec.loader.exec_module(module)
    return module


def test_mutated_messages_harm_neither_the_engine_nor_another_client(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_connections, "MIN_INTERVAL_S", 2.0)  # a minute otherwise, which the test would wait for
    with run_service(wire={"heartbeat_s": 0.2, "stall_limit_s": 2.0, "resume_ttl_s": 1.0}) as service:
        report = fuzz.run(
            address_of(service),
            seed=7,
            count=FRAMES,
            warm_up=FRAMES,
            pid=os.getpid(),
            bound_s=60.0,
            wait_s=60.0,
            memory_mb=256,  # of this process, with the clients in it
        )
        check_idle(service)
    assert not report.faults
    assert report.answers["Accept"] > 0
    assert sum(number for name, number in report.answers.items() if name.startswith("Reject")) > FRAMES // 10


def test_a_seed_stands_for_its_messages(fuzz: ModuleType) -> None:
    assert list(fuzz.messages(3, 200)) == list(fuzz.messages(3, 200))
    assert list(fuzz.messages(3, 200)) != list(fuzz.messages(4, 200))


def test_messages_are_of_every_kind_of_a_client_and_none_ends_what_others_run(fuzz: ModuleType) -> None:
    values = repr(fuzz.VALUES)
    sent = [message.frames for message in fuzz.messages(5, 1500)]
    assert repr(fuzz.VALUES) == values, "messages grow without end where they change what they are made of"
    assert {frames[0][3] for frames in sent if len(frames[0]) == 4} >= set(fuzz.BODIES)
    assert not any(word in frame for frames in sent for frame in frames for word in (b"drain", b"cancel_all"))
