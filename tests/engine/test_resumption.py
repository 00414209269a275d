"""SUBMIT with the output so far: the engine goes on behind it, and refuses what the request could not have given."""

from __future__ import annotations

import re
import secrets
import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest

from inferengine.client.requests import LOST_CODES
from inferengine.engine.service import EngineService
from inferengine.engine.services.preparation import TOKENS_PER_LOOK, TextService, advance
from inferengine.errors import InferEngineError
from inferengine.simulation.simulated_executor import SimulatedExecutor
from inferengine.text import TextStream, Tokenizer
from inferengine.wire.messages import RESUME_OUTPUT, Accept, Attach, Bye, Cancel, Reject, Step, to_u32
from tests.engine.builders import RawClient, check_idle, make_card, run_held, run_service, small_capacity, wait_until
from tests.engine.conftest import Connect
from tests.engine.test_tokenization import run_script, script_of

EOS = 1


@pytest.fixture
def shutdown() -> Iterator[EngineService]:
    """Yield an engine whose model has an end-of-text token."""
    with run_service(card=replace(make_card(), eos_token_ids=(EOS,))) as service:
        yield service


def whole(client: RawClient, stream: int, count: int = 1, **fields: object) -> list[list[int]]:
    """Return the undisturbed output of each choice."""
    client.submit(stream, **fields)  # type: ignore[arg-type]
    collected = client.collect(set(range(stream, stream + count)))
    return [collected.tokens[stream + choice] for choice in range(count)]


def test_the_feature_is_named(engine: EngineService, connect: Connect) -> None:
    welcome = connect(engine).welcome
    assert welcome is not None
    assert RESUME_OUTPUT in welcome.features


@pytest.mark.parametrize("num_tokens", [0, 1, 19, 20])
def test_only_what_is_missing_is_sent(engine: EngineService, connect: Connect, num_tokens: int) -> None:
    client = connect(engine)
    (tokens,) = whole(client, 1, max_tokens=20, params={"seed": 5})
    client.submit(2, max_tokens=20, params={"seed": 5}, resume=(to_u32(tokens[:num_tokens]),))
    collected = client.collect({2})
    assert collected.tokens.get(2, []) == tokens[num_tokens:]
    (done,) = collected.done[2]
    assert (done.reason, done.prompt_tokens, done.completion_tokens) == ("length", 3, 20)
    check_idle(engine)


