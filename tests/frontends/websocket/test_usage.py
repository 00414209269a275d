"""What a `done` frame counts."""

from __future__ import annotations

from tests.frontends.websocket.builders import make_engine, open_socket, serving


def test_guesses_are_told_of_each_choice_where_there_were_any(tmp_path):
    with make_engine(tmp_path) as engine, serving(engine) as server, open_socket(server) as client:
        client.generate("plain", "hello")
        plain = client.read("plain")["plain"].done[0]["usage"]
        engine.guesses = (4, 1)
        client.generate("guessed", "hello")
        guessed = client.read("guessed")["guessed"].done[0]["usage"]
    assert set(plain) == {"prompt_tokens", "cached_tokens", "completion_tokens"}
    assert guessed == {**plain, "accepted_prediction_tokens": 4, "rejected_prediction_tokens": 1}
