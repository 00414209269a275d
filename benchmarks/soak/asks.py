"""Makes one request over a front end or the wire, and checks strictly that each choice ends once and nothing follows.

A request is a Case of benchmarks.kill_streams, read in one of four manners: to the end, slowly, cancelled in the
middle, or detached, left and resumed. The text of a request that ended is compared with the case's reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from benchmarks.kill_streams import Case
from benchmarks.soak.service import Key, Service
from inferengine.client import AsyncClient, Stream, Submission
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import read_grammar

MANNERS = ("read", "slow", "cancel", "resume")
SLOW_S = 0.15  # between two reads of a slow reader
RESUME_S = 90.0  # how long a client tries to resume
LONGEST_S = 420.0  # a request that takes longer hangs
Texts = list[tuple[str, Any]]  # per choice: text (and calls), finish reason


class Lost(Exception):
    """The connection ended before the request did."""


class Refused(Exception):
    """The request was refused before it was accepted, with status 429 or 503."""


class Wrong(Exception):
    """Something happened that must never happen."""


class Times:
    """Arrival times of a stream's output, in seconds."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.first_s: float | None = None
        self.gaps_s: list[float] = []
        self._last_s = 0.0

    def note(self) -> None:
        """Record that output arrived."""
        now = time.monotonic()
        if self.first_s is None:
            self.first_s = now - self.started_s
        else:
            self.gaps_s.append(now - self._last_s)
        self._last_s = now


class Result(NamedTuple):
    """How a request went. `kind`: ended, cancelled, refused, lost, wrong."""

    kind: str
    detail: str
    texts: Texts | None
    times: Times


