"""What a Session does with open requests when its engine is lost: frames and time in, frames and output out."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from inferengine.client.requests import MAX_FRUITLESS, Delta, Finish, OpenRequest, embedding_from, error_of
from inferengine.client.session import PATIENCE_S, Phase
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.sampling_params import SamplingParams
from inferengine.wire.messages import Accept, Attach, Bye, Cancel, Done, Goodbye, Hello, Reject, StopFound, Submit
from tests.client.builders import INFO, SEED, WAIT_S, ScriptedEngine, code_of, finish_of, stream_of


def test_a_restarted_engine_gets_the_output_so_far_and_its_seed() -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    engine.step([stream_of(request)], [11])
    assert request.collectors[0].take().token_ids == [11]
    engine.step([stream_of(request)], [12])
    engine.die()
    engine.come_back()
    (message,) = engine.received(Submit)
    assert (message.id, message.resume, message.params["seed"]) == (request.id, (array("I", [11, 12]).tobytes(),), SEED)
    engine.send(Accept(request.id, message.stream, 3))
    engine.step([message.stream], [13])
    assert request.collectors[0].take().token_ids == [12, 13]


def test_an_engine_that_is_known_to_be_gone_is_lost_without_waiting_for_its_lease() -> None:
    engine = ScriptedEngine()
    moved: list[OpenRequest] = []
    request = engine.submit()
    request.failover = lambda request, error: moved.append(request)
    engine.session.give_up(engine.now)
    assert moved == []  # it is connected: whoever says so is mistaken
    engine.die()
    assert moved == []
    engine.session.give_up(engine.now)
    assert moved == [request]


def test_nothing_is_sent_before_the_engine_is_ready() -> None:
    engine = ScriptedEngine()
    begun, waiting = engine.submit(), engine.submit(accept=False)
    engine.die()
    engine.come_back("STARTING")
    assert engine.received(Submit) == []
    engine.welcome("READY")
    assert [message.id for message in engine.received(Submit)] == [begun.id, waiting.id]


def test_a_request_keeps_its_own_seed() -> None:
    engine = ScriptedEngine()
    request = engine.submit(seed=5)
    engine.step([stream_of(request)], [11])
    engine.die()
    engine.come_back()
    assert engine.received(Submit)[0].params["seed"] == 5


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"text": "\ud83d"}, "text"),
        ({"messages": [{"role": "user", "content": object()}]}, "messages"),
        ({"messages": [{"role": "user", "content": 2**70}]}, "messages"),
        ({"text": "x", "label": "\ud83d"}, "label"),
        ({"text": "x", "deadline_s": float("inf")}, "deadline_s"),
        ({"text": "x", "prediction_ids": [-1]}, "prediction_ids"),
        ({"messages": [{"role": "user", "content": {1: "a key that is no text"}}]}, "messages"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_the_other_requests_go_on(options: Any, field: str) -> None:
    """Kept, it would be sent again after a reconnect, and end the connection of all."""
    engine = ScriptedEngine()
    request = engine.submit()
    with pytest.raises(InvalidRequest) as refused:
        engine.session.submit(None, None, **options)
    assert refused.value.field == field
    engine.die()
    engine.come_back()
    assert [message.id for message in engine.received(Submit)] == [request.id]


def test_a_bias_may_be_a_dictionary_with_token_ids_as_keys() -> None:
    engine = ScriptedEngine()
    bias: Any = {7: 5.0, 9: -1}
    engine.session.submit([1], SamplingParams(logit_bias=bias))
    assert [*engine.received(Submit)[0].params["logit_bias"]] == [[7, 5.0], [9, -1]]


def test_a_map_that_the_engine_could_not_read_is_refused_here() -> None:
    """The engine's answer to it could not name the request, whose reader would wait for ever."""
    ids: Any = {7: 5.0}
    with pytest.raises(InvalidRequest, match=r"params: cannot be read by the engine: .* a key that is no string"):
        ScriptedEngine().session.submit([1], SamplingParams(stop_token_ids=ids))


def test_parameters_of_another_type_are_refused() -> None:
    params: Any = {"max_tokens": 5}
    with pytest.raises(InvalidRequest, match=r"params: must be SamplingParams\(max_tokens=16"):
        ScriptedEngine().session.submit([1], params)


