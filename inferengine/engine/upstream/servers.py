"""The upstream servers: which of them are up, which one gets a request, and the process of `upstream.command`.

Everything here runs in the event loop of the loop's thread (relay.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from inferengine.config import Config
from inferengine.engine.upstream.completions import (
    EXTENSIONS,
    Abilities,
    CompletionEvent,
    EventReader,
    error_of_status,
    status_of_event,
)
from inferengine.errors import ConfigError, InferEngineError, Unreachable
from inferengine.process.system import PR_SET_PDEATHSIG
from inferengine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LOOK_S = 0.5  # between checks of an upstream that is down, and of the process of `upstream.command`
LOOK_TIMEOUT_S = 5.0
FIRST_RESTART_S, LONGEST_RESTART_S = 0.5, 30.0
FAST_FAILURE_S = 10.0  # a process that ran longer is restarted at once
STOP_S = 10.0  # how long the process may take to end after SIGTERM
MOST_LOOK_BYTES = 8 * 1024 * 1024  # largest answer to a check or probe
ODD_SHAPES = (LookupError, TypeError, AttributeError)  # what reading JSON of an unexpected shape raises
TAIL_S = 5.0  # how long usage and [DONE] may take after the finish reason
LAST_S = 1.0  # how long the body may take to end after [DONE]
PROBE = "Hello"  # the prompt that probes an upstream's abilities
# A program that executes its arguments; the kernel ends the process when this engine is gone, for any reason.
TIED = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGTERM:d}, 0, 0, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class UpstreamFailed(Exception):
    """A request failed at one upstream. `elsewhere`: another upstream may take it. `lost`: the connection was lost
    after the request had been sent."""

    def __init__(self, error: InferEngineError, *, elsewhere: bool, lost: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.elsewhere = elsewhere
        self.lost = lost


class NoAnswerHere(ValueError):
    """A server is up, but has no route at this path."""


class UpstreamServer:
    """One upstream."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = urlsplit(self.url).netloc.rpartition("@")[2]  # for logs and metrics: without a password
        self.is_up = False
        self.down_reasons: set[str] = set()  # already logged
        self.num_in_flight = 0
        self.num_requests = 0
        self.num_failures = 0
        self.model = ""
        self.max_model_len: int | None = None
        self.abilities: Abilities | None = None  # None until probed


def read_urls(config: Config) -> list[str]:
    """Return the URLs of `upstream.url`. Raises ConfigError."""
    urls = [url.strip() for url in config.upstream.url.split(",") if url.strip()]
    if not urls:
        raise ConfigError("upstream.url", "name the server to relay to, such as http://127.0.0.1:8080")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError("upstream.url", "must be http:// or https:// URLs, comma-separated")
    return urls


def read_fields(config: Config) -> frozenset[str] | None:
    """Return the names of `upstream.fields`; None for `auto`. Raises ConfigError."""
    text = config.upstream.fields
    if text == "auto":
        return None
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if unknown := names - set(EXTENSIONS):
        raise ConfigError("upstream.fields", f"{sorted(unknown)[0]!r} is none of {', '.join(EXTENSIONS)}")
    return names