class Asker:
    """A client of one service, over HTTP, websocket and the wire."""

    def __init__(self, service: Service) -> None:
        self.service = service
        limits = httpx.Limits(max_connections=None, keepalive_expiry=30.0)
        self.http = httpx.AsyncClient(base_url=service.http, timeout=httpx.Timeout(LONGEST_S), limits=limits)
        self.wire = AsyncClient(service.engine, name="soak")
        self.second = AsyncClient(service.engine, name="soak-second")

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()
        await self.wire.close()
        await self.second.close()

    async def ask(self, case: Case, manner: str, key: Key, draw: random.Random) -> Result:
        """Make a request and read it in its manner. Never raises: the result tells what happened."""
        times = Times()
        try:
            async with asyncio.timeout(LONGEST_S):
                texts = await getattr(self, f"_{case.kind}")(case, manner, key, draw, times)
            return Result("cancelled" if texts is None else "ended", "", texts, times)
        except Refused as error:
            return Result("refused", str(error), None, times)
        except (Lost, httpx.TransportError, WebSocketException, OSError) as error:
            if isinstance(error, TimeoutError):
                return Result("wrong", f"no end after {LONGEST_S:g} s", None, times)
            return Result("lost", f"{type(error).__name__}: {error}"[:200], None, times)
        except Wrong as error:
            return Result("wrong", str(error)[:400], None, times)
        except Exception as error:
            return Result("wrong", f"{type(error).__name__}: {error}"[:400], None, times)

    # -- HTTP --------------------------------------------------------------------------------------------------------

    async def _json(self, case: Case, manner: str, key: Key, draw: random.Random, times: Times) -> Texts | None:
        asking = asyncio.ensure_future(self.http.post(_path(case.body), json=case.body, headers=key.headers))
        if manner == "cancel":
            await asyncio.wait([asking], timeout=draw.random())
            if not asking.done():
                asking.cancel()
                await asyncio.wait([asking])
                return None
        try:
            response = await asking
        except asyncio.CancelledError:
            asking.cancel()
            raise
        _check(response, response.text)
        return [_document(choice) for choice in response.json()["choices"]]

    async def _sse(self, case: Case, manner: str, key: Key, draw: random.Random, times: Times) -> Texts | None:
        choices: dict[int, list[Any]] = {}
        headers, body = dict(key.headers), {**case.body, "stream": True}
        cut = draw.randrange(1, 40) if manner in ("cancel", "resume") else None
        stream_id = None
        if manner == "resume":
            stream_id = headers["x-stream-id"] = secrets.token_hex(16)
            body["detached"] = True
        last_id, deadline = None, time.monotonic() + RESUME_S
        method, path = "POST", _path(body)
        while True:
            try:
                async with self.http.stream(method, path, json=body or None, headers=headers) as response:
                    if response.status_code != 200:
                        _check(response, (await response.aread()).decode())
                    held: list[dict[str, Any]] = []  # events that came before the id of their piece
                    async for event_id, event in _events(response):
                        if event is None:
                            for one in held:
                                _add(choices, one)
                            return _whole(choices)
                        held.append(event)
                        if event_id is None and stream_id is not None:
                            continue
                        last_id = event_id or last_id
                        for one in held:
                            _add(choices, one)
                        held.clear()
                        times.note()
                        if manner == "slow":
                            await asyncio.sleep(SLOW_S)
                        if cut is not None and (cut := cut - 1) <= 0:
                            break
            except (Lost, Refused, httpx.TransportError) as error:
                if stream_id is None or last_id is None or time.monotonic() > deadline:
                    raise
                if isinstance(error, Refused):
                    await asyncio.sleep(1.0)
            if manner == "cancel":
                return None
            assert stream_id is not None
            cut = None
            await asyncio.sleep(draw.random() * 2.0)
            method, path, body = "GET", f"/v1/streams/{stream_id}", {}
            headers = {**key.headers, **({"Last-Event-ID": last_id} if last_id else {})}

    # -- websocket ---------------------------------------------------------------------------------------------------

    async def _ws(self, case: Case, manner: str, key: Key, draw: random.Random, times: Times) -> Texts | None:
        other = ("prompt", "messages", "guided_regex")
        params = {name: value for name, value in case.body.items() if name not in other}
        if "logit_bias" in params:
            params["logit_bias"] = [[int(token), value] for token, value in params["logit_bias"].items()]
        frame: dict[str, Any] = {"type": "generate", "id": "a", "params": params}
        frame |= {name: case.body[name] for name in ("prompt", "messages") if name in case.body}
        if "guided_regex" in case.body:
            frame["structured_outputs"] = {"regex": case.body["guided_regex"]}
        reader = SocketReader(case, manner, draw, times)
        if manner == "resume":
            frame |= {"detached": True, "request_id": secrets.token_hex(16)}
        deadline = time.monotonic() + RESUME_S
        while True:
            try:
                async with connect(
                    self.service.ws, additional_headers=key.headers, max_size=None, open_timeout=30.0
                ) as socket:
                    await socket.send(json.dumps(frame))
                    if await reader.read(socket):
                        return None if manner == "cancel" else reader.texts
            except (Lost, Refused, WebSocketException, OSError) as error:
                if manner != "resume" or not reader.cursors or time.monotonic() > deadline:
                    raise
                if isinstance(error, Refused):
                    await asyncio.sleep(1.0)
            await asyncio.sleep(draw.random() * 2.0)
            if reader.cursors:
                frame = {
                    "type": "resume", "id": "a", "request_id": reader.request_id, "context_ids": reader.context_ids,
                    "cursors": reader.cursors, "params": params, "detached": True,
                }  # fmt: skip

    # -- wire --------------------------------------------------------------------------------------------------------

    async def _wire(self, case: Case, manner: str, key: Key, draw: random.Random, times: Times) -> Texts | None:
        client = self.wire
        try:
            if manner == "resume":  # a client of its own, whose connection is closed in the middle
                client = AsyncClient(self.service.engine, name="soak-resume", status_address="")
            submission = await self._submit(client, case, manner)
            reader = WireReader(submission, manner, draw, times)
            try:
                await reader.read(submission)
                if not reader.ended and manner == "resume":
                    await client.close()
                    await asyncio.sleep(draw.random() * 2.0)
                    await self.second.wait_ready(RESUME_S)
                    cursors = [len(text) for text, _ in reader.texts]
                    submission = self.second.attach(submission.id, cursors, len(cursors), "text")
                    await reader.read(submission, again=True)
            except asyncio.CancelledError:
                submission.cancel()
                raise
            if not reader.ended:
                raise Wrong("a stream of the wire stopped without an end")
            return None if manner == "cancel" else reader.texts
        finally:
            if client is not self.wire:
                await client.close()

    async def _submit(self, client: AsyncClient, case: Case, manner: str) -> Submission:
        body = dict(case.body)
        prompt, regex = body.pop("prompt"), body.pop("guided_regex", None)
        if "logit_bias" in body:
            body["logit_bias"] = tuple((int(token), value) for token, value in body["logit_bias"].items())
        if "stop" in body:
            body["stop"] = tuple(body["stop"])
        grammar = None if regex is None else read_grammar({"guided_regex": regex})
        try:
            await client.connect(30.0)
            submission = client.submit(
                params=SamplingParams(**body), text=prompt, reply="text", grammar=grammar, detached=manner == "resume"
            )
            await submission.accepted()
        except InferEngineError as error:
            if error.code in ("engine_unavailable", "overloaded", "draining"):
                raise Refused(error.code) from None
            raise Wrong(f"refused: {error.code} {error}") from None
        return submission


