"""What a `done` frame counts."""

from __future__ import annotations

from tests.frontends.websocket.builders import make_engine, open_socket, serving


def test_usage_has_draft_tokens_of_each_choice_where_there_were_any(tmp_path):
    plain, drafted = usage(tmp_path / "plain"), usage(tmp_path / "drafted", draft_counts=(4, 1))
    assert set(plain) == {"prompt_tokens", "cached_tokens", "completion_tokens"}
    assert drafted == {**plain, "accepted_prediction_tokens": 4, "rejected_prediction_tokens": 1}


def usage(folder, **options):
    """Return the usage of one answer."""
    folder.mkdir()
    with make_engine(folder, **options) as engine, serving(engine) as server, open_socket(server) as client:
        client.generate("r1", "hello")
        return client.read("r1")["r1"].done[0]["usage"]