@pytest.mark.parametrize("request_id", [b"12", b"x" * 17, "x" * 16])
def test_an_id_that_is_none_is_refused_here(request_id: Any) -> None:
    """The engine's answer to it could not name the request, whose reader would wait for ever."""
    session = ScriptedEngine().session
    calls: list[Callable[[], Any]] = [
        lambda: session.submit([1], None, request_id=request_id),
        lambda: session.attach(request_id, [0], 1, "tokens"),
        lambda: session.cancel_request(request_id),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest, match="request_id: must be 16 bytes"):
            call()


def test_the_end_of_a_refused_request_names_the_field() -> None:
    engine = ScriptedEngine()
    request = engine.submit(accept=False)
    stream = request.message.stream
    engine.send(Reject(request.id, stream, "invalid_request", "must be a whole number", "params.max_tokens"))
    finish = finish_of(request)
    assert finish is not None
    assert finish.detail == ["invalid_request", "must be a whole number", "params.max_tokens"]


def test_ended_choices_are_not_resumed() -> None:
    engine = ScriptedEngine()
    request = engine.submit(n=3)
    first, second, third = (stream_of(request, choice) for choice in range(3))
    engine.step([first, second, third], [11, 21, 31], done=[Done(second, "stop")])
    engine.die()
    engine.come_back()
    (message,) = engine.received(Submit)
    assert message.resume == (array("I", [11]).tobytes(), None, array("I", [31]).tobytes())
    engine.send(Accept(request.id, message.stream, 3, 3))
    engine.step([message.stream, message.stream + 2], [12, 32])
    assert [item.take().token_ids for item in request.collectors] == [[11, 12], [21], [31, 32]]


def test_prompt_logprobs_that_arrived_are_not_requested_again() -> None:
    engine = ScriptedEngine()
    request = engine.submit(prompt_logprobs=1)
    row = [-0.5, 1, [4], [-0.5]]
    engine.step([stream_of(request)], [11], prompt_logprobs=[(stream_of(request), [row])])
    engine.die()
    engine.come_back()
    assert "prompt_logprobs" not in engine.received(Submit)[0].params


def test_a_reader_of_text_sees_text_alone_though_tokens_are_kept() -> None:
    engine = ScriptedEngine()
    request = engine.submit(reply="text")
    stream = stream_of(request)
    engine.step([stream], [11], counts=array("I", [1]))
    assert not request.collectors[0].has_output
    engine.step([stream], [12], counts=array("I", [1]), text=[(stream, "ab")])
    delta = request.collectors[0].take()
    assert (delta.token_ids, delta.text) == ([], "ab")
    engine.die()
    engine.come_back()
    (message,) = engine.received(Submit)
    assert (message.reply, message.resume) == ("both", (array("I", [11, 12]).tobytes(),))


def test_a_deadline_keeps_counting_while_the_engine_is_away() -> None:
    engine = ScriptedEngine()
    request = engine.submit(deadline_s=10.0)
    engine.die()
    engine.now = 4.0
    engine.come_back()
    assert engine.received(Submit)[0].deadline_ms == 6000
    engine.die()
    engine.now = 11.0
    engine.come_back("STARTING")
    engine.run_until(11.0)
    assert code_of(request) == "deadline_exceeded"


def test_a_request_without_resubmit_ends_with_engine_restarted() -> None:
    engine = ScriptedEngine()
    request = engine.submit(resubmit=False)
    engine.die()
    engine.come_back()
    assert code_of(request) == "engine_restarted"
    assert engine.received(Submit) == []


def test_a_lost_request_ends_after_resume_wait_s() -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    engine.die()
    engine.run_until(WAIT_S - 0.1)
    assert not request.finished
    engine.run_until(WAIT_S + 0.1)
    assert code_of(request) == "engine_unavailable"


