#!/usr/bin/env python3
"""Sends mutated ZeroMQ messages to a running engine, beside an honest client that must notice nothing.

usage: scripts/fuzz_wire.py --address ipc:///run/…/engine.sock [--frames 100000] [--warm-up 30000] [--seed 1]
       [--pid PID]

Every message is a valid one of a kind that a client may send, spoiled in a few ways: values of other types, extreme
numbers, absurd parameters, grammars and tokens, missing and doubled frames, deep nesting, ext types, broken UTF-8,
other versions, cut and changed bytes, messages before HELLO, odd and colliding routing ids. ADMIN never drains the
engine or cancels what others run. A seed stands for its messages. Meanwhile one client asks for a greedy completion
again and again. First comes a warm-up with messages of another seed, so that what an engine fills once (KV cache,
caches of grammars, the allocator's arenas) is filled; then all is closed, the engine is given time to forget it, and
what it holds is noted. The measured messages follow, and the same again after them. Exit code 1 where the engine was
gone or another at the end, failed at a request (`engine_error`), kept requests, outputs, blocks or peers, or with --pid
descriptors or more memory than --memory says, or where the honest client waited too long or read other tokens than
before. Nobody else may use the engine meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import zmq

from inferengine.client import Client
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.wire.messages import Kind, Reject, Step, decode, header, to_u32

PROMPT = [5, 60, 7, 80, 9]
SAMPLING: dict[str, Any] = {
    "max_tokens": 4, "min_tokens": 0, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 1,
    "stop": ["x"], "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "ignore_eos": True,
    "logit_bias": {"5": 1.0}, "stop_token_ids": [3], "allowed_token_ids": [5, 6, 7], "bad_words_ids": [[5], [6, 7]],
    "logprobs": 1, "prompt_logprobs": 1, "skip_special_tokens": True, "include_stop_str_in_output": False,
}  # fmt: skip
GRAMMARS: list[Any] = [
    ["regex", "[a-z]+", None], ["json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}'],
    ["json_object", None], ["choice", '["a","b"]'], ["lark", 'start: "a" | "b"'], ["lark", "root ::= root"],
    ["regex", "(a|b){1,999}" * 9], ["regex", "(" * 500], ["json_schema", '{"$ref":"#"}'], ["json_schema", "[" * 5000],
    ["structural_tag", '{"structures":[],"triggers":[]}'], ["nope", "x"], [], [None], ["regex"], ["regex", 1], "regex",
    ["json_schema", '{"type":"string","pattern":"(.*a){20}"}'], ["regex", "\x00\ud7ff"], ["choice", "[]"],
]  # fmt: skip
BODIES: dict[int, Any] = {
    Kind.HELLO: {"protocol": [1, 1], "role": "fuzz", "name": "f", "features": ["text"], "window": 8},
    Kind.SUBMIT: {
        "id": b"", "stream": 1, "params": SAMPLING, "reply": "tokens", "priority": 0, "tenant": "fuzz", "salt": b"s",
        "deadline_ms": 20_000, "detached": False, "label": "l", "note": b"n", "adapter": "", "pooling": "",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "grammar": GRAMMARS[0],
        "text": "Once", "messages": [{"role": "user", "content": "Hi"}],
    },
    Kind.CANCEL: {"streams": [1, 2], "ids": [], "leave": False, "stopped": [[1, 1, "x"]]},
    Kind.ATTACH: {"id": b"", "stream": 3, "cursors": [0], "reply": "tokens"},
    Kind.CREDIT: [1],
    Kind.MODEL: {"files": ["tokenizer.json"]},
    Kind.PING: [1],
    Kind.ADMIN: {"op": "stats", "nonce": 1},
    Kind.BYE: {},
}  # fmt: skip
WEIGHTS = {Kind.SUBMIT: 12, Kind.HELLO: 3, Kind.CANCEL: 3, Kind.ATTACH: 3, Kind.CREDIT: 3, Kind.MODEL: 0.2}
ADMIN_OPS = ("stats", "config", "flush", "adapters", "resume", "load_adapter", "unload_adapter", "nope", "__class__")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, -(2**63), 1e308, -1e308, 5e-324, 0.5,
    float("nan"), float("inf"), float("-inf"), "", "x", "\x00", "é" * 1000, "a" * 60_000, "tokens", "text", "both",
    "embedding", "last", b"", b"\xff" * 16, b"x" * 70_000, [], {}, [[]], [{}], [None], [1, "a"], [2**40], [-1], [""],
    [[1, 2]], [[1, -1, None]], {"": ""}, {"a": None}, {"-1": 1}, {"99999999": -100}, [1] * 3000, ["x"] * 3000,
    [{"role": "user"}], [{"role": 1, "content": "x"}], [{"role": "user", "content": [[]]}], [[[[[[[[]]]]]]]],
    [[5] * 40], list(range(30_000)), [{"role": "tool", "content": [{"type": "text", "text": 1}]}],
)  # fmt: skip
BROKEN_BODIES = (
    b"", b"\xc1", b"\x91" * 5000 + b"\xc0", b"\x81\xa1a" * 3000 + b"\xc0", b"\xdd\xff\xff\xff\xff", b"\xc0\xc0",
    b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc7\x01\x05x", b"\xd4\x01x",
    b"\xd6\xff\x00\x00\x00\x00", b"\xa2\xff\xfe", b"\x81\x01\x02", b"\x81\xc4\x01a\x01", b"\x81\x90\x01", b"\x00" * 99,
    b"\xc9\x00\x00\x00\xff\x01", b"\x81\xa2id\xa2\xff\xfe", b"\x82\xa2id\xc4\x10" + b"i" * 16 + b"\xa2id\x01",
)  # fmt: skip
MAX_PEERS = 48
SEND_MS = 200  # for a message to be taken
BURST = 64  # messages between two looks at the answers
QUIET_S = 1.0  # without an answer, at the end
MEMORY_MB = 32  # growth after the warm-up that passes
WAIT_S = 150.0  # for leases and kept outputs to end
OVERLOADED = ("overloaded", "rate_limited")


class Sent(NamedTuple):
    """One message and who sends it: a peer by number. `fresh`: from a new connection under this routing id."""

    peer: int
    fresh: bytes | None
    frames: list[bytes]


def messages(seed: int, count: int) -> Iterator[Sent]:
    """Yield the messages of a seed."""
    draw = random.Random(seed)
    ids = [draw.randbytes(16) for _ in range(64)]
    for number in range(count):
        peer = number if number < MAX_PEERS else draw.randrange(MAX_PEERS)
        fresh = _routing_id(draw) if number < MAX_PEERS or draw.random() < 0.004 else None
        if fresh is not None and draw.random() < 0.9:  # the others speak before they say HELLO
            yield Sent(peer, fresh, [header(Kind.HELLO), _pack(BODIES[Kind.HELLO])])
        else:
            yield Sent(peer, fresh, _spoiled(draw, ids))


def _routing_id(draw: random.Random) -> bytes:
    """Draw a routing id. Some come twice, some are no text, none begins with a zero byte (ZeroMQ refuses those in the
    client)."""
    if draw.random() < 0.8:
        return b"peer%d" % draw.randrange(2**32)
    return draw.choice((b"twin", b"\xff" * 255, b"\x01", b"e" * 255, "é".encode(), b"fuzz%d" % draw.randrange(200)))


def _spoiled(draw: random.Random, ids: list[bytes]) -> list[bytes]:
    kind = draw.choices(list(BODIES), [WEIGHTS.get(kind, 1) for kind in BODIES])[0]
    body = copy.deepcopy(BODIES[kind])
    raw: list[bytes] = []
    if kind == Kind.SUBMIT:
        body, raw = _submission(draw, body)
    if kind == Kind.ADMIN:
        body |= {"op": draw.choice(ADMIN_OPS), "name": draw.choice(("a", "../x", 1, None, "\x00"))}
    if kind in (Kind.SUBMIT, Kind.ATTACH):
        body |= {
            "id": draw.choice(ids) if draw.random() < 0.2 else draw.randbytes(16),
            "stream": draw.randrange(99_999),
        }
    if kind == Kind.CANCEL:
        body |= {"ids": draw.sample(ids, 3), "streams": [draw.randrange(99_999)], "leave": draw.random() < 0.3}
    if kind == Kind.CREDIT:
        body = [draw.choice((0, 1, 2, 5, 9, 2**40))]
    for _ in range(draw.choice((0, 0, 0, 1, 1, 2, 4))):
        body = _spoil(draw, body, kind)
    if kind == Kind.BYE and draw.random() < 0.8:
        kind = Kind.PING  # not to say goodbye all the time
    return _break(draw, [header(kind), _pack(body), *raw])


def _submission(draw: random.Random, body: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    for name in [name for name in body if draw.random() < 0.8 and name not in ("text", "messages", "params")]:
        del body[name]
    kept = {name: value for name, value in body["params"].items() if draw.random() < 0.2}
    body["params"] = kept | {"max_tokens": draw.randrange(1, 9)}
    if "stop" in kept:
        body["reply"] = draw.choice(("text", "both"))
    if "grammar" in body:
        body["grammar"] = copy.deepcopy(draw.choice(GRAMMARS))
    if draw.random() < 0.05:
        body |= {"reply": "embedding", "params": {}}
    given = draw.choices(("raw", "text", "messages", "none", "all"), (8, 2, 2, 0.3, 0.3))[0]
    for name in ("text", "messages"):
        if given not in (name, "all"):
            del body[name]
    if given not in ("raw", "all"):
        return body, []
    prompt = [draw.randrange(draw.choice((300, 300, 300, 2**32))) for _ in range(draw.choice((1, 3, 20, 200)))]
    return body, [to_u32(prompt) + (b"x" * draw.randrange(1, 4) if draw.random() < 0.05 else b"")]


def _spoil(draw: random.Random, document: Any, kind: int) -> Any:
    """Change one thing somewhere inside; never which operation ADMIN asks for."""
    if isinstance(document, dict) and document and draw.random() < 0.9:
        name = draw.choice(list(document))
        if kind == Kind.ADMIN and name == "op":
            return document
        document[name] = (
            _spoil(draw, document[name], kind) if draw.random() < 0.4 else copy.deepcopy(draw.choice(VALUES))
        )
        if draw.random() < 0.2:
            document[draw.choice([*BODIES[Kind.SUBMIT], *SAMPLING, "epoch", "last_seq"])] = copy.deepcopy(
                draw.choice(VALUES)
            )
        return document
    if isinstance(document, list) and document and draw.random() < 0.8:
        place = draw.randrange(len(document))
        document[place] = _spoil(draw, document[place], kind)
        return document
    return copy.deepcopy(draw.choice(VALUES))


def _pack(body: Any) -> bytes:
    try:
        return msgpack.packb(body)  # type: ignore[no-any-return]
    except (ValueError, OverflowError, TypeError):
        return b"\xc0"


def _break(draw: random.Random, frames: list[bytes]) -> list[bytes]:
    """Break one message in four as bytes or as frames."""
    body = frames[1]
    match draw.randrange(48):
        case 0:
            frames[0] = draw.choice(
                (b"", b"IE", b"IE\x01", b"IE\x02\x01", b"XX\x01\x02", b"IE\x01\x00\x00", b"IE\x01\xff")
            )
        case 1:
            frames[0] = b"IE\x01" + bytes((draw.randrange(10, 256),))
        case 2:
            return frames[:1]
        case 3:
            frames.append(draw.randbytes(draw.randrange(9)))
        case 4:
            frames += [b""] * draw.choice((1, 50, 900))
        case 5 | 6 if body:
            place = draw.randrange(len(body))
            frames[1] = body[:place] + bytes((draw.randrange(256),)) + body[place + 1 :]
        case 7:
            frames[1] = body[: draw.randrange(len(body))]
        case 8:
            frames[1] = body + body
        case 9 | 10:
            frames[1] = draw.choice(BROKEN_BODIES)
        case 11:
            frames[1] = draw.randbytes(draw.randrange(1, 300))
        case 12 if len(frames) > 2:
            frames[2] = draw.choice((b"", b"\xff" * 4, b"\x00" * 8, b"\x05\x00\x00\x00" * 20_000, b"abc"))
    return frames


class Peers:
    """The connections of the fuzzer, and what the engine said to them."""

    def __init__(self, address: str) -> None:
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self._address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}

    def send(self, message: Sent) -> None:
        if message.fresh is not None:
            self._connect(message.peer, message.fresh)
        try:
            self._sockets[message.peer].send_multipart(message.frames)
        except zmq.Again:  # another has taken its routing id, and nobody reads this connection any more
            self.answers["connected again: another had the routing id"] += 1
            self._connect(message.peer, b"again%d" % self.answers.total())

    def _connect(self, peer: int, routing_id: bytes) -> None:
        if (old := self._sockets.pop(peer, None)) is not None:
            self._read(old)
            old.close(0)
        socket = self._sockets[peer] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, SEND_MS)
        socket.connect(self._address)

    def read(self) -> None:
        for socket in self._sockets.values():
            self._read(socket)

    def drain(self) -> None:
        """Read until nothing comes any more."""
        known = -1
        while known != self.answers.total():
            known = self.answers.total()
            time.sleep(QUIET_S)
            self.read()

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close(0)
        self._sockets.clear()
        self._context.term()

    def _read(self, socket: zmq.Socket[bytes]) -> None:
        while socket.poll(0):
            answer = decode(socket.recv_multipart())
            name = type(answer).__name__
            if isinstance(answer, Reject):
                about = (answer.field or answer.message).lower()
                name += f" {answer.code}: {re.sub(r'[^a-z .].*', '', about)}"
                if answer.code == "engine_error":
                    self.failures.append(str(answer))
            if isinstance(answer, Step):
                for row in answer.done:
                    self.answers[f"end {row[1]}"] += 1
                    if row[1] == "error" and row[2][0] == "engine_error":
                        self.failures.append(str(row))
            self.answers[name] += 1


@dataclass
class Honest:
    """Asks for the same greedy completion again and again."""

    client: Client
    expected: list[int] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    refused: int = 0
    faults: list[str] = field(default_factory=list)

    def ask(self) -> list[int]:
        """Return the tokens of one request; tried again while the queue is full, as Retry-After says."""
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=16, ignore_eos=True)
        while True:
            try:
                submission = self.client.submit(PROMPT, params, tenant="honest")
                tokens = [token for delta in submission.streams[0] for token in delta.token_ids]
                submission.accepted()
                return tokens
            except InferEngineError as error:
                if error.code not in OVERLOADED:
                    raise
                self.refused += 1
                time.sleep(0.1)

    def run(self, stop: threading.Event, bound_s: float) -> None:
        while not stop.wait(0.2):
            begin = time.monotonic()
            try:
                tokens = self.ask()
            except Exception as error:
                self.faults.append(f"the honest client's request {len(self.waits_s)}: {error!r}")
                return
            took_s = time.monotonic() - begin
            self.waits_s.append(took_s)
            if tokens != self.expected:
                self.faults.append(f"the honest client read {tokens}, expected {self.expected}")
            if took_s > bound_s:
                self.faults.append(f"the honest client waited {took_s:.1f} s")


@dataclass
class Report:
    """What a run found."""

    answers: Counter[str]
    faults: list[str]
    lines: list[str]


class Usage(NamedTuple):
    """What the engine's process holds."""

    memory_mb: int
    descriptors: int

    def __str__(self) -> str:
        return f"{self.memory_mb} MB and {self.descriptors} descriptors"


