"""Errors as people read them, who often see the message and nothing else."""

from __future__ import annotations

import pytest

from frontends.common.errors import error_object, rename_field
from inferengine.errors import InferEngineError, InvalidRequest


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidRequest("max_tokens", "must be a whole number"), "max_tokens: must be a whole number"),
        (InvalidRequest("messages[0].content", "is missing"), "messages[0].content: is missing"),
        (
            InferEngineError("model_not_found", "The model `x` does not exist.", field="model"),
            "The model `x` does not exist.",
        ),
        (InferEngineError("overloaded", "the queue is full"), "the queue is full"),
    ],
)
def test_a_message_names_its_field_unless_it_is_a_whole_sentence(error: InferEngineError, message: str) -> None:
    told = error_object(error)
    assert told["message"] == message
    assert (told["param"], told["code"]) == (error.field, error.code)


def test_a_message_shows_no_place_on_this_machine() -> None:
    told = error_object(InvalidRequest("model.path", "there is nothing in /var/lib/secret/models at ipc:///run/a.sock"))
    assert "/" not in told["message"]


def test_a_remedy_may_name_a_route_of_this_api() -> None:
    told = error_object(InvalidRequest("messages", "there is no chat template: use /v1/completions with a prompt"))
    assert told["message"] == "messages: there is no chat template: use /v1/completions with a prompt"


def test_a_dialects_own_name_stands_in_the_message_too() -> None:
    error = InvalidRequest("max_tokens", "Room for 5, so max_tokens may be at most 5; other.max_tokens is not meant.")
    rename_field(error, {"max_tokens": "max_new_tokens", "prompt": "input"})
    assert error.field == "max_new_tokens"
    assert error.message == "Room for 5, so max_new_tokens may be at most 5; other.max_tokens is not meant."


def test_a_name_that_is_a_word_stays_a_word() -> None:
    error = InvalidRequest("stop", "must not stop")
    rename_field(error, {"stop": "stop_sequences"})
    assert (error.field, error.message) == ("stop_sequences", "must not stop")