def test_choices_that_have_ended_are_neither_run_nor_told(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    outputs = whole(client, 10, 3, max_tokens=12, params={"seed": 5, "n": 3})
    client.submit(
        20, max_tokens=12, params={"seed": 5, "n": 3}, resume=(None, to_u32(outputs[1][:4]), to_u32(outputs[2][:9]))
    )
    collected = client.collect({21, 22})
    assert (collected.tokens[21], collected.tokens[22]) == (outputs[1][4:], outputs[2][9:])
    assert collected.accepts[20][0].n == 3
    assert 20 not in collected.done
    check_idle(engine)


def test_who_attaches_to_a_choice_that_had_ended_before_reads_the_others_on(connect: Connect) -> None:
    with run_service(step_s=0.01) as engine:
        client, other = connect(engine), connect(engine)
        params = {"seed": 5, "n": 2}
        outputs = whole(client, 10, 2, max_tokens=12, params=params)
        message = client.submit(20, max_tokens=12, params=params, resume=(None, to_u32(outputs[1][:4])))
        client.expect(Accept)
        other.send(Attach(message.id, 30, (len(outputs[0]) - 1, 2)))
        collected = other.collect({30, 31})
        assert collected.tokens == {31: outputs[1][2:]}
        assert collected.done[30][0].detail[0] not in LOST_CODES  # after which it would attach again, to all choices
        assert collected.done[31][0].reason == "length"


def test_accept_tells_the_seed_that_goes_on(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    client.submit(1, max_tokens=20)
    collected = client.collect({1})
    seed = collected.accepts[1][0].seed
    client.submit(2, max_tokens=20, params={"seed": seed}, resume=(to_u32(collected.tokens[1][:7]),))
    again = client.collect({2})
    assert again.tokens[2] == collected.tokens[1][7:]
    assert again.accepts[2][0].seed is None


@pytest.mark.parametrize("num_tokens", range(0, 12, 3))
def test_text_and_stop_strings_go_on(connect: Connect, num_tokens: int) -> None:
    text = "the quick brown fox jumps"
    script = script_of(text)
    with run_script(text) as engine:
        client = connect(engine)
        fields = {"reply": "both", "max_tokens": len(script), "params": {"stop": ["fox j"], "seed": 1}}
        client.submit(1, **fields)
        before = client.collect({1})
        given = before.tokens[1][:num_tokens]
        shown = TextStream(Tokenizer.from_files(make_card().files), stop=["fox j"]).push(given, False, False).text
        client.submit(2, resume=(to_u32(given),), **fields)
        after = client.collect({2})
        assert given + after.tokens[2] == before.tokens[1]
        assert shown + after.text.get(2, "") == before.text[1] == "the quick brown "
        assert (after.done[2][0].reason, after.done[2][0].detail) == ("stop", "fox j")
        assert after.done[2][0].completion_tokens == before.done[1][0].completion_tokens
        check_idle(engine)


def test_a_stop_string_that_was_complete_ends_it(connect: Connect) -> None:
    text = "the quick brown fox jumps"
    with run_script(text, step_s=0.01) as engine:
        client = connect(engine)
        fields = {"reply": "both", "max_tokens": len(script_of(text)), "params": {"stop": ["quick"], "seed": 1}}
        client.submit(1, **fields)
        before = client.collect({1})
        client.submit(2, resume=(to_u32(before.tokens[1]),), **fields)
        after = client.collect({2})
        assert (2 in after.tokens, 2 in after.text) == (False, False)
        assert (after.done[2][0].reason, after.done[2][0].detail) == ("stop", "quick")
        assert after.done[2][0].completion_tokens == len(before.tokens[1])
        check_idle(engine)


def test_a_grammar_goes_on(shutdown: EngineService, connect: Connect) -> None:
    pytest.importorskip("llguidance")
    client = connect(shutdown)
    fields = {"max_tokens": 60, "reply": "both", "grammar": ("regex", "[0-9]{12}-[a-f]{4}"), "params": {"seed": 3}}
    client.submit(1, **fields)
    before = client.collect({1})
    client.submit(2, resume=(to_u32(before.tokens[1][:5]),), **fields)
    after = client.collect({2})
    assert after.tokens[2] == before.tokens[1][5:]
    assert re.fullmatch("[0-9]{12}-[a-f]{4}", before.text[1])
    assert after.done[2][0].reason == before.done[1][0].reason == "stop"
    check_idle(shutdown)


def test_who_attaches_reads_what_was_given_before_too(connect: Connect) -> None:
    with run_service(step_s=0.02) as engine:
        client, other = connect(engine), connect(engine)
        (tokens,) = whole(client, 1, max_tokens=20, params={"seed": 5})
        id = secrets.token_bytes(16)
        client.submit(2, id=id, max_tokens=20, params={"seed": 5}, resume=(to_u32(tokens[:8]),))
        client.expect(Accept)
        other.send(Attach(id, 5))
        assert other.collect({5}).tokens[5] == tokens
        assert client.collect({2}).tokens[2] == tokens[8:]


def test_a_reader_with_more_than_the_log_hears_only_what_follows(connect: Connect) -> None:
    """Two clients read one request; the one that had fewer tokens is the first to come back with them."""
    with run_service(step_s=0.02) as engine:
        client, other = connect(engine), connect(engine)
        (tokens,) = whole(client, 1, max_tokens=20, params={"seed": 5})
        id = secrets.token_bytes(16)
        client.submit(2, id=id, max_tokens=20, params={"seed": 5}, resume=(to_u32(tokens[:3]),))
        client.expect(Accept)
        other.submit(7, id=id, max_tokens=20, params={"seed": 5}, resume=(to_u32(tokens[:15]),))
        assert other.collect({7}).tokens[7] == tokens[15:]
        assert client.collect({2}).tokens[2] == tokens[3:]
        check_idle(engine)


@pytest.mark.parametrize("reply", ["both", "text"])
@pytest.mark.parametrize("num_held", [5, 6])
def test_a_reader_gets_log_probabilities_of_this_engine_alone_or_is_refused(
    connect: Connect, reply: str, num_held: int
) -> None:
    """The engine before this one gave those of the first six tokens. Cursors of a reader of text are characters."""
    script = script_of("the quick brown fox jumps over the lazy dog")
    shown = TextStream(Tokenizer.from_files(make_card().files)).push(script[:num_held]).text
    with run_script("the quick brown fox jumps over the lazy dog", step_s=0.01) as engine:
        client, other = connect(engine), connect(engine)
        fields = {"max_tokens": len(script), "params": {"seed": 1, "logprobs": 0}, "reply": "both"}
        message = client.submit(1, resume=(to_u32(script[:6]),), **fields)
        client.expect(Accept)
        other.send(Attach(message.id, 5, (len(shown) if reply == "text" else num_held,), reply))
        collected = other.collect({5})
        if num_held < 6:
            assert collected.rejects[5][0].code == "engine_restarted"
            return
        rows = [row for step in collected.steps for _, rows in step.logprobs for row in rows]
        assert len(rows) == len(script) - 6
        assert all(row[1] for row in rows), "a rank is at least 1"


def test_a_reader_that_attached_before_the_request_was_accepted_is_refused_as_well(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = threading.Event()
    encode = TextService._encode
    monkeypatch.setattr(TextService, "_encode", lambda *arguments: attached.wait(60.0) and encode(*arguments))
    with run_script("the quick brown fox") as engine:
        client, other = connect(engine), connect(engine)
        resume = (to_u32(script_of("the quick")),)
        message = client.submit(1, text="the", params={"seed": 1, "logprobs": 0}, max_tokens=5, resume=resume)
        client.settle()
        other.send(Attach(message.id, 5, (0,)))
        other.settle()
        attached.set()
        assert other.expect(Reject).code == "engine_restarted"
        client.collect({1})


def test_an_id_that_runs_is_attached_to_and_never_run_twice(connect: Connect) -> None:
    with run_service(step_s=0.02) as engine:
        client = connect(engine)
        message = client.submit(1, max_tokens=20, params={"seed": 5}, detached=True)
        step = client.expect(Step)
        client.send(Bye())
        again = connect(engine)
        again.submit(9, id=message.id, max_tokens=20, params={"seed": 5}, resume=(step.tokens.tobytes(),))
        collected = again.collect({9})
        assert collected.accepts[9][0].attached
        assert len(step.tokens) + len(collected.tokens[9]) == 20
        assert engine.core is not None
        assert engine.core.scheduler.stats.num_submitted == 1


def test_a_request_that_ended_with_its_lost_reader_goes_on_when_he_is_back(connect: Connect) -> None:
    with run_service(step_s=0.02) as engine:
        client = connect(engine)
        message = client.submit(1, max_tokens=20, params={"seed": 5})
        step = client.expect(Step)
        client.send(Bye())
        wait_until(lambda: not engine.io.publisher.num_open)
        again = connect(engine)
        again.submit(9, id=message.id, max_tokens=20, params={"seed": 5}, resume=(step.tokens.tobytes(),))
        collected = again.collect({9})
        assert len(step.tokens) + len(collected.tokens[9]) == 20
        assert collected.done[9][0].reason == "length"
        check_idle(engine)


def test_a_cancelled_request_stays_cancelled(connect: Connect) -> None:
    with run_held() as (engine, device):
        client = connect(engine)
        message = client.submit(1, max_tokens=20, params={"seed": 5})
        device.let(1)
        tokens = client.expect(Step).tokens.tobytes()
        client.send(Cancel((1,)))
        client.settle()
        device.let()
        client.collect({1})
        client.submit(9, id=message.id, max_tokens=20, params={"seed": 5}, resume=(tokens,))
        assert client.collect({9}).done[9][0].detail[0] == "cancelled"


def test_a_full_queue_takes_what_was_accepted_before(connect: Connect) -> None:
    sections = {"scheduler": {"max_queued_requests": 2}}
    with run_service(lambda: SimulatedExecutor(small_capacity(max_num_seqs=2), step_s=0.02), **sections) as engine:
        client = connect(engine)
        for stream in range(1, 5):
            client.submit(stream, max_tokens=900)
            client.expect(Accept)
            if stream == 2:  # both are scheduled: neither waits beside the next two
                wait_until(lambda: engine.core is not None and len(engine.core.scheduler.state.running) == 2)
        client.submit(5, max_tokens=30)
        assert client.expect(Reject).code == "overloaded"
        client.submit(6, max_tokens=30, params={"seed": 1}, resume=(b"",))
        assert client.expect(Accept).stream == 6
        for stream in range(7, 30):
            client.submit(stream, max_tokens=30, params={"seed": 1}, resume=(b"",))
        assert client.expect(Reject).code == "overloaded"  # within bounds all the same


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"resume": ()}, "resume"),
        ({"resume": (b"", b"")}, "resume"),
        ({"resume": (None,)}, "resume"),
        ({"resume": (to_u32([302]),), "params": {"seed": 1}}, "resume[0]"),
        ({"resume": (to_u32([5] * 5),), "params": {"seed": 1}}, "resume[0]"),
        ({"resume": (to_u32([5]),)}, "params.seed"),
        ({"resume": (to_u32([5, 9, 6]),), "params": {"seed": 1, "stop_token_ids": [9]}}, "resume[0]"),
        ({"resume": (b"",), "reply": "embedding", "params": {}}, "resume"),
    ],
)
def test_what_the_request_could_not_have_given_is_refused(
    engine: EngineService, connect: Connect, fields: dict[str, object], field: str
) -> None:
    client = connect(engine)
    if fields.get("reply") == "embedding":
        message = client.submit(2).replace(id=secrets.token_bytes(16), stream=1, params={})
        client.send(message.replace(reply="embedding", resume=(b"",)))
    else:
        client.submit(1, **fields)  # type: ignore[arg-type]
    reject = client.collect({1}).rejects[1][0]
    assert (reject.code, reject.field) == ("invalid_request", field)