class WireReader:
    """Reads all choices of a submission, and of the one that attaches to it after the connection was closed."""

    def __init__(self, submission: Submission, manner: str, draw: random.Random, times: Times) -> None:
        self._manner, self._times = manner, times
        self._cut = draw.randrange(1, 40) if manner in ("cancel", "resume") else 0
        self._got: list[list[Any]] = [["", None] for _ in submission.streams]

    @property
    def texts(self) -> Texts:
        """What was read."""
        return [(text, reason) for text, reason in self._got]

    @property
    def ended(self) -> bool:
        """Whether each choice has ended."""
        return all(reason is not None for _, reason in self._got)

    async def read(self, submission: Submission, *, again: bool = False) -> None:
        """Read to the end, or to the point where the connection is to be closed."""
        streams = enumerate(submission.streams)
        await asyncio.gather(*(self._stream(place, stream, submission, again) for place, stream in streams))

    async def _stream(self, place: int, stream: Stream, submission: Submission, again: bool) -> None:
        got = self._got[place]
        async for delta in stream:
            self._times.note()
            if got[1] is not None:
                if again and not delta.text:  # the end of a choice is sent again after an attach
                    continue
                raise Wrong("output after the end")
            got[0] += delta.text
            if delta.finish is not None:
                got[1] = _wire_reason(delta.finish, self._manner)
                continue
            if self._manner == "slow":
                await asyncio.sleep(SLOW_S)
            self._cut -= 1
            if self._cut == 0 and self._manner == "cancel":
                submission.cancel()
            elif self._cut == 0:
                return


class SocketReader:
    """Reads one request, over several sockets if it is resumed."""

    def __init__(self, case: Case, manner: str, draw: random.Random, times: Times) -> None:
        self._manner, self._draw, self._times = manner, draw, times
        self._cut = draw.randrange(1, 40) if manner in ("cancel", "resume") else 0
        self._got: list[list[Any]] = []
        self.cursors: list[int] = []
        self.request_id, self.context_ids = "", list[int]()

    @property
    def texts(self) -> Texts:
        """What was read."""
        return [(text, reason) for text, reason in self._got]

    async def read(self, socket: ClientConnection) -> bool:
        """Read from a socket. Returns whether the request has ended; otherwise it is to be resumed."""
        accepted = False
        ended = [False] * len(self.cursors)
        while True:
            message = json.loads(await socket.recv())
            kind = message["type"]
            if kind == "error":
                code = message["error"]["code"]
                if message["error"]["retryable"] and not accepted:
                    raise Refused(code)
                raise Wrong(f"error frame {json.dumps(message['error'])}")
            if kind == "accepted":
                accepted = True
                self.request_id, self.context_ids = message["request_id"], message["context_ids"]
                if not self.cursors:
                    self.cursors, self._got = [0] * message["n"], [["", None] for _ in range(message["n"])]
                    ended = [False] * message["n"]
            if kind not in ("delta", "done"):
                continue
            choice = message["choice"]
            if ended[choice]:
                raise Wrong(f"a frame {kind} after the end of its choice")
            self._times.note()
            if self._got[choice][1] is None or self._manner != "resume":  # done frames are sent again after a resume
                self._got[choice][0] += message["text"] + _calls(message.get("tool_calls"))
            self.cursors[choice] = message["cursor"]
            if kind == "done":
                ended[choice] = True
                self._got[choice][1] = message["finish_reason"]
            if all(ended):
                await self._nothing_follows(socket)
                if self._manner != "cancel" and any(reason == "cancelled" for _, reason in self._got):
                    raise Wrong("cancelled, though nobody did")
                return True
            if self._manner == "slow":
                await asyncio.sleep(SLOW_S)
            self._cut -= 1
            if self._cut == 0:
                if self._manner == "resume":
                    return False
                await socket.send(json.dumps({"type": "cancel", "id": "a"}))

    async def _nothing_follows(self, socket: ClientConnection) -> None:
        """Check that the socket still works after the end of a request, and sends no more frames about it."""
        try:
            await socket.send(json.dumps({"type": "ping", "nonce": "after"}))
            while (message := json.loads(await socket.recv()))["type"] != "pong":
                if message.get("id") == "a":
                    raise Wrong(f"a frame {message['type']} after the end of the request")
        except WebSocketException:  # the front end was killed after the end
            return