def run(
    address: str,
    seed: int,
    count: int,
    *,
    warm_up: int = 0,
    pid: int = 0,
    bound_s: float = 10.0,
    wait_s: float = WAIT_S,
    memory_mb: int = MEMORY_MB,
) -> Report:
    """Send the messages of a seed, after `warm_up` messages of another. `pid`: of the engine, whose memory and
    descriptors are told; the former may grow by `memory_mb`."""
    client = Client(address, name="honest")
    with contextlib.ExitStack() as at_end:
        at_end.callback(client.close)
        epoch = client.connect(30.0).epoch
        honest = Honest(client)
        honest.expected = honest.ask()
        began = time.monotonic()
        honest.ask()
        alone_s = time.monotonic() - began
        peers_before = client.admin("stats")["peers"]
        usages = {"at first": _usage(pid)}
        failures: list[str] = []
        if warm_up:
            warm_answers = Peers(address)
            at_end.callback(warm_answers.close)
            _send_all(warm_answers, honest, messages(~seed, warm_up), bound_s)
            warm_answers.close()
            _settled(client, wait_s, peers_before, pid, usages["at first"])
            failures += warm_answers.failures
            usages["after the warm-up"] = _usage(pid)
        client.admin("flush")  # caches fill up to their bounds: what they hold is no growth
        before = usages["flushed"] = _usage(pid)
        peers = Peers(address)
        at_end.callback(peers.close)
        began = time.monotonic()
        _send_all(peers, honest, messages(seed, count), bound_s)
        took_s = time.monotonic() - began
        usages["at the last message"] = _usage(pid)
        peers.close()
        failures += peers.failures
        faults = [*honest.faults, *(f"engine_error: {failure}" for failure in failures)]
        stats = _settled(client, wait_s, peers_before, pid, before)
        if client.connect(30.0).epoch != epoch:
            faults.append("the engine is another process than at the start")
        for name, value in stats.items():
            if value:
                faults.append(f"{name} is {value} at the end")
        if honest.ask() != honest.expected:
            faults.append("the honest client reads other tokens at the end")
        client.admin("flush")
        after = usages["at the end, flushed"] = _usage(pid)
        if before and after and after.memory_mb - before.memory_mb > memory_mb:
            faults.append(f"memory grew by {after.memory_mb - before.memory_mb} MB, more than {memory_mb}")
        if pid and after is None:
            faults.append("the engine's process is gone")
        waits_s = sorted(honest.waits_s) or [0.0]
        lines = [
            f"{count} messages of seed {seed} in {took_s:.1f} s, after {warm_up} to warm up",
            f"honest client: {len(waits_s)} requests, median {waits_s[len(waits_s) // 2]:.2f} s,"
            f" slowest {waits_s[-1]:.2f} s, {honest.refused} told to retry; {alone_s:.2f} s alone",
            "engine: " + ", ".join(f"{usage or '?'} {when}" for when, usage in usages.items()),
            "left at the end: " + ", ".join(f"{value} {name}" for name, value in stats.items()),
        ]
        return Report(peers.answers, faults, lines)


