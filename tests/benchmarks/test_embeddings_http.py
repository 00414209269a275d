"""The load of embeddings over HTTP: both servers get the same requests, and an answer without its vectors ends it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.embeddings_http import measure, parse


@contextmanager
def serving(seen: list[list[list[int]]], missing: int = 0) -> Iterator[str]:
    """Serve embeddings of nothing; `missing`: so many vectors fewer than asked for. `seen` gets the inputs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer({"data": [{"id": "some"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert (body["model"], body["encoding_format"]) == ("some", "base64")
            seen.append(body["input"])
            vectors = [{"object": "embedding", "embedding": "AAAA"} for _ in body["input"][missing:]]
            self.answer({"data": vectors})

        def answer(self, value: object) -> None:
            text = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


LOAD = ["--requests", "6", "--inputs", "2", "--concurrency", "3", "--lengths", "2", "5", "--rounds", "2"]


def test_both_servers_get_the_same_inputs_each_round_others() -> None:
    ours: list[list[list[int]]] = []
    theirs: list[list[list[int]]] = []
    with serving(ours) as url, serving(theirs) as other:
        result = measure(parse(["--url", url, "--theirs", other, *LOAD]))
    assert sorted(ours) == sorted(theirs)
    assert len(ours) == 18  # two rounds, and the one before them
    assert len({json.dumps(inputs) for inputs in ours}) == 18
    assert all(2 <= len(ids) <= 5 and len(inputs) == 2 for inputs in ours for ids in inputs)
    assert len(result["rounds"]) == 2
    assert result["ratio"] > 0


def test_an_answer_without_all_vectors_ends_the_load() -> None:
    with serving([], missing=1) as url, pytest.raises(RuntimeError, match="HTTP 200"):
        measure(parse(["--url", url, *LOAD]))