@pytest.mark.parametrize("prediction", [[302], [5] * 5000], ids=["outside the vocabulary", "too long"])
def test_a_prediction_that_could_be_no_output_is_refused(
    engine: EngineService, connect: Connect, prediction: list[int]
) -> None:
    client = connect(engine)
    client.submit(1, prediction=to_u32(prediction))
    reject = client.expect(Reject)
    assert (reject.code, reject.field) == ("invalid_request", "prediction")


def test_output_that_the_grammar_does_not_allow_is_refused(shutdown: EngineService, connect: Connect) -> None:
    pytest.importorskip("llguidance")
    client = connect(shutdown)
    wrong = to_u32(script_of("x"))
    client.submit(1, max_tokens=60, grammar=("regex", "[0-9]+"), params={"seed": 3}, resume=(wrong,))
    reject = client.expect(Reject)
    assert (reject.code, reject.field) == ("invalid_request", "resume[0]")
    check_idle(shutdown)


def test_a_request_that_two_stalls_met_is_refused(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    client.submit(1, params={"seed": 1}, resume=(b"",), stalls=2)
    reject = client.expect(Reject)
    assert (reject.code, reject.field, reject.retryable) == ("engine_stalled", "stalls", True)
    client.submit(2, params={"seed": 1}, resume=(b"",), stalls=1)
    assert client.collect({2}).done[2][0].reason == "length"


def test_output_longer_than_any_is_refused_before_its_tokens_are_looked_at(
    engine: EngineService, connect: Connect
) -> None:
    client = connect(engine)
    assert client.welcome is not None
    assert client.welcome.model is not None
    tokens = bytes(3) + b"\xff"  # outside every vocabulary
    client.submit(1, params={"seed": 5}, resume=(tokens * (client.welcome.model.max_model_len + 1),))
    reject = client.expect(Reject)
    assert (reject.field, "model's length" in reject.message) == ("resume[0]", True)


def test_a_request_whose_answer_was_lost_with_its_reader_begins_again(connect: Connect) -> None:
    """Nothing of it was heard: whoever says it once more must not be told that it was cancelled."""
    with run_service(step_s=0.02) as engine:
        client = connect(engine)
        message = client.submit(1, max_tokens=20, params={"seed": 5})
        client.expect(Step)
        client.send(Bye())
        wait_until(lambda: not engine.io.publisher.num_open)
        again = connect(engine)
        again.submit(9, id=message.id, max_tokens=20, params={"seed": 5})
        collected = again.collect({9})
        assert (len(collected.tokens[9]), collected.done[9][0].reason) == (20, "length")
        check_idle(engine)


@pytest.mark.parametrize("max_tenant_requests", [0, 1])
def test_it_begins_again_also_while_the_first_run_is_still_being_cancelled(
    connect: Connect, max_tenant_requests: int
) -> None:
    """A step that takes long leaves much time for a client to come back in."""
    with run_held(scheduler={"max_tenant_requests": max_tenant_requests}) as (engine, device):
        client = connect(engine)
        message = client.submit(1, max_tokens=20, params={"seed": 5}, tenant="team")
        wait_until(lambda: engine.core is not None and bool(engine.core.scheduler.running))
        client.send(Bye())
        wait_until(lambda: engine.io.publisher.submissions[message.id].abandoned)
        again = connect(engine)
        again.submit(9, id=message.id, max_tokens=20, params={"seed": 5}, tenant="team")
        again.settle()
        device.let()
        collected = again.collect({9})
        assert not collected.rejects
        assert (len(collected.tokens[9]), collected.done[9][0].reason) == (20, "length")
        check_idle(engine)


def test_a_grammar_that_nobody_waits_for_is_taken_no_further() -> None:
    """It would hold up those of others."""
    taken: list[int] = []

    class Any:
        def is_terminated(self) -> bool:
            return False

        def accept(self, token_id: int) -> bool:
            taken.append(token_id)
            return True

    output = array("I", range(10 * TOKENS_PER_LOOK))
    with pytest.raises(InferEngineError):
        advance([Any()], [output], lambda: len(taken) < 2 * TOKENS_PER_LOOK)  # type: ignore[list-item]
    assert len(taken) == 2 * TOKENS_PER_LOOK
