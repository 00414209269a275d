"""Makes mixed load at a given rate, and judges each outcome: the consequence of a fault, or a fault of the product."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from typing import NamedTuple

import httpx

from benchmarks.kill_streams import Case, cases
from benchmarks.soak.asks import MANNERS, Asker, Result, Texts, bad_request
from benchmarks.soak.batches import LINES, is_refused, one_batch
from benchmarks.soak.batches import body as line_body
from benchmarks.soak.disturbances import Disturbances
from benchmarks.soak.service import Service

MAX_TOKENS = 90
MAX_OPEN = 24  # requests of the load at once
MANNER_WEIGHTS = (6, 1, 2, 3)
KINDS = {"case": 20, "fresh grammar": 1, "bad": 2, "quota": 0.3, "response": 1}
BATCH_PAUSE_S = 10.0
RESPONSE_S = 420.0
FILL_TOKENS = 1900  # of a prompt that fills the cache; the embedded model's context has 2048
WORDS = ("queue", "engine", "cache", "block", "token", "stream", "wire", "step", "batch", "grammar", "page", "rank")


class EndedRequest(NamedTuple):
    """The record of one ended request."""

    at_s: float
    name: str
    manner: str
    kind: str
    detail: str
    expected: bool
    first_s: float | None
    seconds: float


def soak_cases() -> list[Case]:
    """Return the cases of kill_streams with predictable texts, shortened, and conversations over the websocket."""
    made = []
    for case in cases(random.Random(7)):
        if "unseeded" in case.name or "detached" in case.name:
            continue
        body = {name: value for name, value in case.body.items() if name != "reply"}
        made.append(case._replace(body={**body, "max_tokens": min(MAX_TOKENS, body["max_tokens"])}))
    messages = [{"role": "user", "content": "What is a KV cache?"}]
    for kind in ("sse", "json", "ws"):
        body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        made.append(Case(f"{kind} greedy chat", kind, body))
    return made


def filling_prompts(num_blocks: int, block_size: int, draw: random.Random) -> list[list[int]]:
    """Return prompts of random tokens that together need more KV blocks than there are."""
    count = num_blocks // (FILL_TOKENS // block_size) + 1
    return [[draw.randrange(256, 4000) for _ in range(FILL_TOKENS)] for _ in range(count)]


class Load:
    """Makes requests until it is stopped, and records their outcomes."""

    def __init__(self, service: Service, asker: Asker, disturbances: Disturbances, rate: float, seed: int) -> None:
        self.service, self.asker, self.disturbances = service, asker, disturbances
        self.cases = soak_cases()
        self.references: dict[str, Texts] = {}
        self.batch_texts: dict[int, str] = {}  # by number of the line
        self.notes: list[EndedRequest] = []  # since the last sample
        self.gaps_s: list[float] = []
        self.totals: Counter[str] = Counter()
        self.compared = 0
        self.batches = 0
        self.unexpected: list[str] = []
        self.paused = False
        self.open: set[asyncio.Task[None]] = set()
        self._rate, self._draw = rate, random.Random(seed)
        self._filling, self._fills = False, random.Random()  # a cache that outlived a front end must not know them

    async def make_references(self) -> None:
        """Run each case alone, before any fault, for its reference text."""
        for case in self.cases:
            result = await self.asker.ask(case, "read", self.service.keys[0], self._draw)
            if result.kind != "ended":
                raise RuntimeError(f"no reference of {case.name}: {result}")
            assert result.texts is not None
            self.references[case.name] = result.texts
        for number in range(LINES):
            if is_refused(number):
                continue
            case = Case("batch", "json", line_body(number))
            result = await self.asker.ask(case, "read", self.service.keys[0], self._draw)
            assert result.texts is not None
            self.batch_texts[number] = result.texts[0][0]

    def fill_cache(self, num_blocks: int, block_size: int) -> None:
        """Begin to write every block of the engine's KV cache, unless that goes on or no request may begin now.

        On a CPU the cache's pages become memory when they are first written. The other requests are alike, so that
        they would take hours to write all of them, and that would look like growth.
        """
        if not (self.paused or self._filling):
            self._filling = True
            task = asyncio.create_task(self._fill(filling_prompts(num_blocks, block_size, self._fills)))
            self.open.add(task)
            task.add_done_callback(self.open.discard)

    async def run(self, until_s: float) -> None:
        """Begin requests at random moments until `until_s`."""
        batches = asyncio.create_task(self._batches(until_s))
        while time.monotonic() < until_s:
            await asyncio.sleep(self._draw.expovariate(self._rate))
            if not self.paused and len(self.open) < MAX_OPEN:
                self._begin()
        if self.open:
            await asyncio.wait(self.open)
        await batches

    def _begin(self) -> None:
        draw = random.Random(self._draw.random())
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        make = {
            "case": self._case, "fresh grammar": self._fresh_grammar, "bad": self._bad, "quota": self._quota,
            "response": self._response,
        }[kind]  # fmt: skip
        task = asyncio.create_task(make(draw))
        self.open.add(task)
        task.add_done_callback(self.open.discard)

    # -- kinds of requests -------------------------------------------------------------------------------------------

    async def _case(self, draw: random.Random) -> None:
        case, manner = draw.choice(self.cases), draw.choices(MANNERS, MANNER_WEIGHTS)[0]
        if case.kind == "json" and manner in ("slow", "resume"):
            manner = "read"
        began_s = time.monotonic()
        result = await self.asker.ask(case, manner, draw.choice(self.service.keys[:2]), draw)
        if result.kind == "ended":
            self.compared += 1
            if result.texts != self.references[case.name]:
                detail = f"became {result.texts!r}, should be {self.references[case.name]!r}"
                result = result._replace(kind="wrong", detail=f"another text: {detail}"[:2000])
        self._note(case.kind, case.name, manner, result, began_s)

    async def _fresh_grammar(self, draw: random.Random) -> None:
        """Make a request with a grammar that was never compiled before."""
        pattern = f"{draw.choice(WORDS)}{draw.randrange(10**6)} [a-z]{{3,8}}\\."
        body = {"prompt": "x", "max_tokens": 60, "guided_regex": pattern, "seed": draw.randrange(1000)}
        kind = draw.choice(("sse", "json", "ws", "wire"))
        began_s = time.monotonic()
        result = await self.asker.ask(Case("fresh grammar", kind, body), "read", self.service.keys[0], draw)
        if result.kind == "ended" and result.texts and not re.fullmatch(pattern, result.texts[0][0]):
            result = result._replace(kind="wrong", detail=f"{result.texts} does not match {pattern}")
        self._note(kind, f"{kind} fresh grammar", "read", result, began_s)

    async def _bad(self, draw: random.Random) -> None:
        began_s = time.monotonic()
        kind, _, detail = (await bad_request(self.asker, self.service.keys[0], draw)).partition(": ")
        self._short("bad request", kind or "ended", detail, began_s)

    async def _fill(self, prompts: list[list[int]]) -> None:
        try:
            for prompt in prompts:
                began_s = time.monotonic()
                case = Case("fill", "json", {"prompt": prompt, "max_tokens": 1})
                result = await self.asker.ask(case, "read", self.service.keys[0], self._draw)
                self._note("json", "fill", "read", result, began_s)
        finally:
            self._filling = False

    async def _quota(self, draw: random.Random) -> None:
        """Make five requests at once with a key that may have two in flight."""
        began_s = time.monotonic()
        case = Case("quota", "json", {"prompt": "x", "max_tokens": 20, "temperature": 0, "ignore_eos": True})
        results = await asyncio.gather(*(self.asker.ask(case, "read", self.service.limited, draw) for _ in range(5)))
        kinds = Counter(result.detail if result.kind == "refused" else result.kind for result in results)
        if wrong := [result for result in results if result.kind in ("wrong", "lost")]:
            self._short("quota", wrong[0].kind, wrong[0].detail, began_s)
        elif kinds["ended"] > 4 and not self.disturbances.touched("http", began_s):  # two workers, two each
            self._short("quota", "wrong", f"all five were served: {kinds}", began_s)
        else:
            self._short("quota", "ended", "", began_s)

    async def _response(self, draw: random.Random) -> None:
        """Make a stored background response, and poll it until it is done."""
        began_s, key = time.monotonic(), self.service.keys[1]
        asked = {"input": "What is a KV cache?", "background": True, "store": True, "max_output_tokens": 30}
        kind, detail = "ended", ""
        try:
            answer = await self.asker.http.post("/v1/responses", json=asked, headers=key.headers)
            while answer.status_code == 200 and answer.json()["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.5)
                path = f"/v1/responses/{answer.json()['id']}"
                answer = await self.asker.http.get(path, headers=key.headers)
                if time.monotonic() > began_s + RESPONSE_S:
                    kind, detail = "wrong", f"not ended after {RESPONSE_S:g} s"
                    break
            if answer.status_code == 503:
                kind, detail = "refused", answer.json()["error"]["code"]
            elif answer.status_code == 404 and self.disturbances.touched("http", began_s):
                kind, detail = "lost", "the store died with its front end"
            elif answer.status_code != 200:
                kind, detail = "wrong", f"{answer.status_code} {answer.text[:200]}"
            elif answer.json()["status"] not in ("completed", "incomplete") and kind == "ended":
                kind, detail = "wrong", f"{answer.json()['status']} {answer.json().get('error')}"
        except httpx.TransportError as error:
            kind, detail = "lost", type(error).__name__
        self._short("response", kind, detail, began_s)

    async def _batches(self, until_s: float) -> None:
        """Run one batch after the other."""
        while time.monotonic() < until_s:
            if self.paused:
                await asyncio.sleep(1.0)
                continue
            began_s = time.monotonic()
            task = asyncio.create_task(self._batch())
            self.open.add(task)
            await asyncio.wait([task])
            self.open.discard(task)
            if task.exception() is not None:
                self._short("batch", "wrong", repr(task.exception())[:400], began_s)
            await asyncio.sleep(BATCH_PAUSE_S)

    async def _batch(self) -> None:
        began_s = time.monotonic()
        kind, detail = await one_batch(self.asker, self.service.keys[0], self.disturbances, self.batch_texts)
        self.batches += kind == "ended"
        self._short("batch", kind, detail, began_s)

    # -- judgement ---------------------------------------------------------------------------------------------------

    def _short(self, name: str, kind: str, detail: str, began_s: float) -> None:
        way = "http"
        self._judge(
            EndedRequest(time.monotonic(), name, "read", kind, detail, True, None, time.monotonic() - began_s), way
        )

    def _note(self, way: str, name: str, manner: str, result: Result, began_s: float) -> None:
        times = result.times
        first_s = None if times.first_s is None or way == "json" else times.first_s
        if manner != "slow":
            self.gaps_s += times.gaps_s
        self._judge(
            EndedRequest(
                time.monotonic(), name, manner, result.kind, result.detail, True, first_s, time.monotonic() - began_s
            ),
            {"sse": "http", "json": "http"}.get(way, way),
        )

    def _judge(self, note: EndedRequest, way: str) -> None:
        began_s, touched = note.at_s - note.seconds, self.disturbances.touched
        expected = note.kind in ("ended", "cancelled")
        if note.kind == "lost":
            expected = touched(f"kill {way}", began_s)
        elif note.kind == "refused":
            if note.detail in ("engine_unavailable", "engine_restarted"):
                expected = touched("engine", began_s) or touched(way, began_s)
            elif note.detail == "draining":  # workers whose parent was killed finish what they have
                expected = touched("kill http", began_s)
            else:
                expected = note.name == "quota" or (note.name == "batch" and touched("disk", began_s))
        elif note.kind == "wrong" and note.manner == "resume" and "not_found" in note.detail:
            expected = touched("kill engine", began_s)
            note = note._replace(kind="lost with the engine" if expected else "wrong")
        if note.kind == "refused" and note.name == "quota":
            expected = True
        note = note._replace(expected=expected)
        self.notes.append(note)
        self.totals[f"{note.name}, {note.kind}"] += 1
        if not expected:
            self.unexpected.append(f"{note.name} ({note.manner}) {note.kind} after {note.seconds:.1f} s: {note.detail}")
            print("UNEXPECTED", time.strftime("%H:%M:%S"), self.unexpected[-1], flush=True)
