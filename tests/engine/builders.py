"""An engine in this process with real sockets, threads and a simulated device; and a client of bare frames."""

from __future__ import annotations

import itertools
import json
import math
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import zmq

from inferengine.client import Client
from inferengine.config import Config
from inferengine.core.executor import Capacity, Executor, StepPlan
from inferengine.engine.loop import RelayLoop
from inferengine.engine.model_info import ModelCard, pooling_of
from inferengine.engine.service import EngineService
from inferengine.observability.tracing import Tracing
from inferengine.sampling_params import SamplingParams
from inferengine.simulation.simulated_executor import SimulatedExecutor, make_capacity
from inferengine.text import fingerprint
from inferengine.wire import messages
from inferengine.wire.curve import ClientKeys
from inferengine.wire.messages import (
    Accept,
    Credit,
    Done,
    Hello,
    Message,
    Ping,
    Pong,
    Reject,
    Step,
    Submit,
    Welcome,
)
from tests.text.vocabularies import byte_level

VOCAB_SIZE = 302  # of byte_level() with its added tokens
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
_numbers = itertools.count()
_nonces = itertools.count(1000)


def make_card(name: str = "simulated", pooling: str = "last") -> ModelCard:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    files = {"tokenizer.json": byte_level().to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return ModelCard(name, Path("/nowhere"), files, fingerprint(files), (), pooling)


def small_capacity(**sizes: int) -> Capacity:
    capacity = make_capacity(**{"num_blocks": 512, "max_num_seqs": 16, "max_model_len": 1024, **sizes})
    return capacity._replace(vocab_size=VOCAB_SIZE, max_num_batched_tokens=512)


class HeldExecutor(SimulatedExecutor):
    """A device whose steps end when the test lets them: what it looks at does not end meanwhile, however slow it is."""

    def __init__(self, capacity: Capacity | None = None) -> None:
        super().__init__(capacity or small_capacity())
        self._num_steps = 0.0
        self._changed = threading.Condition()

    def let(self, num_steps: float = math.inf) -> None:
        """Let so many more steps end."""
        with self._changed:
            self._num_steps += num_steps
            self._changed.notify()

    def execute(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        future = super().execute(plan)
        result = future.result
        future.result = lambda: (self._wait(), result())[1]  # type: ignore[method-assign]
        return future

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_steps)
            self._num_steps -= 1


@contextmanager
def run_held(capacity: Capacity | None = None, **sections: Any) -> Iterator[tuple[EngineService, HeldExecutor]]:
    """Run a service as `run_service` does, with a HeldExecutor."""
    device = HeldExecutor(capacity)
    with run_service(lambda: device, **sections) as service:
        try:
            yield service, device
        finally:
            device.let()


@contextmanager
def run_service(
    build: Callable[[], Executor | RelayLoop] | None = None,
    *,
    step_s: float = 0.0,
    card: ModelCard | None = None,
    tracing: Tracing | None = None,
    **sections: Any,
) -> Iterator[EngineService]:
    """Yield a started engine, READY. It is aborted at the end, and must have given everything back."""
    with tempfile.TemporaryDirectory(prefix="ie-") as folder:
        config = make_config(folder, **sections)
        make = build or (lambda: SimulatedExecutor(small_capacity(), step_s=step_s))
        service = EngineService(
            config, card or make_card(pooling=pooling_of(config, Path("/nowhere"))), make, tracing=tracing
        )
        service.start()
        try:
            wait_until(lambda: service.lifecycle.state == "READY" or service.wait(0.0) is not None)
            yield service
        finally:
            end(service)


def end(service: EngineService) -> None:
    """Abort the engine, which does not wait for clients: those of most tests neither acknowledge nor say BYE."""
    with patch.multiple("inferengine.engine.service", DELIVERY_S=0.0, FAILED_DELIVERY_S=0.0, FAREWELL_S=0.0):
        service.abort()
        assert service.wait(60.0) is not None, "the engine did not end"


def make_config(folder: str, **sections: Any) -> Config:
    number = next(_numbers)
    sections.setdefault("wire", {}).setdefault("socket", f"ipc://{folder}/{number}.sock")
    return Config().with_values(**sections)


def address_of(service: EngineService) -> str:
    return service.config.wire.socket


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out waiting"
        time.sleep(0.002)


def check_idle(service: EngineService) -> None:
    """Check that everything has been given back."""
    core = service.core
    assert core is not None
    wait_until(lambda: not core.has_work and not service.io.publisher.num_open)
    core.scheduler.check()
    assert core.scheduler.snapshot().num_blocks_held == 0


def tokens_of(client: Client) -> int:
    """Return how many tokens a request for four of them gives."""
    stream = client.submit([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)).streams[0]
    return sum(len(delta.token_ids) for delta in stream)


def assert_served(*addresses: str, curve: ClientKeys | None = None) -> None:
    """Check that a new client, with these keys, is served at each of these addresses."""
    for address in addresses:
        client = Client(address, curve=curve)
        try:
            client.connect(60.0)
            assert tokens_of(client) == 4
        finally:
            client.close()


def assert_asks_for_keys(address: str) -> None:
    """Check that a client without keys gets no answer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address)
    stranger.send_multipart(messages.encode(Hello()))
    assert not stranger.poll(500)
    context.destroy(linger=0)


class RawClient:
    """A client made of a DEALER and the codec: it does exactly what the test says, and nothing by itself."""

    def __init__(
        self,
        address: str,
        *,
        routing_id: bytes | None = None,
        greet: bool = True,
        drops_unread: bool = False,
        **hello: Any,
    ) -> None:
        """`drops_unread`: what is unread when the connection ends is lost, as the sockets of our clients have it."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if drops_unread:
            self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.ROUTING_ID, routing_id or secrets.token_hex(8).encode())
        self.socket.connect(address)
        self.pending: list[Message] = []
        self.welcome: Welcome | None = None
        self.last_seq = 0
        if greet:
            self.send(Hello(name="raw", **hello))
            self.welcome = self.expect(Welcome)
            # STEPs that came before were for the connection that this one took over from; they are sent again.
            self.pending = [message for message in self.pending if not isinstance(message, Step)]

    def send(self, message: Message) -> None:
        self.send_frames(messages.encode(message))

    def send_frames(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def receive(self, timeout_s: float = 5.0) -> Message | None:
        """Return the next message, or None when none comes."""
        if self.pending:
            return self.pending.pop(0)
        if not self.socket.poll(int(timeout_s * 1e3)):
            return None
        message = messages.decode(self.socket.recv_multipart())
        if isinstance(message, Step):
            self.last_seq = message.seq
        return message

    def expect(self, kind: type, timeout_s: float = 60.0) -> Any:
        """Return the next message of this kind; others that come before are put aside."""
        aside: list[Message] = []
        end = time.monotonic() + timeout_s
        while (message := self.receive(max(0.0, end - time.monotonic()))) is not None:
            if isinstance(message, kind):
                self.pending = aside + self.pending
                return message
            aside.append(message)
        raise AssertionError(f"no {kind.__name__} came, only {aside}")

    def submit(self, stream: int, *, max_tokens: int = 4, prompt: list[int] | None = None, **fields: Any) -> Submit:
        params = {"max_tokens": max_tokens, "ignore_eos": True, **fields.pop("params", {})}
        prompt_frame = None if {"text", "messages"} & fields.keys() else messages.to_u32(prompt or [1, 2, 3])
        message = Submit(
            fields.pop("id", None) or secrets.token_bytes(16), stream, prompt_frame, params=params, **fields
        )
        self.send(message)
        return message

    def collect(self, streams: set[int], timeout_s: float = 60.0, credit: bool = True) -> Collected:
        """Read until every one of `streams` has its terminal event."""
        collected = Collected()
        open_streams = set(streams)
        end = time.monotonic() + timeout_s
        while open_streams:
            message = self.receive(max(0.0, end - time.monotonic()))
            assert message is not None, f"streams {open_streams} never ended"
            collected.take(message)
            if isinstance(message, Step) and credit:
                self.send(Credit(message.seq))
            open_streams -= collected.ended
        return collected

    def ping(self, nonce: int = 1) -> None:
        self.send(Ping(nonce))

    def settle(self) -> None:
        """Return when the engine has handled everything that was sent."""
        nonce = next(_nonces)
        self.ping(nonce)
        while self.expect(Pong).nonce != nonce:
            continue

    def close(self) -> None:
        self.context.destroy(linger=0)


class Collected:
    """What a client has received, by stream."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.done: dict[int, list[Done]] = {}
        self.rejects: dict[int, list[Reject]] = {}
        self.accepts: dict[int, list[Accept]] = {}
        self.steps: list[Step] = []

    @property
    def ended(self) -> set[int]:
        return self.done.keys() | self.rejects.keys()

    def take(self, message: Message) -> None:
        if isinstance(message, Accept):
            self.accepts.setdefault(message.stream, []).append(message)
        elif isinstance(message, Reject) and message.stream is not None:
            self.rejects.setdefault(message.stream, []).append(message)
        elif isinstance(message, Step):
            self.steps.append(message)
            place = 0
            for index, stream in enumerate(message.streams):
                count = 1 if message.counts is None else message.counts[index]
                self.tokens.setdefault(stream, []).extend(message.tokens[place : place + count])
                place += count
            for stream, text in message.text:
                self.text[stream] = self.text.get(stream, "") + text
            for row in message.done:
                self.done.setdefault(row.stream, []).append(row)
