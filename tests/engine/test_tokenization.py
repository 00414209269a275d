"""Producers without a tokenizer: text in, text out, with the same code as the front ends."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from inferengine.core.executor import Capacity, StepPlan
from inferengine.engine.io.publisher import Publisher, TextLog
from inferengine.engine.service import EngineService
from inferengine.engine.services.preparation import TextService
from inferengine.simulation.simulated_executor import SimulatedExecutor
from inferengine.text import TextStream, Tokenizer
from inferengine.wire.messages import Accept, Attach, Bye, Cancel, Reject, Step, StopFound, to_u32
from tests.core.builders import make_capacity
from tests.core.memory_executor import MemoryExecutor
from tests.engine.builders import check_idle, make_card, run_service, small_capacity, wait_until
from tests.engine.conftest import Connect

ID = bytes(range(16))


class ScriptedExecutor(SimulatedExecutor):
    """Draws the tokens of a given text, whatever the prompt."""

    def __init__(self, capacity: Capacity, script: list[int], step_s: float = 0.0) -> None:
        super().__init__(capacity, step_s=step_s)
        self._script = script
        self._prompts: dict[int, int] = {}

    def execute(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        future = super().execute(plan)
        for item in plan.admitted:
            self._prompts[item.slot] = item.num_prompt
        tokens = [
            self._script[(start + count - self._prompts[slot]) % len(self._script)]
            for slot, start, count, draws in zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True)
            if draws
        ]
        future._result = future._result._replace(token_ids=tokens)
        return future


def script_of(text: str) -> list[int]:
    return Tokenizer.from_files(make_card().files).encode(text, add_special_tokens=False)


def run_script(text: str, step_s: float = 0.0):  # type: ignore[no-untyped-def]
    return run_service(lambda: ScriptedExecutor(small_capacity(), script_of(text), step_s))


def test_text_in_and_text_out(connect: Connect) -> None:
    text = "the quick brown fox"
    with run_script(text) as engine:
        client = connect(engine)
        client.submit(1, text="the lazy dog", reply="text", max_tokens=len(script_of(text)))
        collected = client.collect({1})
        assert collected.text[1] == text
        assert collected.tokens.get(1) is None
        assert collected.accepts[1][0].prompt_tokens == len(script_of("the lazy dog"))


def test_messages_go_through_the_models_template(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    client.submit(1, messages=[{"role": "user", "content": "the fox"}])
    expected = Tokenizer.from_files(make_card().files).encode("<user>the fox", add_special_tokens=False)
    assert client.collect({1}).accepts[1][0].prompt_tokens == len(expected)


def test_both_carries_tokens_and_text(connect: Connect) -> None:
    with run_script("the dog") as engine:
        client = connect(engine)
        client.submit(1, reply="both", max_tokens=len(script_of("the dog")))
        collected = client.collect({1})
        assert (collected.text[1], collected.tokens[1]) == ("the dog", script_of("the dog"))


@pytest.mark.parametrize("text", ["🎉 fête 🎉🎉", "你好世界 你好", "e\u0301 👩‍👩‍👧 ﷽ x"])
def test_emoji_and_cjk_arrive_whole_however_the_tokens_cut_them(connect: Connect, text: str) -> None:
    with run_script(text) as engine:
        client = connect(engine, window=64)
        client.submit(1, reply="text", max_tokens=len(script_of(text)))
        collected = client.collect({1})
        assert collected.text[1] == text
        assert all("\ufffd" not in piece for step in collected.steps for _, piece in step.text)


class TestStopStrings:
    def test_the_output_ends_before_the_stop_string_which_never_shows(self, connect: Connect) -> None:
        with run_script("one two STOP three four five six seven eight nine ten") as engine:
            client = connect(engine)
            client.submit(1, reply="text", max_tokens=60, params={"stop": ["STOP"]})
            collected = client.collect({1})
            (done,) = collected.done[1]
            assert collected.text[1] == "one two "
            assert (done.reason, done.detail) == ("stop", "STOP")
            assert done.completion_tokens == len(script_of("one two STOP"))
            check_idle(engine)

    def test_not_even_its_first_half_is_shown(self, connect: Connect) -> None:
        with run_script("ab STO STOP x y z") as engine:
            client = connect(engine)
            client.submit(1, reply="text", max_tokens=40, params={"stop": ["STOP"]})
            shown = ""
            for step in client.collect({1}).steps:
                for _, piece in step.text:
                    shown += piece
                    assert "ab STO STOP".startswith(shown)
                    assert not shown.endswith(("S", "ST")) or shown == "ab STO S"[: len(shown)]
            assert shown == "ab STO "

    def test_half_a_stop_string_at_the_end_is_given_out(self, connect: Connect) -> None:
        with run_script("so STO") as engine:
            client = connect(engine)
            client.submit(1, reply="text", max_tokens=len(script_of("so STO")), params={"stop": ["STOP"]})
            collected = client.collect({1})
            assert collected.text[1] == "so STO"
            assert collected.done[1][0].reason == "length"

    def test_a_stop_string_can_be_included_in_the_text(self, connect: Connect) -> None:
        with run_script("one two STOP three four") as engine:
            client = connect(engine)
            params = {"stop": ["STOP"], "include_stop_str_in_output": True}
            client.submit(1, reply="both", max_tokens=60, params=params)
            collected = client.collect({1})
            assert collected.text[1] == "one two STOP"
            assert collected.tokens[1] == script_of("one two STOP")

    def test_a_stop_string_frees_the_request_long_before_its_length(self, connect: Connect) -> None:
        with run_script("a STOP " + "b " * 300, step_s=0.05) as engine:
            client = connect(engine)
            client.submit(1, reply="text", max_tokens=600, params={"stop": ["STOP"]})
            client.collect({1})
            check_idle(engine)
            assert engine.core is not None
            assert engine.core.scheduler.stats.num_steps < 30


def count_pushes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of tokens of every call that detokenizes."""
    pushed: list[int] = []
    push = TextLog.push

    def counted(self: TextLog, token_ids: list[int], **flags: bool) -> bool:
        pushed.append(len(token_ids))
        return push(self, token_ids, **flags)

    monkeypatch.setattr(TextLog, "push", counted)
    return pushed