@pytest.mark.parametrize("code", ["draining", "engine_restarted", "engine_stalled", "engine_unavailable"])
def test_requests_of_an_engine_that_gives_up_wait_for_its_successor(code: str) -> None:
    engine = ScriptedEngine()
    request = engine.submit(n=2)
    first, second = stream_of(request), stream_of(request, 1)
    engine.step([first, second], [11, 21])
    rows = [Done(first, "abort", [code, "Going."]), Done(second, "abort", [code, "Going."])]
    engine.step([], [], done=rows)
    engine.send(Goodbye("Going."))
    assert not request.finished
    engine.die()
    engine.come_back()
    (message,) = engine.received(Submit)
    assert message.resume == (array("I", [11]).tobytes(), array("I", [21]).tobytes())
    assert message.stalls == (code == "engine_stalled")


def test_a_goodbye_is_answered_with_bye() -> None:
    """The engine that ends waits for it."""
    engine = ScriptedEngine()
    engine.send(Goodbye("Going."))
    assert engine.received(Bye) == [Bye()]


@pytest.mark.parametrize("code", ["engine_error", "cancelled", "client_stalled", "deadline_exceeded"])
def test_an_error_of_the_request_itself_ends_it(code: str) -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    engine.end(stream_of(request), "error", [code, "So."])
    assert code_of(request) == code


def test_a_second_stall_ends_the_request() -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    for _ in range(2):
        engine.end(stream_of(request), "error", ["engine_stalled", "A step did not end."])
        engine.die()
        engine.come_back()
        for message in engine.received(Submit):
            engine.send(Accept(request.id, message.stream, 3))
    assert code_of(request) == "engine_stalled"


def test_only_a_request_without_progress_is_given_up_after_repeated_losses() -> None:
    engine = ScriptedEngine()
    stuck, moving = engine.submit(), engine.submit()
    for number in range(8):
        engine.die()
        engine.come_back()
        for message in engine.received(Submit):
            engine.send(Accept(message.id, message.stream, 3))
        engine.step([stream_of(moving)], [number])
    assert code_of(stuck) == "engine_restarted"
    assert not moving.finished
    assert moving.collectors[0].take().token_ids == list(range(8))


@pytest.mark.parametrize("reply", ["tokens", "text"])
def test_who_attached_and_reads_on_is_not_given_up_however_often_the_engine_is_lost(reply: str) -> None:
    """A reader of text has no tokens that could grow."""
    engine = ScriptedEngine()
    request = engine.session.attach(bytes(16), [100], 1, reply)
    for number in range(2 * MAX_FRUITLESS):
        (message,) = engine.received(Attach)
        engine.send(Accept(request.id, message.stream, 3))
        if reply == "text":
            engine.step([], [], text=[(message.stream, "a")])
        else:
            engine.step([message.stream], [number])
        engine.die()
        engine.come_back()
    assert not request.finished


def test_a_request_that_is_given_up_tells_the_last_reason() -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    for number in range(MAX_FRUITLESS + 1):
        engine.end(stream_of(request), "error", ["engine_unavailable", f"Reason {number}."])
        engine.run_until(engine.now + 1.0)
        for message in engine.received(Submit):
            engine.send(Accept(request.id, message.stream, 3))
    finish = finish_of(request)
    assert finish is not None
    assert finish.detail[0] == "engine_restarted"
    assert str(finish.detail[1]).endswith(f"The last time: Reason {MAX_FRUITLESS}.")


@pytest.mark.parametrize(
    ("detail", "field", "wait_s"),
    [
        (["overloaded", "Busy."], None, None),
        (["overloaded", "Busy.", "prompt"], "prompt", None),
        (["overloaded", "Busy.", "", 2500], None, 2.5),
        (["overloaded", "Busy.", "prompt", "soon"], "prompt", None),
    ],
)
def test_a_terminal_row_may_name_a_field_and_a_wait(
    detail: list[str | int], field: str | None, wait_s: float | None
) -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    engine.end(stream_of(request), "error", detail)
    finish = finish_of(request)
    assert finish is not None
    error = error_of(finish)
    assert (error.code, error.message, error.field, error.retry_after_s) == ("overloaded", "Busy.", field, wait_s)


def test_a_failed_embedding_names_the_field_and_the_wait() -> None:
    finish = Finish("error", ["overloaded", "Busy.", "prompt", 2500], 3, 0, 0, 0.0, 0.0, 0.0)
    with pytest.raises(InferEngineError, match="Busy") as failed:
        embedding_from([Delta([], "", None, finish)])
    assert (failed.value.code, failed.value.field, failed.value.retry_after_s) == ("overloaded", "prompt", 2.5)


