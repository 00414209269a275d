"""Whatever JSON comes: never a server's fault, and always an error that can be read."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontends.http.bodies import REFUSED, SAMPLING, STRUCTURE
from tests.frontends.http.builders import House, events

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, -1, 0.0, 0.5, 1e308, "", "a", "auto", "none", [], {}, [0], [[0]], {"1": 1}])
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *SAMPLING,
        *REFUSED,
        *STRUCTURE,
        *(
            "model",
            "prompt",
            "max_tokens",
            "max_completion_tokens",
            "max_new_tokens",
            "stream",
            "stream_options",
            "echo",
        ),
        *("logprobs", "top_logprobs", "messages", "tokens", "chat_template_kwargs", "documents", "reasoning_effort"),
        *("priority", "cache_salt", "request_id", "truncate_prompt_tokens", "return_token_ids", "add_special_tokens"),
        *("input", "encoding_format", "dimensions", "pooling"),
        *("tools", "tool_choice", "parallel_tool_calls", "include_reasoning"),
        *("continue_final_message", "add_generation_prompt", "return_tokens_as_token_ids", "user"),
    ]
)
PATHS = st.sampled_from(
    [
        "/v1/completions",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/generate",
        "/generate",
        "/infer/v1/completions",
        "/tokenize",
        "/detokenize",
    ]
)
GOOD: dict[str, Any] = {"prompt": "say", "input": "say", "messages": [{"role": "user", "content": "hi"}], "tokens": [5]}


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=PATHS, changes=st.dictionaries(NAMES, VALUES, max_size=3))
def test_no_body_is_the_servers_fault(served: House, path: str, changes: dict[str, Any]) -> None:
    response = served.http.post(path, content=json.dumps({**GOOD, **changes}))
    assert response.status_code in (200, 400, 404, 422), response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        if path != "/infer/v1/completions":
            documents = events(response.text)
            assert documents[-1] == "[DONE]"
            assert not any("error" in document for document in documents[:-1])
    elif response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=PATHS, body=st.binary(max_size=60))
def test_no_bytes_are_the_servers_fault(served: House, path: str, body: bytes) -> None:
    assert served.http.post(path, content=body).status_code in (400, 422)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "text", "type"]), VALUES))
def test_no_message_is_the_servers_fault(served: House, message: dict[str, Any]) -> None:
    response = served.http.post("/v1/chat/completions", content=json.dumps({"messages": [message]}))
    assert response.status_code in (200, 400), response.text