@pytest.mark.parametrize("is_live", [False, True])
def test_a_long_output_is_detokenized_a_few_tokens_at_a_time_for_who_attaches(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, is_live: bool
) -> None:
    text = "the quick brown fox jumps over 你好 the lazy dog " * 3
    script, most = script_of(text), 7
    pushed = count_pushes(monkeypatch)
    monkeypatch.setattr("inferengine.engine.io.intake.TOKENS_PER_TURN", 0)  # until all have asked
    with run_script(text, step_s=0.005 if is_live else 0.0) as engine:
        client, other = connect(engine), connect(engine)
        client.submit(1, id=ID, max_tokens=len(script))
        if is_live:
            num_tokens = 0
            while num_tokens < 30:
                num_tokens += len(client.expect(Step).tokens)
        else:
            client.collect({1})
        other.send(Attach(ID, 5, (4,), reply="text"))
        other.send(Attach(ID, 5, (4,), reply="text"))  # sent again, as after a reconnect
        other.send(Attach(ID, 6, (25,), reply="both"))
        other.send(Attach(bytes(16), 7, (0,)))  # messages are taken in order: its answer says that all are there
        assert other.expect(Reject).stream == 7
        monkeypatch.setattr("inferengine.engine.io.intake.TOKENS_PER_TURN", most)
        collected = other.collect({5, 6})
        assert collected.text[5] == text[4:]
        assert collected.tokens[6] == script[25:]
        assert collected.text[6] == text[len(shown(script[:25])) :]
        assert {stream: len(collected.done[stream]) for stream in (5, 6)} == {5: 1, 6: 1}
        assert max(pushed) <= most
        check_idle(engine)


