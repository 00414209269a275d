"""Events are separated by LF in every dialect: common clients split on two of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frontends.http.builders import House, says

HELLO = [{"role": "user", "content": "hi"}]
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "say", "stream": True}),
    ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
    (
        "/v1/chat/completions",
        {"messages": HELLO, "stream": True, "tools": [{"type": "function", "function": {"name": "f"}}]},
    ),
    ("/v1/responses", {"input": "hi", "stream": True}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "stream": True}),
    ("/infer/v1/completions", {"model": "tiny", "prompt": "say"}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_sse_separators_are_lf(served: House, path: str, body: dict[str, Any]) -> None:
    served.script = says("line one\r\nline two\n\nthe end 🎉")
    response = served.post(path, **body)
    raw = response.content
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "connection" not in response.headers  # the server's to say: a request may have asked it to close
    assert b"\r" not in raw
    assert raw.endswith(b"\n\n")
    assert not raw.startswith(b"\n")
    for event in raw[:-2].split(b"\n\n"):
        lines = [line for line in event.split(b"\n") if not line.startswith(b":")]
        assert [line.partition(b": ")[0] for line in lines] in ([b"data"], [b"event", b"data"], [])
        for line in lines:
            payload = line.removeprefix(b"data: ")
            if line.startswith(b"data: ") and payload != b"[DONE]":
                json.loads(payload)
