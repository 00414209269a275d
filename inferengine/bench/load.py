"""Sends the requests: closed loop (so many at a time) or open loop (so many a second).

Arrivals of the open loop are Poisson; a burstiness below 1 makes them clump (gamma-distributed gaps, as vLLM's
benchmark has them).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from inferengine.bench.gpu_trace import GpuTrace, Summary
from inferengine.bench.sse_client import Connection, Reply
from inferengine.bench.workload import LoadOptions
from inferengine.errors import InferEngineError

ANSWER_TIMEOUT_S = 10.0


class Outcome(NamedTuple):
    """Every reply, the seconds from the first request to the last reply, and NVML's trace of this machine meanwhile."""

    replies: list[Reply]
    seconds: float
    gpu: Summary


class Load:
    """Connections that are used again, as many as are needed at a time. `ended` is called after each reply."""

    def __init__(self, options: LoadOptions, ended: Callable[[], None]) -> None:
        self._url = options.url
        self._host = urlsplit(options.url).netloc
        self._path = f"{options.base_path}/v1/{'chat/completions' if options.chat else 'completions'}"
        self._headers = f"Authorization: Bearer {options.api_key}\r\n" if options.api_key else ""
        self._idle: list[Connection] = []
        self._ended = ended

    async def send(self, body: bytes) -> Reply:
        reply = await self._send(body)
        self._ended()
        return reply

    async def _send(self, body: bytes) -> Reply:
        started = time.monotonic()
        try:
            connection = self._take_idle() or await Connection.open(self._url)
            reply = await connection.post(self._host, self._path, body, self._headers)
        except OSError as error:
            return Reply(started, ended_s=time.monotonic(), error=str(error))
        if connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()
        reply.started_s = started  # the connection's own time belongs to the first token's
        return reply

    def _take_idle(self) -> Connection | None:
        """The one used last, unless the server has closed it meanwhile."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


async def run(
    options: LoadOptions, bodies: list[bytes], gpus: GpuTrace, *, ended: Callable[[], None] = lambda: None
) -> Outcome:
    """Warm up, then send everything. A request that fails is a reply with an error; `ended` counts replies."""
    if options.warm_up:
        warming = Load(options, lambda: None)
        await closed_loop(warming, bodies[: options.warm_up], options.warm_up)
        warming.close()
    load = Load(options, ended)
    gpus.lap()
    started = time.monotonic()
    if options.rate:
        replies = await open_loop(load, bodies, options.rate, options.burstiness, options.seed)
    else:
        replies = await closed_loop(load, bodies, options.concurrency)
    outcome = Outcome(replies, time.monotonic() - started, gpus.lap())
    load.close()
    return outcome


async def closed_loop(load: Load, bodies: list[bytes], concurrency: int) -> list[Reply]:
    """`concurrency` requests in flight until none is left."""
    waiting = iter(bodies)

    async def one() -> list[Reply]:
        return [await load.send(body) for body in waiting]

    return [reply for replies in await asyncio.gather(*(one() for _ in range(concurrency))) for reply in replies]


async def open_loop(load: Load, bodies: list[bytes], rate: float, burstiness: float, seed: int) -> list[Reply]:
    """`rate` requests per second, whether or not earlier ones have ended."""

    async def arrivals() -> AsyncIterator[bytes]:
        generator, due = random.Random(seed), time.monotonic()
        for body in bodies:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            yield body
            due += generator.gammavariate(burstiness, 1.0 / (rate * burstiness))

    return await asyncio.gather(*[asyncio.create_task(load.send(body)) async for body in arrivals()])


def served_model(options: LoadOptions) -> str:
    """The model to ask for: the one that was named, else the first of /v1/models, which is asked in both cases.

    Raises engine_unavailable, unauthorized or model_not_found, with the address and the remedy.
    """
    parts = urlsplit(options.url)
    address = f"{parts.scheme}://{parts.netloc}{options.base_path}/v1/models"
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return options.model or str(json.load(answer)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            message = f"{address} answers {error.code}: give a valid key with --api-key"
            raise InferEngineError("unauthorized", message) from None
        if options.model:
            return options.model  # not every server has that route
        message = (
            f"{address} answers {error.code}: name an OpenAI-compatible server with --url, or a model with --model"
        )
        raise InferEngineError("engine_unavailable", message) from None
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        message = f"no server answers at {options.url} ({reason}): start one there, or name its address with --url"
        raise InferEngineError("engine_unavailable", message) from None
    except (ValueError, LookupError, TypeError):
        message = f"{address} lists no model: name an OpenAI-compatible server with --url, or a model with --model"
        raise InferEngineError("model_not_found", message) from None
