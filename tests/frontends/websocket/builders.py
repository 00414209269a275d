"""The websocket front end in this process on a free port, and a client that speaks its frames."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
from websockets.sync.client import ClientConnection, connect

from frontends.common.server import FrontendServer as AcceptingServer
from frontends.websocket import app as websocket_app
from frontends.websocket.app import SOCKET_PATH, WebsocketFrontEnd
from frontends.websocket.channel import JSON_SUBPROTOCOL, MSGPACK_SUBPROTOCOL
from frontends.websocket.process import server_config
from inferengine.config import Config
from inferengine.text import Tokenizer
from inferengine.wire import messages
from inferengine.wire.messages import Submit
from tests.frontends.scripted_engine import EOS, Script, ScriptedEngine, model_info
from tests.text.vocabularies import byte_level, sentencepiece

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
WAIT_S = 60.0  # far more than anything takes; only a failing test waits so long
ANSWER = "The quick brown fox 🎉 jumps over 你好 the lazy dog, and then it rests. "


# A front end compresses the page's files when it starts, 40 ms of processor time; those of one test process do it once.
websocket_app._read = functools.cache(websocket_app._read)


def model_files(kind: str = "byte_level") -> dict[str, bytes]:
    """Return the files of a small model that has a chat template."""
    fast = byte_level() if kind == "byte_level" else sentencepiece()
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    return {
        "tokenizer.json": fast.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "generation_config.json": json.dumps({"temperature": 0.6, "top_k": 20}).encode(),
    }


def make_engine(folder: Path, text: Callable[[str, int], str] | None = None, **options: Any) -> ScriptedEngine:
    """Make an engine. `text(prompt, choice)` is the answer, one token every millisecond; without it the answer is
    ANSWER. `draft_counts`: accepted and rejected draft tokens of every choice."""
    files = options.pop("files", None) or model_files()
    draft_counts = options.pop("draft_counts", (0, 0))
    tokenizer = Tokenizer.from_files(files)

    def script(submit: Submit, choice: int) -> Script:
        prompt = tokenizer.decode(list(messages.from_u32(submit.prompt or b"")), True)
        answer = ANSWER if text is None else text(prompt, choice)
        token_ids = [*tokenizer.encode(answer, False), EOS]
        planned = token_ids[: submit.params.get("max_tokens")]
        end = ("stop", EOS) if len(planned) == len(token_ids) else ("length", None)
        return Script(planned, *end, pause_s=0.001, draft_counts=draft_counts)

    info = model_info(files, name="scripted-model", max_model_len=4096, num_kv_tokens=65536, embedding_size=0)
    address = f"ipc://{folder}/engine.sock"
    settings = {"heartbeat_s": 0.5, "lease_s": 10.0, **options}
    return ScriptedEngine(address, script, files=files, info=info, **settings)


class Server:
    """One front end at work."""

    def __init__(self, front_end: WebsocketFrontEnd, config: Config, port: int) -> None:
        self.front_end = front_end
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port = self.listener.getsockname()[1]
        self._server = AcceptingServer(server_config(config, front_end))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="server")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_blocked(self) -> bool:
        """Some connection's transport takes no more."""
        return any(not connection.writable.is_set() for connection in list(self._server.server_state.connections))

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.002)

    def num_tasks(self) -> int:
        """Return the number of tasks of its event loop."""
        assert self._loop is not None
        counted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._loop.call_soon_threadsafe(lambda: counted.put(len(asyncio.all_tasks())))
        return counted.get(timeout=WAIT_S)

    def cut(self) -> None:
        """Lose every connection without a word."""
        for connection in list(self._server.server_state.connections):
            connection.loop.call_soon_threadsafe(connection.transport.abort)

    def stop(self) -> None:
        """Stop; may be called any number of times."""
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve([self.listener])

        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(serve())


