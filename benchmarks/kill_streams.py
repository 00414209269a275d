"""Kills the engine again and again under mixed streams, and compares everything that clients got with undisturbed runs.

    python -m benchmarks.kill_streams [--kills 50] [--streams 80] [--seed 1] [--json FILE] [--section.key VALUE ...]

`inferengine up` serves the embedded model on the CPU in float32. `--streams` clients ask at all times, over HTTP as
events and as documents, over websockets and over the wire (token ids, text, both): greedy, seeded and unseeded, with
grammars, tools, stop strings, n, log-probabilities, penalties, min_tokens, bad words, biases, prompt log-probabilities
and echo. First every request is made alone: its reference. Then all of them at once without a kill (`control`), then
under kills. An unseeded request is held to the seed that the engine reports on the wire: its reference is made
afterwards, with that seed.

Compared are texts, token ids, finish and stop reasons exactly, log-probabilities within LOGPROB_TOLERANCE: the sums of
a float32 step depend on how many rows it has. An error that a client hears is counted, unless it says before the
request was accepted that there is no engine now: that is asked again after Retry-After, as clients of OpenAI's do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx
from websockets.asyncio.client import ClientConnection, connect

from inferengine.bench.environment import write_result
from inferengine.client import AsyncClient, Finish
from inferengine.config import parse_flags
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec, read_grammar

START_S = 120.0
FAST_FAILURE_S = 11.0  # `up` gives up after five engines in a row that lived shorter than this
LEAST_ENDED = 5  # requests that end between two kills: on a busy machine an engine must live long enough for some
SETTINGS = {
    "engine.device": "cpu",  # every bit is compared
    "http.request_timeout_s": "3600",  # kills come quicker than a busy machine computes
}
LOGPROB_TOLERANCE = 1e-3
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 60}},
                "required": ["city"],
            },
        },
    }
]
PROMPTS = ("Once upon a time", "What is a KV cache?", "The engine", "A front end is", "Tell me about queues.")
Got = list[dict[str, Any]]  # per choice


class Case(NamedTuple):
    """One request that can be made again. `kind`: which transport reads it."""

    name: str
    kind: str
    body: dict[str, Any]


def cases(generator: random.Random) -> list[Case]:
    """Return every feature on every transport that has it."""
    features: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "seeded": {"temperature": 0.9, "seed": 11},
        "top_p": {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 12},
        "penalties": {"temperature": 0.8, "seed": 13, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        "stop": {"temperature": 0.9, "seed": 14, "stop": [" the", "ing "], "min_tokens": 20},
        "n": {"temperature": 1.0, "seed": 15, "n": 3},
        "logprobs": {"temperature": 0.7, "seed": 16, "logprobs": 2},
        "bias": {"temperature": 0.9, "seed": 17, "logit_bias": {"100": 3.0, "101": -5.0}},
    }
    made: list[Case] = []
    for name, fields in features.items():
        for kind in ("sse", "json", "ws", "wire"):
            prompt = generator.choice(PROMPTS)
            body = {"prompt": prompt, "max_tokens": 220, "ignore_eos": name != "stop", **fields}
            made.append(Case(f"{kind} {name}", kind, body))
    for kind in ("sse", "json"):
        made += [
            Case(
                f"{kind} grammar", kind, {"prompt": "A person:", "max_tokens": 200, "guided_json": SCHEMA, "seed": 21}
            ),
            Case(
                f"{kind} regex", kind, {"prompt": "x", "max_tokens": 200, "guided_regex": "[a-z ]{150,180}", "seed": 22}
            ),
            Case(
                f"{kind} bad words",
                kind,
                {
                    "prompt": PROMPTS[0],
                    "max_tokens": 150,
                    "bad_words": ["the", "a"],
                    "temperature": 0,
                    "ignore_eos": True,
                },
            ),
            Case(
                f"{kind} tools",
                kind,
                {
                    "messages": [{"role": "user", "content": "Weather in Paris?"}],
                    "tools": TOOLS,
                    "tool_choice": "required",
                    "max_tokens": 150,
                    "seed": 23,
                },
            ),
            Case(
                f"{kind} chat",
                kind,
                {
                    "messages": [{"role": "user", "content": PROMPTS[1]}],
                    "max_tokens": 150,
                    "seed": 24,
                    "temperature": 0.8,
                },
            ),
        ]
    made += [
        Case(
            "json echo",
            "json",
            {"prompt": PROMPTS[2], "echo": True, "logprobs": 1, "max_tokens": 150, "temperature": 0},
        ),
        Case(
            "json prompt logprobs",
            "json",
            {"prompt": PROMPTS[3], "prompt_logprobs": 1, "max_tokens": 150, "temperature": 0.5, "seed": 25},
        ),
        Case("ws grammar", "ws", {"prompt": "x", "max_tokens": 200, "guided_regex": "[a-z ]{150,180}", "seed": 26}),
        Case("wire grammar", "wire", {"prompt": "x", "max_tokens": 200, "guided_regex": "[a-z ]{150,180}", "seed": 27}),
        Case(
            "wire text",
            "wire",
            {"prompt": PROMPTS[0], "max_tokens": 200, "seed": 28, "reply": "text", "ignore_eos": True},
        ),
        Case(
            "wire text stop",
            "wire",
            {"prompt": PROMPTS[4], "max_tokens": 220, "seed": 29, "reply": "both", "stop": ["ing "]},
        ),
        Case(
            "wire unseeded", "wire", {"prompt": PROMPTS[0], "max_tokens": 200, "temperature": 1.0, "ignore_eos": True}
        ),
        Case(
            "wire unseeded n",
            "wire",
            {"prompt": PROMPTS[2], "max_tokens": 150, "temperature": 1.0, "n": 2, "ignore_eos": True},
        ),
        Case(
            "wire detached",
            "wire",
            {"prompt": PROMPTS[1], "max_tokens": 200, "seed": 30, "detached": True, "ignore_eos": True},
        ),
    ]
    return made


class NotNow(Exception):
    """There is no engine yet, said before the request was accepted."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s


