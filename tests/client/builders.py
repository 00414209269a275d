"""A Session and the engine at its other end, without sockets and without a clock."""

from __future__ import annotations

from array import array
from typing import Any

from inferengine.client.requests import Finish, OpenRequest
from inferengine.client.session import Session
from inferengine.sampling_params import SamplingParams
from inferengine.wire import messages
from inferengine.wire.messages import RESUME_OUTPUT, Accept, Done, ModelInfo, Step, Submit, Welcome

INFO = ModelInfo("tiny", "ab" * 32, 1000, 4096, (2,), 16, 65_536, "float32", ("pirate",))
WAIT_S = 30.0
SEED = 77


class ScriptedEngine:
    """A Session without sockets, and the engine at its other end: frames and time by hand, one epoch after another."""

    def __init__(self, *, state: str = "READY", features: tuple[str, ...] = (RESUME_OUTPUT,)) -> None:
        self.session = Session(resume_wait_s=WAIT_S, now=0.0)
        self.now = 0.0
        self.epoch, self.seq = 0, 0
        self.features, self.info = features, INFO
        self.session.connected(0.0)
        self.welcome(state)

    def welcome(self, state: str = "READY", *, resumed: bool | None = None) -> None:
        epoch = bytes([self.epoch]) * 8
        self.send(Welcome("e", epoch, state, model=self.info, features=self.features, resumed=resumed))

    def send(self, message: Any) -> None:
        self.session.receive(messages.encode(message), self.now)

    def received(self, kind: type) -> list[Any]:
        """Return the messages of this kind that the session has sent since the last call."""
        sent = [messages.decode(frames) for frames in self.session.outgoing]
        self.session.outgoing.clear()
        return [message for message in sent if isinstance(message, kind)]

    def submit(self, *, accept: bool = True, **fields: Any) -> OpenRequest:
        options = {name: fields.pop(name) for name in OPTIONS & fields.keys()}
        request = self.session.submit([1, 2, 3], SamplingParams(max_tokens=50, **fields), **options)
        (message,) = self.received(Submit)
        if accept:
            seed = None if "seed" in fields else SEED
            self.send(Accept(request.id, message.stream, 3, fields.get("n", 1), seed=seed))
        return request

    def step(self, streams: list[int], tokens: list[int], **extras: Any) -> None:
        self.seq += 1
        self.send(Step(self.seq, self.seq, array("I", streams), array("I", tokens), **extras))

    def end(self, stream: int, reason: str, detail: Any) -> None:
        self.step([], [], done=[Done(stream, reason, detail)])

    def run_until(self, now: float) -> None:
        """Let time pass, for a client that runs all the while."""
        self.session.tick(self.now)
        while self.now < now:
            self.now = min(now, self.now + 0.25)
            self.session.tick(self.now)

    def die(self) -> None:
        self.session.disconnected(self.now)

    def come_back(self, state: str = "READY") -> None:
        self.epoch, self.seq = self.epoch + 1, 0
        self.session.connected(self.now)
        self.session.outgoing.clear()
        self.welcome(state, resumed=False)


OPTIONS = {"resubmit", "reply", "deadline_s", "detached", "adapter"}


def finish_of(request: OpenRequest, choice: int = 0) -> Finish | None:
    collector = request.collectors[choice]
    return collector.take().finish if collector.finished else None


def code_of(request: OpenRequest) -> str:
    finish = finish_of(request)
    assert finish is not None
    return str(finish.detail[0])


def stream_of(request: OpenRequest, choice: int = 0) -> int:
    return request.collectors[choice].stream