def test_an_overloaded_engine_is_retried_after_the_delay_that_it_names() -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    engine.die()
    engine.come_back()
    (message,) = engine.received(Submit)
    engine.send(Reject(request.id, message.stream, "overloaded", "Full.", None, True, 2000))
    engine.run_until(1.0)
    assert engine.received(Submit) == []
    engine.run_until(2.1)
    (message,) = engine.received(Submit)
    engine.send(Accept(request.id, message.stream, 3))
    assert not request.finished


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"info": INFO.replace(fingerprint="cd" * 32)}, {}),
        ({"info": INFO.replace(name="other")}, {}),
        ({"info": INFO.replace(adapters=())}, {"adapter": "pirate"}),
        ({"features": ()}, {}),
    ],
)
def test_a_request_that_cannot_resume_at_the_new_engine_ends(change: dict[str, Any], fields: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    request = engine.submit(**fields)
    engine.step([stream_of(request)], [11])
    engine.die()
    vars(engine).update(change)
    engine.come_back()
    assert engine.received(Submit) == []
    assert code_of(request) == "engine_restarted"


def test_an_engine_without_the_resume_feature_runs_requests_without_output() -> None:
    engine = ScriptedEngine(features=())
    request = engine.submit()
    engine.die()
    engine.come_back()
    (message,) = engine.received(Submit)
    assert (message.id, message.resume) == (request.id, None)


def test_cancelling_a_lost_request_ends_it_at_once() -> None:
    engine = ScriptedEngine()
    plain, stopped = engine.submit(), engine.submit()
    engine.step([stream_of(stopped)], [11])
    engine.die()
    engine.come_back("STARTING")
    engine.session.cancel(plain.collectors)
    engine.session.cancel(stopped.collectors, (1, "###"))
    assert code_of(plain) == "cancelled"
    finish = finish_of(stopped)
    assert finish is not None
    assert (finish.reason, finish.detail, finish.completion_tokens) == ("stop", "###", 1)
    engine.welcome("READY")
    assert engine.received(Submit) == []


def test_a_cancelled_request_ends_when_its_engine_is_lost() -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    engine.session.cancel(request.collectors)
    engine.die()
    engine.come_back()
    assert code_of(request) == "cancelled"


def test_an_engine_that_was_only_stopped_continues_its_streams() -> None:
    """SIGSTOP and SIGCONT, for so long that the client gave up: the same epoch, which has kept everything."""
    engine = ScriptedEngine()
    request = engine.submit()
    engine.step([stream_of(request)], [11])
    engine.run_until(PATIENCE_S + 10.0)
    assert not request.finished
    engine.run_until(PATIENCE_S + 13.0)
    (hello,) = engine.received(Hello)[-1:]
    assert hello.last_seq == 1
    engine.welcome(resumed=True)
    assert engine.received(Submit) == []
    engine.step([stream_of(request)], [12])
    assert request.collectors[0].take().token_ids == [11, 12]


def test_an_engine_that_was_stopped_and_dropped_its_clients_gets_the_request_again() -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    engine.step([stream_of(request)], [11])
    engine.run_until(PATIENCE_S + 10.0)
    engine.run_until(PATIENCE_S + 13.0)
    engine.seq = 0
    engine.welcome(resumed=False)
    (message,) = engine.received(Submit)
    assert (message.id, message.resume) == (request.id, (array("I", [11]).tobytes(),))


def test_an_attach_is_retried_until_the_submitter_has_resubmitted() -> None:
    engine = ScriptedEngine()
    request = engine.session.attach(bytes(16), [0], 1, "tokens")
    (message,) = engine.received(Attach)
    engine.send(Accept(request.id, message.stream, 3))
    engine.step([message.stream], [11])
    engine.die()
    engine.run_until(20.0)
    engine.come_back()
    (message,) = engine.received(Attach)
    assert message.cursors == (1,)
    engine.send(Reject(request.id, message.stream, "not_found", "No such request."))
    engine.run_until(21.0)
    (message,) = engine.received(Attach)
    engine.send(Accept(request.id, message.stream, 3))
    engine.step([message.stream], [12])
    assert request.collectors[0].take().token_ids == [11, 12]


def test_a_detached_request_that_moved_is_cancelled_at_its_first_engine() -> None:
    engine = ScriptedEngine()
    request = engine.submit(detached=True)
    engine.run_until(PATIENCE_S + 10.0)
    engine.session.release(request)
    engine.run_until(PATIENCE_S + 13.0)
    engine.welcome(resumed=False)
    assert request.id in [id for message in engine.received(Cancel) for id in message.ids]


def test_the_reported_pause_lasts_from_the_loss_to_the_accept() -> None:
    engine, pauses = ScriptedEngine(), list[float]()
    engine.session.requests.on_resumed = pauses.append
    request = engine.submit()
    engine.die()
    engine.now = 3.5
    engine.come_back()
    (message,) = engine.received(Submit)
    engine.send(Accept(request.id, message.stream, 3))
    assert pauses == [3.5]


def test_a_session_with_held_requests_does_not_wake_again_and_again() -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    engine.die()
    engine.come_back()
    (message,) = engine.received(Submit)
    engine.send(Reject(request.id, message.stream, "draining", "Going.", None, True, 500))
    engine.welcome("DRAINING")
    assert engine.session.tick(1.0) > 1.0


def test_a_request_that_an_engine_gives_up_is_sent_again_to_the_same_engine() -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    engine.step([stream_of(request)], [11])
    engine.end(stream_of(request), "error", ["engine_restarted", "The engine failed."])
    engine.run_until(1.0)
    (message,) = engine.received(Submit)
    assert message.resume == (array("I", [11]).tobytes(),)


def test_a_request_whose_wait_is_over_is_cancelled_at_the_engine_that_got_it() -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    engine.die()
    engine.run_until(2.0)
    engine.come_back()
    (message,) = engine.received(Submit)  # and there is no answer
    for _ in range(8):
        engine.run_until(engine.now + WAIT_S / 8)
        engine.welcome()
    assert code_of(request) == "engine_unavailable"
    assert message.stream in [stream for cancel in engine.received(Cancel) for stream in cancel.streams]


def test_a_request_that_moves_between_silent_engines_is_given_up() -> None:
    """None of them says that it is another process, and each was lost all the same."""
    engines = [ScriptedEngine(), ScriptedEngine()]
    request = engines[0].submit()
    for number in range(8):
        home, other = engines[number % 2], engines[1 - number % 2]
        home.die()
        home.run_until(home.now + 10.0)
        other.run_until(home.now)
        other.come_back()
        home.session.release(request)
        other.session.adopt(request)
        for message in other.received(Submit):
            other.send(Accept(request.id, message.stream, 3))
    assert code_of(request) == "engine_restarted"
    assert other.session.requests.get(request.id) is None


def test_a_text_attach_with_a_cursor_attaches_again_behind_the_text_that_arrived() -> None:
    engine = ScriptedEngine()
    request = engine.session.attach(bytes(16), [100], 1, "text")
    (message,) = engine.received(Attach)
    engine.send(Accept(request.id, message.stream, 3))
    engine.step([], [], text=[(message.stream, "abc")])
    engine.die()
    engine.come_back()
    assert engine.received(Attach)[0].cursors == (103,)


def test_a_deadline_holds_while_the_engine_is_silent() -> None:
    engine = ScriptedEngine()
    request = engine.submit(deadline_s=20.0)
    stream = stream_of(request)
    engine.run_until(19.0)
    assert engine.session.phase is Phase.SILENT
    assert not request.finished
    engine.run_until(25.0)
    assert code_of(request) == "deadline_exceeded"
    engine.received(Cancel)
    engine.welcome()
    assert stream in [stream for cancel in engine.received(Cancel) for stream in cancel.streams]


def test_a_stop_string_found_while_the_engine_is_silent_is_sent_afterwards() -> None:
    engine = ScriptedEngine()
    request = engine.submit()
    engine.step([stream_of(request)], [11])
    engine.run_until(19.0)
    engine.session.cancel(request.collectors, (1, "END"))
    engine.received(Cancel)
    engine.welcome()
    (cancel,) = engine.received(Cancel)
    assert cancel.stopped == (StopFound(stream_of(request), 1, "END"),)
