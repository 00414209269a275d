"""Grammars over the wire: compiled before the request is accepted, obeyed to the last token."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from inferengine.engine.service import EngineService
from inferengine.engine.services import preparation as grammar_service
from inferengine.simulation.simulated_executor import SimulatedExecutor
from inferengine.wire.messages import Admin, AdminReply, Cancel, Reject
from tests.engine.builders import check_idle, make_card, run_service, small_capacity
from tests.engine.conftest import Connect

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
SCHEMA["additionalProperties"] = False


@pytest.fixture
def shutdown(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    """Yield an engine whose model has an end-of-text token."""
    card = make_card()
    card = type(card)(card.name, card.folder, card.files, card.fingerprint, (1,))
    with run_service(lambda: SimulatedExecutor(small_capacity()), card=card) as service:
        yield service


@pytest.mark.parametrize(
    ("grammar", "matches"),
    [
        (("regex", "[0-9]{3}-[a-f]{2}"), lambda text: re.fullmatch("[0-9]{3}-[a-f]{2}", text)),
        (("choice", json.dumps(["yes", "no", "perhaps"])), lambda text: text in ("yes", "no", "perhaps")),
        (("json_schema", json.dumps(SCHEMA), ""), lambda text: json.loads(text)["a"] in (1, 2)),
    ],
)
def test_the_output_of_each_choice_matches_the_grammar(
    shutdown: EngineService, connect: Connect, grammar: Any, matches: Any
) -> None:
    client = connect(shutdown)
    client.submit(1, max_tokens=60, reply="text", grammar=grammar, params={"n": 2, "ignore_eos": False})
    collected = client.collect({1, 2})
    for stream in (1, 2):
        assert collected.done[stream][0].reason == "stop"
        assert matches(collected.text[stream])
    check_idle(shutdown)


@pytest.mark.parametrize(
    ("grammar", "field"),
    [
        (("regex", "("), "grammar"),
        (("json_schema", "{"), "grammar"),
        (("poem", "x"), "grammar"),
        (("choice", "[]"), "grammar"),
        (("regex",), "grammar"),
        (("regex", "x\0"), "grammar"),
    ],
)
def test_a_grammar_that_makes_no_sense_is_refused_by_its_field(
    shutdown: EngineService, connect: Connect, grammar: Any, field: str
) -> None:
    client = connect(shutdown)
    client.submit(1, grammar=grammar)
    reject = client.expect(Reject)
    assert (reject.code, reject.field) == ("invalid_request", field)
    client.submit(1)
    assert len(client.collect({1}).tokens[1]) == 4


def test_a_large_vocabulary_is_ready_for_grammars_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    card = make_card()
    monkeypatch.setattr(grammar_service, "LARGE_VOCABULARY", 1)
    with run_service(card=type(card)(card.name, card.folder, card.files, card.fingerprint, (1,))) as service:
        compiler = service.io._grammars._compiler
        assert compiler is not None
        assert "_tokenizer" in vars(compiler._builder)
    with run_service(card=card) as service:  # without an end-of-text token there are no grammars, and all else is well
        assert service.io._grammars._compiler is None


def test_cancelling_while_it_is_compiled_is_answered_once(shutdown: EngineService, connect: Connect) -> None:
    client = connect(shutdown)
    client.submit(1, grammar=("regex", "(a|b)*" * 400))
    client.send(Cancel((1,)))
    collected = client.collect({1})
    assert len(collected.rejects.get(1, [])) + len(collected.done.get(1, [])) == 1
    check_idle(shutdown)


def test_flush_drops_cached_grammars(shutdown: EngineService, connect: Connect) -> None:
    client = connect(shutdown)
    client.submit(1, grammar=("regex", "[ab]+"))
    client.collect({1})
    compiler = shutdown.io._grammars._compiler
    assert compiler is not None
    assert len(compiler.cache) == 1
    client.send(Admin("flush", 1))
    client.expect(AdminReply)
    assert len(compiler.cache) == 0
    client.submit(2, grammar=("regex", "[ab]+"))
    assert client.collect({2}).tokens[2]


def test_text_and_grammar_are_prepared_together(shutdown: EngineService, connect: Connect) -> None:
    client = connect(shutdown)
    client.submit(1, text="the fox", max_tokens=20, reply="text", grammar=("regex", "ok"), params={"ignore_eos": False})
    assert client.collect({1}).text[1] == "ok"


def test_a_model_without_an_end_serves_no_grammars(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    client.submit(1, grammar=("regex", "ok"))
    assert client.expect(Reject).code == "unsupported"