@contextlib.contextmanager
def serving(engine: ScriptedEngine | str, port: int = 0, **sections: Any) -> Iterator[Server]:
    """Yield a front end for `engine` (or an address), ready to be asked."""
    address = engine if isinstance(engine, str) else engine.address
    tracing = sections.pop("tracing", None)
    config = Config().with_values(wire={"socket": address, **sections.pop("wire", {})}, **sections)
    server = Server(WebsocketFrontEnd(config, tracing=tracing), config, port)
    server.start()
    try:
        if isinstance(engine, ScriptedEngine):
            wait_until(lambda: server.front_end.engine_state.state == "READY")
            wait_until(lambda: _knows_model(server.front_end))  # no news of that comes between a test's frames
        yield server
    finally:
        server.stop()


def _knows_model(front_end: WebsocketFrontEnd) -> bool:
    model = front_end.engine_state.describe()["model"]
    return model is not None and model["chat"] is not None


class Socket:
    """A client: frames out, frames in."""

    def __init__(self, connection: ClientConnection, *, binary: bool) -> None:
        self.connection = connection
        self._binary = binary
        self.hello = self.next()

    def send(self, **frame: Any) -> None:
        self.send_raw(msgpack.packb(frame) if self._binary else json.dumps(frame))

    def send_raw(self, message: str | bytes) -> None:
        self.connection.send(message)

    def next(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        message = self.connection.recv(timeout_s)
        frame = msgpack.unpackb(message) if isinstance(message, bytes) else json.loads(message)
        assert isinstance(message, bytes) == self._binary
        return frame

    def until(self, *kinds: str, **values: Any) -> dict[str, Any]:
        """Read up to the next frame of one of `kinds` with these values; others before it are dropped."""
        while True:
            frame = self.next()
            if frame["type"] in kinds and all(frame.get(name) == value for name, value in values.items()):
                return frame

    def generate(self, name: str = "r1", prompt: str = "hello", **rest: Any) -> None:
        self.send(type="generate", id=name, prompt=prompt, **rest)

    def read(self, *names: str) -> dict[str, Reading]:
        """Read all frames of these requests until each has ended, n choices each."""
        readings = {name: Reading() for name in names}
        while not all(reading.ended for reading in readings.values()):
            frame = self.next()
            if frame.get("id") in readings:
                readings[frame["id"]].take(frame)
        return readings

    def close(self) -> None:
        self.connection.close()

    def drop(self) -> None:
        """Lose the connection without a word, as a phone in a tunnel does."""
        self.connection.socket.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Reading:
    """What a client knows of one request."""

    def __init__(self) -> None:
        self.accepted: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self.text: dict[int, str] = {}
        self.cursors: dict[int, int] = {}
        self.done: dict[int, dict[str, Any]] = {}
        self.token_ids: list[int] = []
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []  # of one choice

    @property
    def ended(self) -> bool:
        return self.error is not None or (self.accepted is not None and len(self.done) == self.accepted["n"])

    def take(self, frame: dict[str, Any]) -> None:
        match frame["type"]:
            case "accepted":
                self.accepted = frame
            case "error":
                self.error = frame["error"]
            case "delta" | "done":
                choice = frame["choice"]
                assert frame["cursor"] >= self.cursors.get(choice, 0)
                self.text[choice] = self.text.get(choice, "") + frame["text"]
                self.cursors[choice] = frame["cursor"]
                self.token_ids += frame.get("token_ids", [])
                self.reasoning += frame.get("reasoning_content", "")
                self._take_calls(frame.get("tool_calls", ()))
                if frame["type"] == "done":
                    assert choice not in self.done
                    self.done[choice] = frame

    def _take_calls(self, entries: Any) -> None:
        """Put streamed calls together as OpenAI's clients do."""
        for entry in entries:
            if entry["index"] == len(self.calls):
                assert entry["type"] == "function"
                self.calls.append({"id": entry["id"], "type": "function", "function": dict(entry["function"])})
            else:
                assert set(entry["function"]) == {"arguments"}
                self.calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]


@contextlib.contextmanager
def open_socket(server: Server, *, binary: bool = False, **options: Any) -> Iterator[Socket]:
    protocol = MSGPACK_SUBPROTOCOL if binary else JSON_SUBPROTOCOL
    with connect(
        f"ws://127.0.0.1:{server.port}{SOCKET_PATH}", subprotocols=[protocol], compression=None, **options
    ) as connection:
        yield Socket(connection, binary=binary)


def wait_until(condition: Any, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