class Failed(Exception):
    """The client heard an error."""


class Service:
    """`inferengine up` in a folder of its own."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.log = folder / "log"
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "inferengine.cli", "up", "--http.port", "0", "--ws.port", "0", *words]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + START_S
        while "curl" not in self.text or "Ready after" not in self.text:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the service did not start:\n{self.text}")
            time.sleep(0.05)
        self.http, self.ws = self.address("HTTP"), self.address("chat page").replace("http", "ws") + "/v1/ws"
        self.engine = self.address("ZeroMQ")

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def address(self, label: str) -> str:
        found = re.search(rf"^\s+{label}\s+(\S+)$", self.text, re.MULTILINE)
        assert found, self.text
        return found.group(1).rstrip("/")

    def engine_pid(self) -> int | None:
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and b"engine" in words:
                    return int(folder.name)
        return None

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.kill()


class Addresses(Protocol):
    """Where a service is: HTTP, websockets, wire."""

    http: str
    ws: str
    engine: str


class Clients:
    """Makes one request after the other, over any transport, and notes the longest silence of a stream."""

    def __init__(self, service: Addresses) -> None:
        self.service = service
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=service.http, timeout=httpx.Timeout(3600.0), limits=limits)
        self.wire = AsyncClient(service.engine)
        self.longest_s = 0.0
        self.refused = 0
        self.ended = 0

    async def ask(self, case: Case) -> Got:
        """Run a request until it is accepted, then to its end."""
        while True:
            try:
                got: Got = await getattr(self, f"_{case.kind}")(case)
                self.ended += 1
                return got
            except NotNow as error:
                self.refused += 1
                await asyncio.sleep(error.after_s)

    def _note_silence(self, last_s: float | None) -> float:
        """Record that output came of a stream whose last output came at `last_s`; None: it is its first."""
        now = time.monotonic()
        if last_s is not None:
            self.longest_s = max(self.longest_s, now - last_s)
        return now

    def _path(self, body: dict[str, Any]) -> str:
        return "/v1/chat/completions" if "messages" in body else "/v1/completions"

    def _check(self, response: httpx.Response, text: str) -> None:
        if response.status_code == 503 and json.loads(text)["error"]["code"] == "engine_unavailable":
            raise NotNow(float(response.headers.get("retry-after", 1)))
        if response.status_code != 200:
            raise Failed(f"{response.status_code} {text[:300]}")

    async def _json(self, case: Case) -> Got:
        response = await self.http.post(self._path(case.body), json={**case.body, "return_token_ids": True})
        self._check(response, response.text)
        document = response.json()
        return [_choice_of_document(choice) for choice in document["choices"]]

    async def _sse(self, case: Case) -> Got:
        got: dict[int, dict[str, Any]] = {}
        body = {**case.body, "stream": True, "return_token_ids": True}
        async with self.http.stream("POST", self._path(case.body), json=body) as response:
            if response.status_code != 200:
                self._check(response, (await response.aread()).decode())
            last_s, done = None, False
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                last_s = self._note_silence(last_s)
                if line == "data: [DONE]":
                    done = True
                    break
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise Failed(json.dumps(event["error"]))
                for choice in event["choices"]:
                    _add_event(got.setdefault(choice["index"], _empty()), choice)
            if not done:
                raise Failed("the stream ended without [DONE]")
        return [got[index] for index in sorted(got)]

    async def _ws(self, case: Case) -> Got:
        body = dict(case.body)
        params = {name: value for name, value in body.items() if name not in ("prompt", "guided_regex")}
        if "logit_bias" in params:
            params["logit_bias"] = [[int(key), value] for key, value in params["logit_bias"].items()]
        frame = {"type": "generate", "id": "a", "prompt": body["prompt"], "params": params, "return_token_ids": True}
        if "guided_regex" in body:
            frame["structured_outputs"] = {"regex": body["guided_regex"]}
        async with connect(self.service.ws, max_size=None, ping_interval=None) as socket:
            await socket.send(json.dumps(frame))
            return await self._read_frames(socket)

    async def _read_frames(self, socket: ClientConnection) -> Got:
        got: dict[int, dict[str, Any]] = {}
        open_choices, last_s = 0, None
        while True:
            message = json.loads(await socket.recv())
            if message["type"] == "error":
                error = message["error"]
                if not open_choices and error["code"] == "engine_unavailable":
                    raise NotNow(error["retry_after_s"] or 1.0)
                raise Failed(json.dumps(error))
            if message["type"] == "accepted":
                open_choices = message["n"]
            if message["type"] not in ("delta", "done"):
                continue
            last_s = self._note_silence(last_s)
            choice = got.setdefault(message["choice"], _empty())
            choice["text"] += message["text"]
            choice["ids"] += message.get("token_ids") or []
            choice["logprobs"] += [item["logprob"] for item in message.get("logprobs") or []]
            if message["type"] == "done":
                choice["reason"], choice["stop"] = message["finish_reason"], message["stop"]
                open_choices -= 1
                if not open_choices:
                    return [got[index] for index in sorted(got)]

    async def _wire(self, case: Case) -> Got:
        body = dict(case.body)
        prompt, reply = body.pop("prompt"), body.pop("reply", "both" if "stop" in body else "tokens")
        regex, detached = body.pop("guided_regex", None), body.pop("detached", False)
        if "logit_bias" in body:
            body["logit_bias"] = tuple((int(key), value) for key, value in body["logit_bias"].items())
        if "stop" in body:
            body["stop"] = tuple(body["stop"])
        grammar: GrammarSpec | None = None if regex is None else read_grammar({"guided_regex": regex})
        try:
            submission = self.wire.submit(
                params=SamplingParams(**body), text=prompt, reply=reply, grammar=grammar, detached=detached
            )
            accept = await submission.accepted()
        except InferEngineError as error:
            if error.code == "engine_unavailable":
                raise NotNow(error.retry_after_s or 0.5) from None
            raise Failed(str(error)) from None
        choices = await asyncio.gather(*(self._read_stream(stream) for stream in submission.streams))
        for choice in choices:
            choice["seed"] = accept.seed
        return list(choices)

    async def _read_stream(self, stream: Any) -> dict[str, Any]:
        got, last_s, finish = _empty(), None, None
        async for delta in stream:
            last_s = self._note_silence(last_s)
            got["text"] += delta.text
            got["ids"] += delta.token_ids
            got["logprobs"] += [item.logprob for item in delta.logprobs or []]
            finish = delta.finish or finish
        assert isinstance(finish, Finish)
        if finish.reason in ("error", "abort"):
            raise Failed(f"{finish.reason} {finish.detail}")
        got["reason"], got["stop"], got["count"] = finish.reason, finish.detail, finish.completion_tokens
        return got

    async def close(self) -> None:
        await self.http.aclose()
        await self.wire.close()


def _empty() -> dict[str, Any]:
    return {"text": "", "ids": [], "logprobs": [], "reason": None, "stop": None, "calls": ""}


def _add_event(got: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {})
    got["text"] += choice.get("text") or delta.get("content") or ""
    got["calls"] += "".join(
        (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        for call in delta.get("tool_calls") or ()
    )
    got["ids"] += choice.get("token_ids") or []
    _add_logprobs(got, choice.get("logprobs"))
    if choice.get("finish_reason"):
        got["reason"], got["stop"] = choice["finish_reason"], choice.get("stop_reason")


def _choice_of_document(choice: dict[str, Any]) -> dict[str, Any]:
    got, message = _empty(), choice.get("message", {})
    got["text"] = choice.get("text") or message.get("content") or ""
    got["calls"] = "".join(
        call["function"]["name"] + call["function"]["arguments"] for call in message.get("tool_calls") or ()
    )
    got["ids"], got["reason"], got["stop"] = (
        choice.get("token_ids") or [],
        choice["finish_reason"],
        choice.get("stop_reason"),
    )
    _add_logprobs(got, choice.get("logprobs"))
    prompt = [next(iter(item.values()))["logprob"] for item in choice.get("prompt_logprobs") or () if item]
    got["prompt"] = prompt
    return got


def _add_logprobs(got: dict[str, Any], logprobs: dict[str, Any] | None) -> None:
    if logprobs:
        got["logprobs"] += [value for value in logprobs.get("token_logprobs") or () if value is not None]
        got["logprobs"] += [item["logprob"] for item in logprobs.get("content") or ()]


class Differences:
    """What was not as it should be."""

    def __init__(self) -> None:
        self.compared = 0
        self.tokens = 0
        self.wrong: Counter[str] = Counter()
        self.examples: list[str] = []
        self.errors: Counter[str] = Counter()
        self.largest_logprob = 0.0

    def compare(self, case: Case, reference: Got, got: Got) -> None:
        self.compared += 1
        for place, (wanted, found) in enumerate(zip(reference, got, strict=True)):
            self.tokens += len(found["ids"])
            for field in ("text", "ids", "reason", "stop", "calls"):
                if wanted[field] != found[field]:
                    self._note(f"{case.name}: {field}", place, wanted[field], found[field])
            for field in ("logprobs", "prompt"):
                ours, theirs = wanted.get(field) or [], found.get(field) or []
                if len(ours) != len(theirs):
                    self._note(f"{case.name}: number of {field}", place, len(ours), len(theirs))
                    continue
                apart = max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
                self.largest_logprob = max(self.largest_logprob, apart)
                if apart > LOGPROB_TOLERANCE:
                    self._note(f"{case.name}: {field}", place, "", apart)

    def _note(self, what: str, place: int, wanted: Any, found: Any) -> None:
        self.wrong[what] += 1
        if len(self.examples) < 20:
            self.examples.append(f"{what} of choice {place}: {str(wanted)[-160:]!r} became {str(found)[-160:]!r}")

    def report(self) -> dict[str, Any]:
        return {
            "requests": self.compared,
            "tokens": self.tokens,
            "different": dict(self.wrong),
            "errors": dict(self.errors),
            "largest_logprob_difference": self.largest_logprob,
            "examples": self.examples,
        }


async def run_streams(
    clients: Clients,
    asked: list[Case],
    references: dict[str, Got],
    differences: Differences,
    later: list[tuple[Case, Got]],
    count: int,
    over: Callable[[], bool],
    seed: int,
) -> None:
    """Run `count` clients that ask until it is `over`, each at least once."""

    async def client(number: int) -> None:
        generator = random.Random(seed * 1000 + number)
        while True:
            case = asked[(number + generator.randrange(len(asked))) % len(asked)]
            try:
                got = await clients.ask(case)
            except Exception as error:
                differences.errors[f"{case.name}: {error or type(error).__name__}"] += 1
                await asyncio.sleep(0.5)
            else:
                if "unseeded" in case.name:
                    later.append((case, got))
                else:
                    differences.compare(case, references[case.name], got)
            if over():
                return

    await asyncio.gather(*(client(number) for number in range(count)))


async def compare_unseeded(clients: Clients, later: list[tuple[Case, Got]], differences: Differences) -> None:
    """Compare streams without a seed, by the seed that the engine told."""
    for case, got in later:
        seeded = case._replace(body={**case.body, "seed": got[0]["seed"]})
        differences.compare(case, await clients.ask(seeded), got)
    later.clear()


async def kill_often(service: Service, clients: Clients, kills: int, generator: random.Random) -> list[float]:
    """Kill the engine again and again. Returns the seconds from each kill until it was READY again."""
    away: list[float] = []
    async with httpx.AsyncClient(base_url=service.http, timeout=10.0) as http:
        for number in range(kills):
            ended = clients.ended
            await asyncio.sleep(FAST_FAILURE_S + generator.random() * 4.0)
            while clients.ended < ended + LEAST_ENDED:
                await asyncio.sleep(generator.random())
            pid = service.engine_pid()
            assert pid is not None, service.text[-4000:]
            os.kill(pid, signal.SIGKILL)
            killed_s = time.monotonic()
            while True:
                await asyncio.sleep(0.05)
                if service.process.poll() is not None:
                    raise SystemExit(f"the service ended:\n{service.text[-4000:]}")
                with contextlib.suppress(httpx.HTTPError):
                    if service.engine_pid() not in (None, pid) and (await http.get("/ready")).status_code == 200:
                        break
            away.append(time.monotonic() - killed_s)
            print(f"kill {number + 1}: READY again after {away[-1]:.1f} s", flush=True)
    return away


async def measure(options: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    generator = random.Random(options.seed)
    asked = cases(generator)
    with tempfile.TemporaryDirectory(prefix="ie-") as folder:
        service = Service(Path(folder), words)
        clients = Clients(service)
        try:
            await clients.wire.connect(START_S)
            references = {case.name: await clients.ask(case) for case in asked}
            print(f"{len(references)} references", flush=True)
            control, later = Differences(), list[tuple[Case, Got]]()
            clients.longest_s = 0.0
            await run_streams(
                clients, asked, references, control, later, options.streams, lambda: True, secrets.randbelow(99)
            )
            await compare_unseeded(clients, later, control)
            longest_undisturbed_s, clients.longest_s = clients.longest_s, 0.0
            print("control:", json.dumps(control.report(), indent=1), flush=True)
            found, killing = Differences(), asyncio.create_task(kill_often(service, clients, options.kills, generator))
            began = time.monotonic()
            await run_streams(clients, asked, references, found, later, options.streams, killing.done, options.seed)
            away = await killing
            took_s, longest_s = time.monotonic() - began, clients.longest_s
            await compare_unseeded(clients, later, found)
            metrics = (await clients.http.get("/metrics")).text
            resumed = re.search(r"^inferengine_resumed_requests_total (\S+)", metrics, re.MULTILINE)
        finally:
            await clients.close()
            service.stop()
    return {
        "machine": platform.platform(),
        "flags": words,
        "kills": len(away),
        "streams": options.streams,
        "seconds": took_s,
        "control": control.report(),
        "killed": found.report(),
        "asked_again_before_acceptance": clients.refused,
        "resumed_by_http_front_end": None if resumed is None else float(resumed.group(1)),
        "longest_pause_s": longest_s,
        "longest_pause_undisturbed_s": longest_undisturbed_s,
        "longest_engine_away_s": max(away, default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--streams", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    flags, rest = parse_flags(sys.argv[1:])
    options = parser.parse_args(rest)
    words = [word for name, value in {**SETTINGS, **flags}.items() for word in (f"--{name}", value)]
    report = asyncio.run(measure(options, words))
    print(json.dumps(report, indent=2))
    if options.json is not None:
        write_result(options.json, report)
    killed = report["killed"]
    sys.exit(1 if killed["different"] or killed["errors"] else 0)


if __name__ == "__main__":
    main()
