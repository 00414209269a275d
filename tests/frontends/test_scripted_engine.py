"""What the tests of front ends and pages rely on when they hold the scripted engine in the middle of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferengine.client import Client
from inferengine.sampling_params import SamplingParams
from tests.frontends.scripted_engine import Script, ScriptedEngine

MANY = 1000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ScriptedEngine]:
    """Yield an engine of which MANY tokens come for every choice, one a step."""
    with ScriptedEngine(f"ipc://{tmp_path}/engine.sock", lambda submit, choice: Script([5] * MANY)) as engine:
        yield engine


def num_tokens(engine: ScriptedEngine) -> int:
    """Return the number of tokens of the last request, once the engine's loop has run many times."""
    for _ in range(50):
        engine._in_its_thread(lambda: None)
    *_, job = engine._jobs.values()
    return len(job.outputs[0].token_ids)


def ask(client: Client) -> None:
    client.submit([1], SamplingParams(max_tokens=MANY), detached=True).accepted()


def test_an_engine_that_is_held_again_gives_only_what_is_released_since(engine: ScriptedEngine) -> None:
    engine.hold()
    with Client(engine.address) as client:
        ask(client)
        engine.release()
        engine.wait_for(lambda: engine.num_running == 0)
        engine.hold()
        engine.release(5)
        ask(client)
        assert num_tokens(engine) == 5


def test_a_step_that_gives_no_token_is_not_counted(engine: ScriptedEngine) -> None:
    """The engine's loop turns more often than a token is due."""
    engine.script = lambda submit, choice: Script([5] * MANY, pause_s=0.02)
    engine.hold()
    engine.release(5)
    with Client(engine.address) as client:
        ask(client)
        engine.wait_for(lambda: not engine._may_step)
        assert num_tokens(engine) == 5
