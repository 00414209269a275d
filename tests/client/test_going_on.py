"""What a Session does with open requests when its engine is lost: frames and time in, frames and output out."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from inferengine.client.session import PATIENCE_S, Phase, Session
from inferengine.client.streams import Call, Finish
from inferengine.sampling_params import SamplingParams
from inferengine.wire import codec
from inferengine.wire.messages import (
    RESUME_OUTPUT,
    Accept,
    Attach,
    Cancel,
    Done,
    Goodbye,
    Hello,
    ModelInfo,
    Reject,
    Step,
    StopFound,
    Submit,
    Welcome,
)

INFO = ModelInfo("tiny", "ab" * 32, 1000, 4096, (2,), 16, 65_536, "float32", ("pirate",))
WAIT_S = 30.0
SEED = 77


class Engine:
    """The other end of a session, one epoch after the other."""

    def __init__(self, *, state: str = "READY", features: tuple[str, ...] = (RESUME_OUTPUT,)) -> None:
        self.session = Session(resume_wait_s=WAIT_S, now=0.0)
        self.now = 0.0
        self.epoch, self.seq = 0, 0
        self.features, self.info = features, INFO
        self.session.connected(0.0)
        self.welcome(state)

    def welcome(self, state: str = "READY", *, resumed: bool | None = None) -> None:
        epoch = bytes([self.epoch]) * 8
        self.tell(Welcome("e", epoch, state, model=self.info, features=self.features, resumed=resumed))

    def tell(self, message: Any) -> None:
        self.session.receive(codec.encode(message), self.now)

    def heard(self, kind: type) -> list[Any]:
        """What the session has said of this kind since the last time."""
        messages = [codec.decode(frames) for frames in self.session.outgoing]
        self.session.outgoing.clear()
        return [message for message in messages if isinstance(message, kind)]

    def submit(self, *, accept: bool = True, **fields: Any) -> Call:
        options = {name: fields.pop(name) for name in OPTIONS & fields.keys()}
        call = self.session.submit([1, 2, 3], SamplingParams(max_tokens=50, **fields), **options)
        (message,) = self.heard(Submit)
        if accept:
            seed = None if "seed" in fields else SEED
            self.tell(Accept(call.id, message.stream, 3, fields.get("n", 1), seed=seed))
        return call

    def step(self, streams: list[int], tokens: list[int], **extras: Any) -> None:
        self.seq += 1
        self.tell(Step(self.seq, self.seq, array("I", streams), array("I", tokens), **extras))

    def end(self, stream: int, reason: str, detail: Any) -> None:
        self.step([], [], done=[Done(stream, reason, detail)])

    def at(self, now: float) -> None:
        """Time passes, for a client that runs all the while."""
        self.session.tick(self.now)
        while self.now < now:
            self.now = min(now, self.now + 0.25)
            self.session.tick(self.now)

    def dies(self) -> None:
        self.session.disconnected(self.now)

    def comes_back(self, state: str = "READY") -> None:
        self.epoch, self.seq = self.epoch + 1, 0
        self.session.connected(self.now)
        self.session.outgoing.clear()
        self.welcome(state, resumed=False)


OPTIONS = {"resubmit", "reply", "deadline_s", "detached", "adapter"}


def finish_of(call: Call, choice: int = 0) -> Finish | None:
    collector = call.collectors[choice]
    return collector.take().finish if collector.finished else None


def code_of(call: Call) -> str:
    finish = finish_of(call)
    assert finish is not None
    return str(finish.detail[0])


def stream_of(call: Call, choice: int = 0) -> int:
    return call.collectors[choice].name


def test_a_restarted_engine_is_told_what_came_and_the_seed_it_was_drawn_with() -> None:
    engine = Engine()
    call = engine.submit()
    engine.step([stream_of(call)], [11])
    assert call.collectors[0].take().token_ids == [11]
    engine.step([stream_of(call)], [12])
    engine.dies()
    engine.comes_back()
    (message,) = engine.heard(Submit)
    assert (message.id, message.resume, message.params["seed"]) == (call.id, (array("I", [11, 12]).tobytes(),), SEED)
    engine.tell(Accept(call.id, message.stream, 3))
    engine.step([message.stream], [13])
    assert call.collectors[0].take().token_ids == [12, 13]


def test_nothing_is_sent_before_the_engine_is_ready() -> None:
    engine = Engine()
    begun, waiting = engine.submit(), engine.submit(accept=False)
    engine.dies()
    engine.comes_back("STARTING")
    assert engine.heard(Submit) == []
    engine.welcome("READY")
    assert [message.id for message in engine.heard(Submit)] == [begun.id, waiting.id]


def test_a_request_keeps_its_own_seed() -> None:
    engine = Engine()
    call = engine.submit(seed=5)
    engine.step([stream_of(call)], [11])
    engine.dies()
    engine.comes_back()
    assert engine.heard(Submit)[0].params["seed"] == 5


def test_choices_that_have_ended_are_left_out() -> None:
    engine = Engine()
    call = engine.submit(n=3)
    first, second, third = (stream_of(call, choice) for choice in range(3))
    engine.step([first, second, third], [11, 21, 31], done=[Done(second, "stop")])
    engine.dies()
    engine.comes_back()
    (message,) = engine.heard(Submit)
    assert message.resume == (array("I", [11]).tobytes(), None, array("I", [31]).tobytes())
    engine.tell(Accept(call.id, message.stream, 3, 3))
    engine.step([message.stream, message.stream + 2], [12, 32])
    assert [item.take().token_ids for item in call.collectors] == [[11, 12], [21], [31, 32]]


def test_prompt_logprobs_that_came_are_not_asked_for_again() -> None:
    engine = Engine()
    call = engine.submit(prompt_logprobs=1)
    row = [-0.5, 1, [4], [-0.5]]
    engine.step([stream_of(call)], [11], prompt_logprobs=[(stream_of(call), [row])])
    engine.dies()
    engine.comes_back()
    assert "prompt_logprobs" not in engine.heard(Submit)[0].params


def test_a_reader_of_text_sees_text_alone_though_tokens_are_kept() -> None:
    engine = Engine()
    call = engine.submit(reply="text")
    stream = stream_of(call)
    engine.step([stream], [11], counts=array("I", [1]))
    assert not call.collectors[0].has_news
    engine.step([stream], [12], counts=array("I", [1]), text=[(stream, "ab")])
    delta = call.collectors[0].take()
    assert (delta.token_ids, delta.text) == ([], "ab")
    engine.dies()
    engine.comes_back()
    (message,) = engine.heard(Submit)
    assert (message.reply, message.resume) == ("both", (array("I", [11, 12]).tobytes(),))


def test_a_deadline_counts_on_while_the_engine_is_away() -> None:
    engine = Engine()
    call = engine.submit(deadline_s=10.0)
    engine.dies()
    engine.now = 4.0
    engine.comes_back()
    assert engine.heard(Submit)[0].deadline_ms == 6000
    engine.dies()
    engine.now = 11.0
    engine.comes_back("STARTING")
    engine.at(11.0)
    assert code_of(call) == "deadline_exceeded"


def test_who_opts_out_is_told_of_the_restart() -> None:
    engine = Engine()
    call = engine.submit(resubmit=False)
    engine.dies()
    engine.comes_back()
    assert code_of(call) == "engine_restarted"
    assert engine.heard(Submit) == []


def test_nobody_waits_longer_than_the_bound() -> None:
    engine = Engine()
    call = engine.submit()
    engine.dies()
    engine.at(WAIT_S - 0.1)
    assert not call.finished
    engine.at(WAIT_S + 0.1)
    assert code_of(call) == "engine_unavailable"


@pytest.mark.parametrize("code", ["draining", "engine_restarted", "engine_stalled", "engine_unavailable"])
def test_an_engine_that_gives_up_says_so_and_the_request_waits_for_its_successor(code: str) -> None:
    engine = Engine()
    call = engine.submit(n=2)
    first, second = stream_of(call), stream_of(call, 1)
    engine.step([first, second], [11, 21])
    rows = [Done(first, "abort", [code, "Going."]), Done(second, "abort", [code, "Going."])]
    engine.step([], [], done=rows)
    engine.tell(Goodbye("Going."))
    assert not call.finished
    engine.dies()
    engine.comes_back()
    (message,) = engine.heard(Submit)
    assert message.resume == (array("I", [11]).tobytes(), array("I", [21]).tobytes())
    assert message.stalls == (code == "engine_stalled")


@pytest.mark.parametrize("code", ["engine_error", "cancelled", "client_stalled", "deadline_exceeded"])
def test_an_end_that_is_about_the_request_is_its_end(code: str) -> None:
    engine = Engine()
    call = engine.submit()
    engine.end(stream_of(call), "error", [code, "So."])
    assert code_of(call) == code


def test_a_second_stall_is_the_end() -> None:
    engine = Engine()
    call = engine.submit()
    for _ in range(2):
        engine.end(stream_of(call), "error", ["engine_stalled", "A step did not end."])
        engine.dies()
        engine.comes_back()
        for message in engine.heard(Submit):
            engine.tell(Accept(call.id, message.stream, 3))
    assert code_of(call) == "engine_stalled"


def test_a_request_that_does_not_get_on_is_given_up_and_one_that_does_is_not() -> None:
    engine = Engine()
    stuck, moving = engine.submit(), engine.submit()
    for number in range(8):
        engine.dies()
        engine.comes_back()
        for message in engine.heard(Submit):
            engine.tell(Accept(message.id, message.stream, 3))
        engine.step([stream_of(moving)], [number])
    assert code_of(stuck) == "engine_restarted"
    assert not moving.finished
    assert moving.collectors[0].take().token_ids == list(range(8))


def test_a_full_queue_is_asked_again() -> None:
    engine = Engine()
    call = engine.submit()
    engine.dies()
    engine.comes_back()
    (message,) = engine.heard(Submit)
    engine.tell(Reject(call.id, message.stream, "overloaded", "Full.", None, True, 2000))
    engine.at(1.0)
    assert engine.heard(Submit) == []
    engine.at(2.1)
    (message,) = engine.heard(Submit)
    engine.tell(Accept(call.id, message.stream, 3))
    assert not call.finished


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"info": INFO._replace(fingerprint="cd" * 32)}, {}),
        ({"info": INFO._replace(name="other")}, {}),
        ({"info": INFO._replace(adapters=())}, {"adapter": "pirate"}),
        ({"features": ()}, {}),
    ],
)
def test_what_cannot_go_on_ends(change: dict[str, Any], fields: dict[str, Any]) -> None:
    engine = Engine()
    call = engine.submit(**fields)
    engine.step([stream_of(call)], [11])
    engine.dies()
    vars(engine).update(change)
    engine.comes_back()
    assert engine.heard(Submit) == []
    assert code_of(call) == "engine_restarted"


def test_an_engine_without_the_feature_runs_what_had_not_begun() -> None:
    engine = Engine(features=())
    call = engine.submit()
    engine.dies()
    engine.comes_back()
    (message,) = engine.heard(Submit)
    assert (message.id, message.resume) == (call.id, None)


def test_who_cancels_meanwhile_is_done_at_once() -> None:
    engine = Engine()
    plain, stopped = engine.submit(), engine.submit()
    engine.step([stream_of(stopped)], [11])
    engine.dies()
    engine.comes_back("STARTING")
    engine.session.cancel(plain.collectors)
    engine.session.cancel(stopped.collectors, (1, "###"))
    assert code_of(plain) == "cancelled"
    finish = finish_of(stopped)
    assert finish is not None
    assert (finish.reason, finish.detail, finish.completion_tokens) == ("stop", "###", 1)
    engine.welcome("READY")
    assert engine.heard(Submit) == []


def test_who_cancelled_before_hears_the_end_when_the_engine_is_lost() -> None:
    engine = Engine()
    call = engine.submit()
    engine.session.cancel(call.collectors)
    engine.dies()
    engine.comes_back()
    assert code_of(call) == "cancelled"


def test_an_engine_that_was_only_silent_goes_on_where_it_was() -> None:
    """SIGSTOP and SIGCONT, for so long that the client gave up: the same epoch, which has kept everything."""
    engine = Engine()
    call = engine.submit()
    engine.step([stream_of(call)], [11])
    engine.at(PATIENCE_S + 10.0)
    assert not call.finished
    engine.at(PATIENCE_S + 13.0)
    (hello,) = engine.heard(Hello)[-1:]
    assert hello.last_seq == 1
    engine.welcome(resumed=True)
    assert engine.heard(Submit) == []
    engine.step([stream_of(call)], [12])
    assert call.collectors[0].take().token_ids == [11, 12]


def test_one_that_was_silent_and_has_dropped_its_clients_is_asked_again() -> None:
    engine = Engine()
    call = engine.submit()
    engine.step([stream_of(call)], [11])
    engine.at(PATIENCE_S + 10.0)
    engine.at(PATIENCE_S + 13.0)
    engine.seq = 0
    engine.welcome(resumed=False)
    (message,) = engine.heard(Submit)
    assert (message.id, message.resume) == (call.id, (array("I", [11]).tobytes(),))


def test_readers_of_anothers_request_attach_again_until_that_one_is_back() -> None:
    engine = Engine()
    call = engine.session.attach(bytes(16), [0], 1, "tokens")
    (message,) = engine.heard(Attach)
    engine.tell(Accept(call.id, message.stream, 3))
    engine.step([message.stream], [11])
    engine.dies()
    engine.at(20.0)
    engine.comes_back()
    (message,) = engine.heard(Attach)
    assert message.cursors == (1,)
    engine.tell(Reject(call.id, message.stream, "not_found", "No such request."))
    engine.at(21.0)
    (message,) = engine.heard(Attach)
    engine.tell(Accept(call.id, message.stream, 3))
    engine.step([message.stream], [12])
    assert call.collectors[0].take().token_ids == [11, 12]


def test_a_detached_request_that_went_on_elsewhere_is_cancelled_where_it_was() -> None:
    engine = Engine()
    call = engine.submit(detached=True)
    engine.at(PATIENCE_S + 10.0)
    engine.session.release(call)
    engine.at(PATIENCE_S + 13.0)
    engine.welcome(resumed=False)
    assert call.id in [id for message in engine.heard(Cancel) for id in message.ids]


def test_a_pause_is_told_from_the_loss_to_the_acceptance() -> None:
    engine, pauses = Engine(), list[float]()
    engine.session.calls.on_resumed = pauses.append
    call = engine.submit()
    engine.dies()
    engine.now = 3.5
    engine.comes_back()
    (message,) = engine.heard(Submit)
    engine.tell(Accept(call.id, message.stream, 3))
    assert pauses == [3.5]


def test_a_session_with_held_requests_does_not_wake_again_and_again() -> None:
    engine = Engine()
    call = engine.submit()
    engine.dies()
    engine.comes_back()
    (message,) = engine.heard(Submit)
    engine.tell(Reject(call.id, message.stream, "draining", "Going.", None, True, 500))
    engine.welcome("DRAINING")
    assert engine.session.tick(1.0) > 1.0


def test_what_an_engine_gives_up_is_asked_again_though_that_engine_stays() -> None:
    """A reader of a choice that had ended before, elsewhere, is told so by an engine that goes on."""
    engine = Engine()
    call = engine.submit()
    engine.step([stream_of(call)], [11])
    engine.end(stream_of(call), "error", ["engine_restarted", "This choice ended at an engine before this one."])
    engine.at(1.0)
    (message,) = engine.heard(Submit)
    assert message.resume == (array("I", [11]).tobytes(),)


def test_a_request_whose_wait_is_over_is_cancelled_where_it_was_asked_for() -> None:
    engine = Engine()
    call = engine.submit()
    engine.dies()
    engine.at(2.0)
    engine.comes_back()
    (message,) = engine.heard(Submit)  # and there is no answer
    for _ in range(8):
        engine.at(engine.now + WAIT_S / 8)
        engine.welcome()
    assert code_of(call) == "engine_unavailable"
    assert message.stream in [stream for cancel in engine.heard(Cancel) for stream in cancel.streams]


def test_a_request_that_moves_off_engines_that_fall_silent_is_given_up_too() -> None:
    """None of them says that it is another process, and each was lost all the same."""
    engines = [Engine(), Engine()]
    call = engines[0].submit()
    for number in range(8):
        home, other = engines[number % 2], engines[1 - number % 2]
        home.dies()
        home.at(home.now + 10.0)
        other.at(home.now)
        other.comes_back()
        home.session.release(call)
        other.session.adopt(call)
        for message in other.heard(Submit):
            other.tell(Accept(call.id, message.stream, 3))
    assert code_of(call) == "engine_restarted"
    assert other.session.calls.get(call.id) is None


def test_a_reader_of_text_who_attached_in_the_middle_attaches_again_behind_what_he_has() -> None:
    engine = Engine()
    call = engine.session.attach(bytes(16), [100], 1, "text")
    (message,) = engine.heard(Attach)
    engine.tell(Accept(call.id, message.stream, 3))
    engine.step([], [], text=[(message.stream, "abc")])
    engine.dies()
    engine.comes_back()
    assert engine.heard(Attach)[0].cursors == (103,)


def test_a_deadline_holds_though_the_engine_says_nothing() -> None:
    engine = Engine()
    call = engine.submit(deadline_s=20.0)
    stream = stream_of(call)
    engine.at(19.0)
    assert engine.session.phase is Phase.SILENT
    assert not call.finished
    engine.at(25.0)
    assert code_of(call) == "deadline_exceeded"
    engine.heard(Cancel)
    engine.welcome()
    assert stream in [stream for cancel in engine.heard(Cancel) for stream in cancel.streams]


def test_a_stop_string_found_while_the_engine_is_silent_is_told_when_it_is_not() -> None:
    engine = Engine()
    call = engine.submit()
    engine.step([stream_of(call)], [11])
    engine.at(19.0)
    engine.session.cancel(call.collectors, (1, "END"))
    engine.heard(Cancel)
    engine.welcome()
    (cancel,) = engine.heard(Cancel)
    assert cancel.stopped == (StopFound(stream_of(call), 1, "END"),)