class Servers:
    """All upstreams of this engine."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        """Raises ConfigError."""
        self.servers = [UpstreamServer(url) for url in read_urls(config)]
        self._fields = read_fields(config)
        self._config = config.upstream
        self._tokenizer = tokenizer
        self._session: aiohttp.ClientSession | None = None
        # Checks and probes keep no connection open: after a 500 uvicorn closes it without notice, and the next
        # request on it would fail.
        self._looks: aiohttp.ClientSession | None = None
        self._changed = asyncio.Event()  # set when an upstream has come up
        self._child = ChildProcess(self._config.command) if self._config.command else None
        self._looker: asyncio.Task[None] | None = None
        key_file = self._config.api_key_file
        try:
            key = open(key_file).read().strip() if key_file else ""  # noqa: SIM115  (closed at once)
        except OSError as error:
            raise ConfigError("upstream.api_key_file", f"cannot be read: {error.strerror}") from None
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def start(self, report: Callable[[str, float], None]) -> None:
        """Wait until at least one upstream is up, and probe those that are. Raises InferEngineError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=LOOK_TIMEOUT_S, sock_read=self._config.read_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=timeout,
            headers=self._headers,
            read_bufsize=256 * 1024,
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding",),
        )
        self._looks = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            headers=self._headers,
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding",),
        )
        end = time.monotonic() + self._config.start_timeout_s
        while True:
            report("waiting for the upstream", 0.0)
            await self._look()
            if any(server.is_up for server in self.servers):
                break
            if time.monotonic() > end:
                names = ", ".join(server.name for server in self.servers)
                raise Unreachable("upstream.url", f"no answer from {names} in {self._config.start_timeout_s:g} s")
            await asyncio.sleep(LOOK_S)
        self._looker = asyncio.create_task(self._keep_looking())

    @property
    def abilities(self) -> Abilities:
        """The abilities that all probed upstreams have in common, because a request may go to any of them."""
        known = [server.abilities for server in self.servers if server.abilities is not None]
        return Abilities(
            all(each.takes_ids for each in known),
            all(each.gives_ids for each in known),
            frozenset.intersection(*(each.fields for each in known)) if known else frozenset(),
        )

    async def choose(self, tried: Collection[UpstreamServer], wait_s: float) -> UpstreamServer:
        """Return the upstream with the fewest requests in flight, of those that are up and not in `tried`.

        If none is up and none was tried, waits at most `wait_s` for one. Raises InferEngineError.
        """
        end = time.monotonic() + wait_s
        while True:
            candidates = [server for server in self.servers if server.is_up and server not in tried]
            if candidates:
                return min(candidates, key=lambda server: (server.num_in_flight, server.num_requests))
            left_s = end - time.monotonic()
            if tried or left_s <= 0:
                raise InferEngineError("engine_unavailable", "No upstream is up.", retry_after_s=1.0)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)

    async def stream(self, server: UpstreamServer, body: dict[str, Any]) -> AsyncIterator[list[CompletionEvent]]:
        """Send a completion and yield lists of the events that have arrived. Raises UpstreamFailed.

        A list may be empty: comments have arrived, or part of an event. Closing the generator closes the connection,
        which tells the upstream to stop generating.
        """
        server.num_in_flight += 1
        server.num_requests += 1
        reader = EventReader()
        try:
            answer = await self._send(server, msgspec.json.encode(body))
            try:
                if answer.status != 200:
                    wait = answer.headers.get("Retry-After")
                    raise self._refusal(server, answer.status, await answer.content.read(65536), wait)
                # `iter_any` would cost two more coroutines for each token.
                while data := await answer.content.readany():
                    yield list(reader.push(data))
                    if reader.is_done or reader.has_reason:
                        break
                if reader.has_reason and not reader.is_done:
                    async for events in self._tail(answer, reader):
                        yield events
                if not reader.is_done and not reader.has_reason:
                    raise aiohttp.ClientPayloadError("the stream ended before its end")
                # A connection whose body has ended can be used again; any other is closed.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_S):
                        await answer.content.wait_eof()
            finally:
                answer.close()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if reader.has_reason:  # the output was complete
                return
            server.num_failures += 1
            if not isinstance(error, aiohttp.ClientPayloadError | TimeoutError):
                server.is_up = False  # until a check succeeds
            logger.warning("upstream %s: %s: %s", server.name, type(error).__name__, error)
            refusal = InferEngineError("engine_unavailable", "The upstream's connection was lost.", retry_after_s=1.0)
            lost = not isinstance(error, aiohttp.ClientConnectorError)
            raise UpstreamFailed(refusal, elsewhere=True, lost=lost) from None
        finally:
            server.num_in_flight -= 1

    async def _tail(self, answer: aiohttp.ClientResponse, reader: EventReader) -> AsyncIterator[list[CompletionEvent]]:
        """Yield what follows the finish reason, such as the usage, for TAIL_S. Raises TimeoutError after that."""
        end_s = asyncio.get_running_loop().time() + TAIL_S
        while not reader.is_done:
            async with asyncio.timeout_at(end_s):
                data = await answer.content.readany()
                await asyncio.sleep(0)  # without it the timeout could not fire while there is always data
            if not data:
                return
            yield list(reader.push(data))

    async def _send(self, server: UpstreamServer, body: bytes) -> aiohttp.ClientResponse:
        """Send a completion and wait for its status.

        If the server closed a kept connection in the meantime the request is sent again: it has had no effect yet.
        """
        if self._session is None:
            raise RuntimeError("not started")
        headers = {"Content-Type": "application/json"}
        url = f"{server.url}/v1/completions"
        try:
            return await self._session.post(url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ServerDisconnectedError, ConnectionResetError):
            return await self._session.post(url, data=body, headers=headers, allow_redirects=False)

    def stats(self) -> dict[str, dict[str, float]]:
        """Return counters and gauges, by figure and then by upstream's name."""
        return {
            "up": {server.name: int(server.is_up) for server in self.servers},
            "in_flight": {server.name: server.num_in_flight for server in self.servers},
            "requests": {server.name: server.num_requests for server in self.servers},
            "failures": {server.name: server.num_failures for server in self.servers},
        }

    async def close(self) -> None:
        """Close the connections and end the process."""
        if self._looker is not None:
            self._looker.cancel()
        for session in (self._session, self._looks):
            if session is not None:
                await session.close()
        if self._child is not None:
            await asyncio.to_thread(self._child.stop)

    def says_nothing(self, server: UpstreamServer) -> UpstreamFailed:
        """Return the failure for a stream that goes on without output."""
        server.num_failures += 1
        logger.warning("upstream %s: a stream without output", server.name)
        refusal = InferEngineError("engine_unavailable", "The upstream sent no output.", retry_after_s=1.0)
        return UpstreamFailed(refusal, elsewhere=True, lost=True)

    def refusal_in_stream(self, server: UpstreamServer, error: Any) -> UpstreamFailed:
        """Return the failure for an error event within a stream.

        It is either an error in the request, as when vLLM refuses a grammar after it has answered 200, or an error of
        the server, which counts as a broken stream.
        """
        status, body = status_of_event(error), msgspec.json.encode({"error": error})
        if status < 500:
            return self._refusal(server, status, body)
        server.num_failures += 1
        logger.warning("upstream %s ended a stream: %.500s", server.name, error)
        refusal = InferEngineError("engine_unavailable", "The upstream failed on this request.")
        return UpstreamFailed(refusal, elsewhere=True)

    def _refusal(
        self, server: UpstreamServer, status: int, body: bytes, retry_after: str | None = None
    ) -> UpstreamFailed:
        elsewhere = status < 400 or status >= 500 or status in (401, 403, 404, 429)
        if elsewhere:
            server.num_failures += 1
            logger.warning("upstream %s answered %d: %s", server.name, status, body[:500].decode("utf-8", "replace"))
        return UpstreamFailed(error_of_status(status, body, retry_after), elsewhere=elsewhere)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except InferEngineError as error:
                logger.error("%s", error)
            except Exception:
                logger.exception("checking the upstreams failed")

    async def _look(self) -> None:
        """Start the process of `upstream.command` if it is due, and check the upstreams that are down."""
        if self._child is not None:
            self._child.tend()
        await asyncio.gather(*(self._greet(server) for server in self.servers if not server.is_up))

    async def _greet(self, server: UpstreamServer) -> None:
        try:
            await self._describe(server)
            if server.abilities is None:
                server.abilities = await self._probe(server)
                logger.info("upstream %s: %s, %s", server.name, server.model, _sentence(server.abilities))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, *ODD_SHAPES) as error:
            reason = f"{type(error).__name__}: {error}"
            if reason not in server.down_reasons:  # log each reason once
                logger.warning("upstream %s is down: %s", server.name, reason)
                server.down_reasons.add(reason)
            return
        server.is_up = True
        server.down_reasons.clear()
        self._changed.set()

    async def _describe(self, server: UpstreamServer) -> None:
        """Set the model and its length from the server's list of models.

        The model is `upstream.model`, or the first in the list. A server without a list needs `upstream.model`.
        """
        wanted = self._config.model
        try:
            cards = (await self._get(f"{server.url}/v1/models"))["data"]
        except NoAnswerHere:
            if not wanted:
                raise
            cards = []
        card = next((each for each in cards if each.get("id") == wanted), None) if wanted else cards[0]
        if card is None and server.model != wanted:
            logger.warning("upstream %s does not list the model %s", server.name, wanted)
        server.model = wanted or str(cards[0]["id"])
        length = card.get("max_model_len") if card is not None else None
        server.max_model_len = length if type(length) is int and length > 0 else None

    async def _probe(self, server: UpstreamServer) -> Abilities:
        """Find out by generating one token whether a server takes and gives token ids.

        Raises ValueError if it accepts neither token ids nor text as the prompt.
        """
        ids = self._tokenizer.encode(PROBE)
        common = {"model": server.model, "max_tokens": 1, "temperature": 0}
        asking = {"return_token_ids": True}
        for takes_ids, extra in ((True, asking), (True, {}), (False, asking), (False, {})):
            status, document = await self._post(server, {**common, "prompt": ids if takes_ids else PROBE, **extra})
            if status in (401, 403):
                raise ConfigError("upstream.api_key_file", f"{server.name} refuses the key ({status})")
            if status != 200:
                continue
            choice = document["choices"][0]
            gives_ids = isinstance(choice.get("token_ids"), list)
            if not gives_ids and not self._tokenizer.is_byte_level:
                raise ConfigError(
                    "upstream.url",
                    f"{server.name} gives text without token ids, from which only byte-level vocabularies can be read",
                )
            fields = self._fields if self._fields is not None else frozenset(EXTENSIONS if gives_ids else ())
            return Abilities(takes_ids, gives_ids, fields)
        raise ValueError(f"/v1/completions answers {status}")

    async def _get(self, url: str) -> Any:
        if self._looks is None:
            raise RuntimeError("not started")
        timeout = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
        async with self._looks.get(url, timeout=timeout, allow_redirects=False) as answer:
            content = await _content(answer)
            if answer.status in (401, 403):
                raise ConfigError("upstream.api_key_file", f"{urlsplit(url).hostname} refuses the key")
            if answer.status in (404, 405, 500, 501):
                raise NoAnswerHere(f"{answer.status}")
            if answer.status != 200:
                raise ValueError(f"{answer.status}")
            return msgspec.json.decode(content)

    async def _post(self, server: UpstreamServer, body: dict[str, Any]) -> tuple[int, Any]:
        if self._looks is None:
            raise RuntimeError("not started")
        url = f"{server.url}/v1/completions"
        timeout = aiohttp.ClientTimeout(total=60.0)
        async with self._looks.post(url, json=body, timeout=timeout, allow_redirects=False) as answer:
            content = await _content(answer)
            return answer.status, msgspec.json.decode(content) if answer.status == 200 else None


