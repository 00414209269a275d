"""A small OpenAI-compatible server: `words` events of one word each, then the end with its usage."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = 4


class FakeServer(ThreadingHTTPServer):
    """`bodies` and `paths` are what was asked. Each way to fail or to end a body is one attribute."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.api_key = ""
        self.refuses = False  # every completion is answered 503
        self.is_chunked = True  # False: a body ends where the server closes
        self.hangs_up = False  # close after each answer without having said so
        self.lists_models = True
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.num_connections = 0

    def process_request(self, request: Any, client_address: Any) -> None:
        self.num_connections += 1
        super().process_request(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits for the client's delayed acknowledgement
    server: FakeServer

    def do_GET(self) -> None:
        if self.server.api_key and self.headers.get("Authorization") != f"Bearer {self.server.api_key}":
            self._answer(401, {"error": {"message": "no key"}})
        elif self.server.lists_models:
            self._answer(200, {"data": [{"id": "fake"}]})
        else:
            self._answer(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.refuses:
            self._answer(503, {"error": {"message": "no room"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        if self.server.is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
        self.end_headers()
        for event in self._events():
            data = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if self.server.is_chunked else data)
        if self.server.is_chunked:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = self.close_connection or self.server.hangs_up

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _events(self) -> Iterator[str]:
        field = "delta" if "chat" in self.path else "text"
        word: Any = {"content": "word "} if "chat" in self.path else "word "
        nothing: Any = {} if "chat" in self.path else ""
        for _ in range(WORDS):
            yield _compact({"choices": [{"index": 0, field: word, "finish_reason": None}]})
        yield _compact({"choices": [{"index": 0, field: nothing, "finish_reason": "length"}]})
        yield _compact({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": WORDS}})
        yield "[DONE]"

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving() -> Iterator[FakeServer]:
    """Yield a server in a thread of its own, until the block ends."""
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _compact(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))