@pytest.mark.parametrize("stays", [True, False], ids=["who waits stays", "who waits goes"])
def test_a_request_whose_reader_goes_runs_on_for_who_waits_for_its_text(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 6
    monkeypatch.setattr("inferengine.engine.io.intake.TOKENS_PER_TURN", 0)  # no text is made
    with run_script(text, step_s=0.005) as engine:
        client, other = connect(engine), connect(engine)
        client.submit(1, id=ID, max_tokens=len(script_of(text)))
        client.expect(Step)
        other.send(Attach(ID, 5, (0,), reply="text"))
        other.send(Attach(bytes(16), 7, (0,)))  # messages are taken in order: its answer says that the other is there
        assert other.expect(Reject).stream == 7
        client.send(Cancel(streams=(1,), leave=True))
        client.send(Attach(bytes(16), 8, (0,)))
        assert client.expect(Reject).stream == 8
        if stays:
            monkeypatch.setattr("inferengine.engine.io.intake.TOKENS_PER_TURN", 1000)
            collected = other.collect({5})
            assert (collected.text[5], collected.done[5][0].reason) == (text, "length")
        else:
            other.send(Cancel(streams=(5,), leave=True))
        check_idle(engine)
        assert engine.core is not None
        assert stays or engine.core.scheduler.stats.num_steps < len(script_of(text))


@pytest.mark.parametrize("stop", [(), ("lazy",), ("never",)], ids=["no stop", "stops", "does not stop"])
@pytest.mark.parametrize("reply", ["text", "both"])
def test_a_long_resumed_output_is_detokenized_a_few_tokens_at_a_time(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], reply: str
) -> None:
    text = "the quick brown fox jumps over 你好 the " * 3 + "lazy dog 你好 the quick brown fox"
    script, most, num_held = (
        script_of(text),
        7,
        len(script_of("the quick brown fox jumps over 你好 the " * 3 + "lazy dog")),
    )
    pushed = count_pushes(monkeypatch)
    monkeypatch.setattr("inferengine.engine.io.intake.TOKENS_PER_TURN", most)
    with run_script(text) as engine:
        client = connect(engine)
        params = {"seed": 1, "stop": list(stop)}
        client.submit(1, max_tokens=len(script), reply=reply, params=params, resume=(to_u32(script[:num_held]),))
        collected = client.collect({1})
        (done,) = collected.done[1]
        assert not collected.accepts[1][0].attached
        if stop == ("lazy",):
            assert (done.reason, done.detail, collected.text.get(1, "")) == ("stop", "lazy", "")
            assert done.completion_tokens < num_held
        else:
            assert (done.reason, collected.text[1]) == ("length", text[len(shown(script[:num_held])) :])
        assert max(pushed) <= most
        check_idle(engine)


