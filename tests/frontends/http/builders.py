"""A running front end in front of a scripted engine, and small readers of what it answers."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from frontends.common.server import FrontendServer
from frontends.http.app import make_app, make_service
from frontends.http.process import connection_limits
from inferengine.config import Config
from inferengine.text import Tokenizer
from inferengine.wire.messages import Submit
from tests.frontends.scripted_engine import FILES, Script, ScriptedEngine

TOKENIZER = Tokenizer.from_files(FILES)
HEADERS = {"content-type": "application/json"}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def prompt_of(house: House) -> str:
    """Return the prompt that the engine was sent last."""
    return TOKENIZER.decode(list(array("I", house.engine.submits[-1].prompt or b"")), skip_special_tokens=False)


def says(text: str, **script: Any) -> Callable[[Submit, int], Script]:
    """Return a script with which the engine answers this, whatever is asked."""
    return lambda submit, choice: Script(ids(text), **script)


class FrontEnd:
    """uvicorn with the real application in a thread, on a free port."""

    def __init__(self, config: Config, **shared: Any) -> None:
        self.service = make_service(config, **shared)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = FrontendServer(
            uvicorn.Config(
                make_app(self.service, [listener]),
                loop="uvloop",
                ws="none",
                log_config=None,
                proxy_headers=False,
                timeout_graceful_shutdown=1,
            ),
            connection_limits(config.http),
            self.service.metrics.refusals,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, args=(listener,))
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def call(self, function: Callable[[], Any]) -> None:
        """Run it on the front end's event loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function)

    def _run(self, listener: socket.socket) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server._serve([listener])
            await self.service.close()

        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(serve())


class House:
    """An engine and its front end. `script` may be changed at any time."""

    def __init__(self, folder: str, **sections: Any) -> None:
        self.address = f"ipc://{folder}/engine.sock"
        self.script: Callable[[Submit, int], Script] = says("the quick brown fox")
        self.engine = ScriptedEngine(self.address, lambda submit, choice: self.script(submit, choice))
        wire = {"socket": self.address, **sections.pop("wire", {})}
        sections["http"] = {"files_folder": f"{folder}/files", **sections.get("http", {})}
        self.front = FrontEnd(Config().with_values(wire=wire, **sections))
        self.http = httpx.Client(base_url=self.front.url, timeout=60.0, headers=HEADERS)

    def start_engine(self) -> None:
        self.engine.start()
        wait_until(lambda: self.http.get("/ready").status_code == 200)

    def close(self) -> None:
        self.http.close()
        self.front.stop()
        self.engine.kill()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, content=json.dumps(body))

    def complete(self, **body: Any) -> dict[str, Any]:
        """Ask for a completion, which must succeed, and return the document."""
        response = self.post("/v1/completions", **{"prompt": "say", **body})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        """Return the events of a stream: JSON documents, and the string [DONE]."""
        response = self.post(path, **{**({} if "messages" in body else {"prompt": "say"}), "stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.text)


@contextmanager
def house(*, running: bool = True, **sections: Any) -> Iterator[House]:
    with tempfile.TemporaryDirectory() as folder:
        built = House(folder, **sections)
        try:
            if running:
                built.start_engine()
            yield built
        finally:
            built.close()


def events(text: str) -> list[Any]:
    """Split as common clients do: on two LFs."""
    assert "\r" not in text
    assert text.endswith("\n\n")
    payloads = [part.removeprefix("data: ") for part in text[:-2].split("\n\n") if not part.startswith(":")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def text_of(documents: list[Any], index: int = 0) -> str:
    """Return the text of one choice, put together from a stream's events."""
    parts = []
    for document in documents:
        for choice in document["choices"] if isinstance(document, dict) else ():
            if choice["index"] == index:
                parts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    return "".join(parts)


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextmanager
def open_request(port: int, path: str, **body: Any) -> Iterator[socket.socket]:
    """Send a request and leave the answer unread; closed on leaving, if not before."""
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(payload)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(60.0)
        connection.sendall(head.encode() + payload)
        yield connection