def _send_all(peers: Peers, honest: Honest, sent: Iterator[Sent], bound_s: float) -> None:
    """Send these messages beside the honest client, and read what comes."""
    stop = threading.Event()
    asking = threading.Thread(target=honest.run, args=(stop, bound_s))
    asking.start()
    try:
        for number, message in enumerate(sent):
            peers.send(message)
            if number % BURST == 0:
                peers.read()
                honest.client.ping()  # the next burst when the engine has turned
        peers.drain()
    finally:
        stop.set()
        asking.join(120.0)


def _settled(client: Client, wait_s: float, peers: int, pid: int, before: Usage | None) -> dict[str, int]:
    """Return what must be zero at the end, after leases and kept outputs have run out. `peers` there were."""
    end = time.monotonic() + wait_s
    while True:
        stats = client.admin("stats")
        left = {name: stats[name] for name in ("active_requests", "running_requests", "waiting_requests")}
        left |= {
            "used_pages": stats["cache"]["used_pages"],
            "kept outputs": stats["held"]["outputs"],
            "other peers": stats["peers"] - peers,
        }
        if before is not None and (usage := _usage(pid)) is not None:
            left["more descriptors"] = max(0, usage.descriptors - before.descriptors)
        if not any(left.values()) or time.monotonic() > end:
            return left | {"failed_steps": stats["failed_steps"]}
        time.sleep(0.5)


def _usage(pid: int) -> Usage | None:
    """Return the usage of a process; None: of nobody, or that process is gone."""
    if pid:
        with contextlib.suppress(OSError):
            found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
            return Usage(int(found[1]) // 1024 if found else 0, len(os.listdir(f"/proc/{pid}/fd")))
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True, help="of the engine: its wire.socket")
    parser.add_argument("--frames", type=int, default=100_000, help="messages to send")
    parser.add_argument("--warm-up", type=int, default=30_000, help="messages to send before these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pid", type=int, default=0, help="of the engine, whose memory and descriptors are told")
    parser.add_argument("--bound", type=float, default=10.0, help="longest that the honest client may wait, in seconds")
    parser.add_argument("--memory", type=int, default=MEMORY_MB, help="MB that the engine may grow by after warm-up")
    wanted = parser.parse_args()
    report = run(
        wanted.address,
        wanted.seed,
        wanted.frames,
        warm_up=wanted.warm_up,
        pid=wanted.pid,
        bound_s=wanted.bound,
        memory_mb=wanted.memory,
    )
    for name, number in report.answers.most_common():
        print(f"{number:8d}  {name}")
    for line in [*report.faults[:50], *report.lines, f"{len(report.faults)} faults"]:
        print(line)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