async def bad_request(asker: Asker, key: Key, draw: random.Random) -> str:
    """Make a request that must be refused with a certain status. Returns what was wrong with the answer, or ""."""
    good: dict[str, Any] = {"prompt": "x", "max_tokens": 4}
    broken = {**key.headers, "Content-Type": "application/json"}
    cases: list[tuple[int, Callable[[], Any]]] = [
        (400, lambda: asker.http.post("/v1/completions", json={**good, "top_p": 7}, headers=key.headers)),
        (400, lambda: asker.http.post("/v1/completions", json={**good, "max_tokens": 10**7}, headers=key.headers)),
        (400, lambda: asker.http.post("/v1/completions", json={"prompt": "word " * 90_000}, headers=key.headers)),
        (400, lambda: asker.http.post("/v1/completions", json={**good, "guided_regex": "("}, headers=key.headers)),
        (400, lambda: asker.http.post("/v1/chat/completions", json={"messages": 5}, headers=key.headers)),
        (400, lambda: asker.http.post("/v1/completions", content=b"{", headers=broken)),
        (401, lambda: asker.http.post("/v1/completions", json=good, headers={"Authorization": "Bearer ie_no"})),
        (401, lambda: asker.http.post("/v1/completions", json=good)),
        (403, lambda: asker.http.post("/abort_requests", json={}, headers=key.headers)),
        (404, lambda: asker.http.post("/v1/completions", json={**good, "model": "none"}, headers=key.headers)),
        (404, lambda: asker.http.get("/v1/nothing", headers=key.headers)),
    ]  # fmt: skip
    wanted, ask = draw.choice(cases)
    try:
        response = await ask()
    except httpx.TransportError as error:
        return f"lost: {type(error).__name__}"
    if response.status_code == wanted:
        return ""
    if response.status_code == 503:
        return f"refused: {_code(response.text)}"
    return f"wrong: {response.status_code} instead of {wanted}: {response.text[:200]}"


# -- parts -------------------------------------------------------------------------------------------------------------


def _path(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def _code(text: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["code"])
    return text[:100]


def _check(response: httpx.Response, text: str) -> None:
    if response.status_code in (429, 503):
        if "retry-after" not in response.headers:
            raise Wrong(f"{response.status_code} {_code(text)} without Retry-After")
        raise Refused(_code(text))
    if response.status_code != 200:
        raise Wrong(f"{response.status_code} {text[:300]}")


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str | None, dict[str, Any] | None]]:
    """Yield ids and events; the event None stands for [DONE]. Raises Wrong for data after it, Lost without it."""
    event_id, done = None, False
    async for line in response.aiter_lines():
        if done and line.strip() and not line.startswith(":"):
            raise Wrong(f"after [DONE]: {line[:100]}")
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line == "data: [DONE]":
            done = True
        elif line.startswith("data: "):
            yield event_id, json.loads(line.removeprefix("data: "))
            event_id = None
    if not done:
        raise Lost("the stream ended without [DONE]")
    yield None, None


def _add(choices: dict[int, list[Any]], event: dict[str, Any]) -> None:
    if "error" in event:
        raise Wrong(f"error event {json.dumps(event['error'])}")
    for choice in event["choices"]:
        got = choices.setdefault(choice["index"], ["", None])
        delta = choice.get("delta", {})
        text = (choice.get("text") or delta.get("content") or "") + _calls(delta.get("tool_calls"))
        if got[1] is not None and (text or choice.get("finish_reason")):
            raise Wrong(f"an event after the end of its choice: {json.dumps(choice)[:200]}")
        got[0] += text
        got[1] = choice.get("finish_reason") or got[1]


def _calls(calls: list[dict[str, Any]] | None) -> str:
    return "".join(
        (call["function"].get("name") or "") + (call["function"].get("arguments") or "") for call in calls or ()
    )


def _whole(choices: dict[int, list[Any]]) -> Texts:
    if any(reason is None for _, reason in choices.values()):
        raise Wrong("[DONE], and a choice has no finish_reason")
    return [(choices[index][0], choices[index][1]) for index in sorted(choices)]


def _document(choice: dict[str, Any]) -> tuple[str, Any]:
    message = choice.get("message", {})
    text = choice.get("text") or message.get("content") or ""
    return text + _calls(message.get("tool_calls")), choice["finish_reason"]


def _wire_reason(finish: Any, manner: str) -> str:
    if finish.reason == "abort" and manner == "cancel":
        return "cancelled"
    if finish.reason in ("abort", "error"):
        raise Wrong(f"the wire says {finish.reason} {finish.detail}")
    return str(finish.reason)