async def _content(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer to a check or probe. Raises ValueError if it is too large."""
    content = bytearray()
    while data := await answer.content.readany():
        content += data
        if len(content) > MOST_LOOK_BYTES:
            raise ValueError(f"it answers with more than {MOST_LOOK_BYTES} bytes")
    return bytes(content)


def _sentence(abilities: Abilities) -> str:
    prompts = "prompts as token ids" if abilities.takes_ids else "prompts as text"
    answers = "answers with token ids" if abilities.gives_ids else "answers with text alone"
    return f"{prompts}, {answers}, fields beyond OpenAI's: {', '.join(sorted(abilities.fields)) or 'none'}"


class ChildProcess:
    """The process of `upstream.command`, restarted when it ends. It inherits the engine's standard output."""

    def __init__(self, command: str) -> None:
        """Raises ConfigError."""
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError("upstream.command", str(error)) from None
        if not self._words or shutil.which(self._words[0]) is None:
            raise ConfigError("upstream.command", "its first word must be a program that can be run")
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._start_at_s = 0.0
        self._delay_s = FIRST_RESTART_S
        self._stopping = False

    def tend(self) -> None:
        """Start the process if it does not run and its restart delay is over."""
        now = time.monotonic()
        if self._stopping:
            return
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            lasted_s = now - self._started_s
            self._delay_s = FIRST_RESTART_S if lasted_s > FAST_FAILURE_S else min(2 * self._delay_s, LONGEST_RESTART_S)
            logger.error("the upstream's process ended with %d: it is started again in %.1f s", code, self._delay_s)
            self._process, self._start_at_s = None, now + self._delay_s
        if now < self._start_at_s:
            return
        command = [sys.executable, "-c", TIED, *self._words]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._started_s = now
        logger.info("the upstream's process %d is started: %s", self._process.pid, self._words[0])

    def stop(self) -> None:
        """End the process and all processes that it has started."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        for number, timeout_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
                return
