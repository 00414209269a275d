"""An engine that does what a test says, over the real wire: a ROUTER in a thread that runs the wire's codec.

The real engine's behaviour is tested with the real engine; this one refuses, falls silent, dies in the middle of a
stream and comes back, whenever a test wants it.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq

from inferengine.simulation.simulated_executor import simulated_embedding
from inferengine.text import fingerprint
from inferengine.wire import codec, sockets
from inferengine.wire.messages import (
    READY,
    Accept,
    Admin,
    AdminReply,
    Cancel,
    Done,
    Hello,
    Model,
    ModelFiles,
    ModelInfo,
    Ping,
    Pong,
    Reject,
    Step,
    Submit,
    Welcome,
)
from tests.text.vocabularies import CONFIG, byte_level

TEMPLATE = (
    "{% if reasoning_effort %}<effort>{{ reasoning_effort }}{% endif %}"
    "{% for document in documents or [] %}<document>{{ document.text }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_MODEL_LEN = 512
EMBEDDING_SIZE = 8


class Script(NamedTuple):
    """What becomes of one request. Tokens leave `chunk` at a time, `pause_s` apart; `stop_after` of them the engine
    falls silent; `refusal` answers instead of ACCEPT."""

    token_ids: list[int] = []  # noqa: RUF012  (never changed in place)
    reason: str = "length"
    detail: Any = None
    chunk: int = 1
    pause_s: float = 0.0
    stop_after: int | None = None
    refusal: Reject | None = None
    accept: bool = True
    logprobs: list[Any] | None = None
    cached_tokens: int = 0
    guesses: tuple[int, int] = (0, 0)  # right and wrong


class _Running:
    def __init__(self, peer: bytes, stream: int, script: Script, prompt_tokens: int) -> None:
        self.peer, self.stream, self.script, self.prompt_tokens = peer, stream, script, prompt_tokens
        self.sent = 0
        self.next_s = 0.0
        self.embedding: bytes | None = None

    @property
    def is_silent(self) -> bool:
        """Nothing more will come of it."""
        return self.script.stop_after is not None and self.sent >= self.script.stop_after


def model_files() -> dict[str, bytes]:
    config = {**json.loads(CONFIG), "chat_template": TEMPLATE}
    return {"tokenizer.json": byte_level().to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


FILES = model_files()


def model_info(**changes: Any) -> ModelInfo:
    info = ModelInfo("tiny", fingerprint(FILES), 302, MAX_MODEL_LEN, (1,), 16, 4096, "float32")
    info = info._replace(embedding_size=EMBEDDING_SIZE, pooling="last")
    return info._replace(**changes)


class ScriptedEngine:
    """Start it with `with`; `script` is called with each SUBMIT and the choice's number."""

    def __init__(self, address: str, script: Callable[[Submit, int], Script], *, state: str = READY) -> None:
        self.address = address
        self.script = script
        self.state = state
        self.info = model_info()
        self.epoch = secrets.token_bytes(8)
        self.submits: list[Submit] = []
        self.cancelled: list[int] = []
        self.admin: dict[str, Any] = {}
        self.loop_age_ms = 0.5
        self.lease_s = 1.0
        self._seq: dict[bytes, int] = {}
        self._running: list[_Running] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ScriptedEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Gone without a word; `start` brings up another epoch."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.epoch = secrets.token_bytes(8)
        self._running.clear()
        self._seq.clear()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = sockets.engine_router(context, 2**24)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(self.address)
        try:
            while not self._stop.is_set():
                now = time.monotonic()
                wait_ms = 0 if any(one.next_s <= now and not one.is_silent for one in self._running) else 5
                if router.poll(wait_ms):
                    peer, *frames = router.recv_multipart()
                    for answer in self._answer(peer, codec.decode(frames)):
                        self._send(router, peer, answer)
                self._step(router)
        finally:
            context.destroy(linger=0)

    def _answer(self, peer: bytes, message: Any) -> list[Any]:
        if isinstance(message, Hello):
            self._seq[peer] = 0
            self._running = [one for one in self._running if one.peer != peer]
            resumed = None if message.epoch is None else False
            return [
                Welcome(
                    "scripted",
                    self.epoch,
                    self.state,
                    model=self.info,
                    heartbeat_s=0.2,
                    lease_s=self.lease_s,
                    resumed=resumed,
                )
            ]
        if isinstance(message, Submit):
            return self._submit(peer, message)
        if isinstance(message, Cancel):
            self.cancelled += message.streams
            ended = [one for one in self._running if one.stream in message.streams]
            self._running = [one for one in self._running if one not in ended]
            return [self._done(one, "abort", ["cancelled", "cancelled"]) for one in ended]
        if isinstance(message, Model):
            return [ModelFiles(self.info.fingerprint, FILES)]
        if isinstance(message, Ping):
            return [Pong(message.nonce, self.loop_age_ms, self.state, self.epoch)]
        if isinstance(message, Admin):
            known = message.op in self.admin
            return [AdminReply(message.op, message.nonce, known, self.admin.get(message.op), "not_found", "no such op")]
        return []

    def _submit(self, peer: bytes, submit: Submit) -> list[Any]:
        self.submits.append(submit)
        n = int(submit.params.get("n", 1))
        scripts = [self.script(submit, choice) for choice in range(n)]
        if scripts[0].refusal is not None:
            return [scripts[0].refusal._replace(id=submit.id, stream=submit.stream)]
        prompt_tokens = len(submit.prompt or b"") // 4
        if submit.reply == "embedding":
            return self._embed(peer, submit, scripts[0], prompt_tokens)
        self._running += [
            _Running(peer, submit.stream + choice, script, prompt_tokens) for choice, script in enumerate(scripts)
        ]
        return [Accept(submit.id, submit.stream, prompt_tokens, n)] if scripts[0].accept else []

    def _embed(self, peer: bytes, submit: Submit, script: Script, prompt_tokens: int) -> list[Any]:
        """As the engine does: no tokens, and a vector with the end, after the script's pause. A script that is to fall
        silent or fail does."""
        if script.reason == "length":
            script = script._replace(token_ids=[], reason="stop")
        one = _Running(peer, submit.stream, script, prompt_tokens)
        one.next_s = time.monotonic() + script.pause_s
        if script.reason == "stop":
            one.embedding = simulated_embedding(prompt_tokens, submit.pooling == "mean", EMBEDDING_SIZE)
        self._running.append(one)
        return [Accept(submit.id, submit.stream, prompt_tokens)]

    def _step(self, router: zmq.Socket[bytes]) -> None:
        now = time.monotonic()
        for one in list(self._running):
            script = one.script
            limit = len(script.token_ids) if script.stop_after is None else script.stop_after
            if one.next_s > now or one.is_silent:
                continue
            one.next_s = now + script.pause_s
            tokens = script.token_ids[one.sent : min(one.sent + script.chunk, limit)]
            rows = script.logprobs[one.sent : one.sent + len(tokens)] if script.logprobs else []
            one.sent += len(tokens)
            done = one.sent >= len(script.token_ids)
            step = self._next(one, tokens, rows)
            if done:
                self._running.remove(one)
                step = step._replace(done=self._done(one, script.reason, script.detail, step.seq).done)
                if one.embedding is not None:
                    step = step._replace(embeddings=[(one.stream, one.embedding)])
            self._send(router, one.peer, step)

    def _send(self, router: zmq.Socket[bytes], peer: bytes, message: Any) -> None:
        try:
            router.send_multipart([peer, *codec.encode(message)])
        except zmq.ZMQError as error:  # the peer is gone
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._running = [one for one in self._running if one.peer != peer]

    def _next(self, one: _Running, tokens: list[int], rows: list[Any]) -> Step:
        seq = self._seq[one.peer] = self._seq[one.peer] + 1
        logprobs = [(one.stream, rows)] if rows else []
        return Step(seq, 0, array("I", [one.stream]), array("I", tokens), array("I", [len(tokens)]), [], [], logprobs)

    def _done(self, one: _Running, reason: str, detail: Any, seq: int | None = None) -> Step:
        counts = one.prompt_tokens, one.script.cached_tokens, one.sent
        row = Done(one.stream, reason, detail, *counts, 0.1, 0.2, 0.3, *one.script.guesses)
        if seq is None:
            seq = self._seq[one.peer] = self._seq[one.peer] + 1
        return Step(seq, 0, array("I"), array("I"), array("I"), [row])