def test_who_submits_and_leaves_while_a_resumed_output_is_detokenized_ends_the_request(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferengine.engine.io.intake.TOKENS_PER_TURN", 1)
    monkeypatch.setattr(Publisher, "detokenize", lambda *_: None)  # it takes for ever
    held = to_u32(script_of("the quick brown fox"))
    with run_script("the quick brown fox", step_s=0.01) as engine:
        for leave in (Cancel((1,), leave=True), Bye()):
            client = connect(engine)
            client.submit(1, max_tokens=900, reply="text", params={"seed": 1}, resume=(held,))
            client.send(leave)
            check_idle(engine)


def test_the_stop_strings_of_a_detached_request_end_it_though_its_reader_left_before_it_began(
    connect: Connect,
) -> None:
    with run_script("one two STOP three " * 4) as engine:
        client = connect(engine)
        with tokenizing_for_ever(engine):
            fields = {"reply": "text", "max_tokens": 60, "params": {"stop": ["STOP"]}}
            client.submit(1, id=ID, text="fox", detached=True, **fields)
            client.settle()
            client.send(Bye())
            wait_until(lambda: not engine.io.connections.by_routing_id)
        wait_until(lambda: engine.io.publisher.submissions[ID].ended)
        reader = connect(engine)
        reader.send(Attach(ID, 1, (), "text"))
        collected = reader.collect({1})
        assert (collected.text[1], collected.done[1][0].reason, collected.done[1][0].detail) == (
            "one two ",
            "stop",
            "STOP",
        )


def shown(token_ids: list[int]) -> str:
    return TextStream(Tokenizer.from_files(make_card().files)).push(token_ids).text


def test_who_waits_for_text_may_leave_or_cancel_and_keeps_the_stream_to_itself(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferengine.engine.io.intake.TOKENS_PER_TURN", 1)
    monkeypatch.setattr(Publisher, "detokenize", lambda *_: None)  # it takes for ever
    with run_script("the quick brown fox") as engine:
        client, other = connect(engine), connect(engine)
        client.submit(1, id=ID, max_tokens=8)
        client.collect({1})
        other.send(Attach(ID, 5, reply="text"))
        other.submit(5)
        assert other.expect(Reject).code == "conflict"
        other.send(Cancel((5,)))
        assert other.expect(Reject).code == "cancelled"
        other.send(Attach(ID, 5, reply="text"))
        other.send(Cancel((5,), leave=True))
        other.submit(5)
        assert other.collect({5}).tokens[5]
        other.send(Attach(ID, 6, reply="text"))
        other.settle()
    assert other.expect(Reject).stream == 6  # the engine ends: it is answered


def test_text_is_resumed_from_a_character(connect: Connect) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    with run_script(text) as engine:
        owner, reader = connect(engine), connect(engine)
        owner.submit(1, id=ID, reply="text", max_tokens=len(script_of(text)))
        owner.collect({1})
        reader.send(Attach(ID, 1, (10,), "text"))
        assert reader.collect({1}).text[1] == text[10:]


def test_a_request_of_tokens_can_be_read_as_text_later(connect: Connect) -> None:
    with run_script("the quick brown fox", step_s=0.01) as engine:
        owner, reader = connect(engine), connect(engine)
        owner.submit(1, id=ID, max_tokens=len(script_of("the quick brown fox")))
        owner.expect(Step)
        reader.send(Attach(ID, 1, (), "text"))
        assert reader.collect({1}).text[1] == "the quick brown fox"


def test_a_prompt_that_is_too_long_is_refused_before_it_is_tokenized(connect: Connect) -> None:
    with run_service(limits={"max_text_characters": 1000}) as engine:
        client = connect(engine)
        client.submit(1, text="x" * 1001)
        reject = client.expect(Reject)
        assert (reject.code, reject.field) == ("request_too_large", "prompt")


def test_a_long_text_does_not_hold_up_others(engine: EngineService, connect: Connect) -> None:
    words = random.Random(1).choices(["fox", "dog", "lazy", "über"], k=100_000)
    client, other = connect(engine), connect(engine)
    client.submit(1, text=" ".join(words))
    other.submit(1, max_tokens=4)
    assert len(other.collect({1}).tokens[1]) == 4
    assert client.expect(Reject, 60.0).code == "context_length_exceeded"


def test_cancelling_while_it_is_tokenized_is_answered_once(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    with tokenizing_for_ever(engine):
        client.submit(1, text="fox dog")
        client.send(Cancel((1,)))
        assert client.expect(Reject).code == "cancelled"
    assert client.receive(0.5) is None
    check_idle(engine)


@contextmanager
def tokenizing_for_ever(engine: EngineService, num_tokens: int = 1) -> Iterator[None]:
    """Let the tokenizing of any text go on until the end of the context. It has `num_tokens` then."""
    over = threading.Event()

    def encode(text: str | None, messages: object, most: int) -> list[int]:
        over.wait(30.0)
        return [1] * num_tokens

    engine.io._texts._encode = encode  # type: ignore[method-assign]
    try:
        yield
    finally:
        over.set()


def test_every_choice_of_a_text_that_is_being_tokenized_has_its_stream(engine: EngineService, connect: Connect) -> None:
    client = connect(engine)
    with tokenizing_for_ever(engine):
        client.submit(1, text="fox", params={"n": 3})
        client.submit(3)
        reject = client.expect(Reject)
        assert (reject.code, reject.field, reject.stream) == ("conflict", "stream", 3)
        client.submit(4)
        assert client.expect(Accept).stream == 4


def test_who_attaches_to_a_text_that_is_being_tokenized_needs_a_free_stream_too(connect: Connect) -> None:
    with run_service(step_s=0.05) as engine, tokenizing_for_ever(engine):
        owner, reader = connect(engine), connect(engine)
        reader.submit(5, max_tokens=900)
        reader.expect(Accept)
        waiting = owner.submit(1, text="fox")
        wait_until(lambda: engine.io.intake.has_unanswered)
        reader.send(Attach(waiting.id, 5))
        reject = reader.expect(Reject)
        assert (reject.code, reject.field, reject.stream) == ("conflict", "stream", 5)


class TestOneChoiceOfAPendingRequest:
    @pytest.mark.parametrize("choice", [0, 1, 2])
    def test_it_alone_is_cancelled(self, engine: EngineService, connect: Connect, choice: int) -> None:
        client = connect(engine)
        with tokenizing_for_ever(engine):
            client.submit(1, text="fox dog", params={"n": 3}, max_tokens=8)
            for _ in range(2):
                client.send(Cancel((1 + choice,)))
            client.settle()
        collected = client.collect({1, 2, 3})
        assert len(collected.accepts[1]) == 1
        assert collected.rejects == {}
        ends = {stream: [done.reason for done in rows] for stream, rows in collected.done.items()}
        assert ends == {stream: ["abort" if stream == 1 + choice else "length"] for stream in (1, 2, 3)}
        assert collected.done[1 + choice][0].detail[0] == "cancelled"
        assert 1 + choice not in collected.tokens, "it ran"
        assert all(len(collected.tokens[stream]) == 8 for stream in {1, 2, 3} - {1 + choice})
        assert client.receive(0.5) is None
        check_idle(engine)

    def test_the_first_that_runs_tells_the_log_probabilities_of_the_prompt(self, connect: Connect) -> None:
        with run_service(lambda: MemoryExecutor(make_capacity(64))) as engine:
            client = connect(engine)
            with tokenizing_for_ever(engine, num_tokens=9):
                client.submit(1, text="fox dog", params={"n": 3, "prompt_logprobs": 0}, max_tokens=8)
                client.send(Cancel((1,)))
                client.settle()
            collected = client.collect({1, 2, 3})
            assert [done.reason for stream in (1, 2, 3) for done in collected.done[stream]] == [
                "abort",
                *["length"] * 2,
            ]
            told = [(stream, len(rows)) for step in collected.steps for stream, rows in step.prompt_logprobs]
            assert told == [(2, 8)]

    def test_each_of_the_others_has_a_grammar_of_its_own(self, connect: Connect) -> None:
        card = make_card()
        card = type(card)(card.name, card.folder, card.files, card.fingerprint, (1,))
        with run_service(lambda: SimulatedExecutor(small_capacity()), card=card) as engine:
            client = connect(engine)
            for choice in range(3):
                with tokenizing_for_ever(engine):
                    fields = {"grammar": ("regex", "(fox|dog){3}"), "params": {"n": 3, "ignore_eos": False}}
                    client.submit(1, text="fox", reply="text", max_tokens=40, **fields)
                    client.send(Cancel((1 + choice,)))
                    client.settle()
                collected = client.collect({1, 2, 3})
                for stream in {1, 2, 3} - {1 + choice}:
                    assert re.fullmatch("(fox|dog){3}", collected.text[stream])
                assert [row.reason for row in collected.done[1 + choice]] == ["abort"]
            check_idle(engine)

    def test_the_last_one_is_answered_for_all(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        with tokenizing_for_ever(engine):
            client.submit(1, text="fox dog", params={"n": 3})
            for stream in (2, 1, 3):
                client.send(Cancel((stream,)))
            reject = client.expect(Reject)
            assert (reject.code, reject.stream) == ("cancelled", 1)
        assert client.receive(0.5) is None
        check_idle(engine)

    def test_a_refusal_answers_it_with_the_others(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        with tokenizing_for_ever(engine):
            client.submit(1, text="fox dog", params={"n": 2}, deadline_ms=300)
            client.send(Cancel((1,)))
            assert client.expect(Reject).code == "deadline_exceeded"
        assert client.receive(0.5) is None
        check_idle(engine)

    def test_who_attached_cancels_by_its_own_streams(self, engine: EngineService, connect: Connect) -> None:
        client, other = connect(engine), connect(engine)
        with tokenizing_for_ever(engine):
            client.submit(1, id=ID, text="fox dog", params={"n": 2}, max_tokens=8)
            client.settle()
            other.send(Attach(ID, 2))
            other.send(Cancel((3,)))
            other.settle()
        for reader, streams in ((client, (1, 2)), (other, (2, 3))):
            done = reader.collect(set(streams)).done
            assert [[row.reason for row in done[stream]] for stream in streams] == [["length"], ["abort"]]

    def test_a_stop_string_that_its_reader_found_is_the_reason(self, engine: EngineService, connect: Connect) -> None:
        client, held = connect(engine), to_u32(script_of("quick brown fox"))
        with tokenizing_for_ever(engine):
            params = {"n": 3, "seed": 1}
            client.submit(1, text="fox dog", params=params, max_tokens=40, resume=(None, held, held))
            client.send(Cancel((2,), stopped=(StopFound(2, 2, "brown"),)))
            client.settle()
        collected = client.collect({2, 3})
        (stopped,), (other,) = collected.done[2], collected.done[3]
        assert (stopped.reason, stopped.detail, stopped.completion_tokens) == ("stop", "brown", 2)
        assert (other.reason, other.completion_tokens) == ("length", 40)

    def test_a_request_whose_first_choice_has_ended_is_cancelled_by_the_others(
        self, engine: EngineService, connect: Connect
    ) -> None:
        client = connect(engine)
        with tokenizing_for_ever(engine):
            for stream, leave in ((1, False), (4, True)):
                client.submit(stream, text="fox", params={"n": 2, "seed": 1}, resume=(None, b""))
                client.send(Cancel((stream + 1,), leave=leave))
            assert client.expect(Reject).stream == 1
            check_idle(engine)
        assert client.receive(0.5) is None

    def test_who_leaves_it_hears_of_the_others(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        for choice in (0, 1):
            with tokenizing_for_ever(engine):
                client.submit(1, text="fox dog", params={"n": 2}, max_tokens=8)
                client.send(Cancel((1 + choice,), leave=True))
                client.settle()
            collected = client.collect({2 - choice})
            assert collected.ended == {2 - choice}
            assert len(collected.tokens[2 - choice]) == 8
        check_idle(engine)

    @pytest.mark.parametrize("leave", [False, True])
    def test_who_waits_for_text_is_told_of_the_others(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch, leave: bool
    ) -> None:
        text = "the quick brown fox jumps over the lazy dog"
        monkeypatch.setattr("inferengine.engine.io.intake.TOKENS_PER_TURN", 0)  # no text is made
        with run_script(text, step_s=0.005) as engine:
            client, other = connect(engine), connect(engine)
            client.submit(1, id=ID, max_tokens=len(script_of(text)), params={"n": 2})
            client.expect(Step)
            other.send(Attach(ID, 5, reply="text"))
            other.send(Cancel((5,), leave=leave))
            other.settle()
            monkeypatch.setattr("inferengine.engine.io.intake.TOKENS_PER_TURN", 1000)
            collected = other.collect({6} if leave else {5, 6})
            assert (collected.text[6], collected.done[6][0].reason) == (text, "length")
            assert collected.rejects == {}
            assert [row.reason for row in collected.done.get(5, [])] == ([] if leave else ["abort"])
            assert client.collect({1, 2}).done[1][0].reason == ("length" if leave else "abort")
            check_idle(engine)


def test_a_model_without_a_tokenizer_serves_token_ids_only(connect: Connect) -> None:
    card = make_card()
    bare = type(card)(card.name, card.folder, {}, card.fingerprint, ())
    with run_service(card=bare) as engine:
        client = connect(engine)
        client.submit(1, text="x")
        assert client.expect(Reject).code == "unsupported"
        client.submit(2)
        assert len(client.collect({2}).tokens[2]) == 4


class TestTokenizingThatHangs:
    """A template without end, a tokenizer's bug: the request is answered, whatever its thread does."""

    def test_a_request_is_refused_at_its_deadline(self, engine: EngineService, connect: Connect, stuck_text) -> None:  # type: ignore[no-untyped-def]
        client = connect(engine)
        client.submit(1, text="the quick brown", deadline_ms=300)
        assert client.expect(Reject).code == "deadline_exceeded"

    def test_a_request_without_a_deadline_is_refused_after_a_while(
        self, engine: EngineService, connect: Connect, stuck_text, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # type: ignore[no-untyped-def]
        monkeypatch.setattr("inferengine.engine.io.intake.TEXT_TIMEOUT_S", 0.3)
        client = connect(engine)
        client.submit(1, text="the quick brown")
        reject = client.expect(Reject)
        assert reject.code == "overloaded"
        assert reject.retry_after_ms
        client.submit(2)
        assert len(client.collect({2}).tokens[2]) == 4, "the others go on"


@pytest.fixture
def stuck_text(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    released = threading.Event()
    monkeypatch.setattr(TextService, "_encode", lambda *arguments: released.wait(60.0) and [1])
    yield
    released.set()


def test_a_text_that_cannot_fit_is_refused_untokenized(
    engine: EngineService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        raise AssertionError(f"{len(text)} characters are tokenized")

    monkeypatch.setattr(Tokenizer, "_encode", encode)
    client = connect(engine)
    client.submit(1, text="x" * 3_000_000)
    reject = client.expect(Reject)
    assert (reject.code, reject.field) == ("context_length_exceeded", "prompt")
