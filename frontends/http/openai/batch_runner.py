"""Runs batches: reads their files, sends their lines to the routes, and ends them.

Of all front ends that share a folder, the one that holds its lock runs the batches; the kernel releases the lock when
that process ends, however it ends, and the next front end goes on. A line that was in flight then is run again: its
answer had been seen by nobody.

Lines have the lowest priority, are few at a time, and hold back while other requests wait in an engine. A line that the
engine refuses for the moment is sent again later; only the end of the batch's time ends that.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from frontends.common.auth import ANYBODY, ApiKey, KeyRing, Quotas
from frontends.common.errors import error_object, report, unexpected
from frontends.common.json import dumps, parse
from frontends.http.openai.batch_store import (
    MAX_STARTS,
    BatchStore,
    Line,
    OpenBatch,
    new_line_id,
    store_folder,
    store_limits,
)
from inferengine.client.pool import EngineHealth
from inferengine.config import Config
from inferengine.errors import InferEngineError, InvalidRequest

logger = logging.getLogger(__name__)

LOCK_NAME = "runner.lock"
LOOK_S = 1.0  # between two looks for batches that other workers made or cancelled
CLEAN_S = 60.0
HOLD_S = 0.1  # between two looks whether engines have room
MAX_JOBS = 64  # batches that run at once; the others wait
MAX_TENANT_JOBS = 4  # of one tenant
LOWEST_PRIORITY = 1_000_000  # added to a line's own
MAX_RESULT_BYTES = 16 * 1024 * 1024
MAX_TRIES = 3
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
LATER = frozenset({"overloaded", "rate_limited", "draining", "engine_unavailable"})  # until it is taken
AGAIN = frozenset({"engine_restarted", "engine_stalled", "engine_error"})  # MAX_TRIES times in all
NOT_IN_A_BATCH = ("stream", "background", "detached")


class Engines(Protocol):
    """The part of EnginePool that a runner uses."""

    def health(self) -> Sequence[EngineHealth]:
        """Return each engine's last STATUS."""


class RunnerHost(Protocol):
    """The part of HttpState that a runner uses."""

    config: Config
    keys: KeyRing
    quotas: Quotas
    draining: bool

    @property
    def engines(self) -> Engines:
        """The engines that requests go to."""


class BatchRunner:
    """Runs the batches of a folder in one worker. Idle while another front end has the lock."""

    def __init__(self, host: RunnerHost) -> None:
        self._host = host
        self._store = BatchStore(store_folder(host.config), store_limits(host.config))  # a connection of its own
        self._routes: dict[str, Route] = {}
        self._app: Starlette | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._lock: int | None = None  # the lock's file, while it is held
        self._jobs: dict[str, _Job] = {}
        self._slots = asyncio.Semaphore(host.config.http.batch_in_flight)
        self._by_key: Counter[str] = Counter()  # lines in flight
        self._clean_at_s = 0.0

    def start(self, app: Starlette) -> None:
        """Start to look for batches, and run their lines by the routes of `app`."""
        self._app = app
        self._routes = {
            route.path: route for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())
        }
        self._task = asyncio.create_task(self._look())

    def wake(self) -> None:
        """Look for batches now, because one was created or cancelled in this worker."""
        self._news.set()

    async def close(self) -> None:
        """Stop; another front end continues the batches. May be called repeatedly."""
        tasks = [job.task for job in self._jobs.values()] + ([self._task] if self._task is not None else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._store.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _look(self) -> None:
        while True:
            self._news.clear()
            try:
                if self._store.exists and self._leads():
                    await self._look_once()
            except InferEngineError as error:
                logger.warning("batches cannot be read", extra={"fields": {"error": error.message}})
            except Exception:
                logger.exception("batches cannot be run")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), LOOK_S)

    def _leads(self) -> bool:
        """Return whether this worker runs the batches. It takes the lock if that is free, until the process ends."""
        if self._lock is not None:
            return True
        file = os.open(self._store.folder / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._lock = file
        return True

    async def _look_once(self) -> None:
        if time.monotonic() >= self._clean_at_s:
            self._clean_at_s = time.monotonic() + CLEAN_S
            await self._store.remove_old()
        of_tenant = Counter(job.batch.tenant for job in self._jobs.values())
        for batch in await self._store.open_batches():
            job, is_over = self._jobs.get(batch.id), batch.status == "cancelling"
            has_room = len(self._jobs) < MAX_JOBS and of_tenant[batch.tenant] < MAX_TENANT_JOBS
            if job is None and (has_room or is_over):
                job = self._jobs[batch.id] = _Job(batch)
                of_tenant[batch.tenant] += 1
                job.task = asyncio.create_task(self._run(job))
            if job is not None and is_over:
                job.stop.set()

    async def _run(self, job: _Job) -> None:
        """Run a batch from its current state to its end. After an error the next look tries again."""
        batch = job.batch
        try:
            if batch.status == "validating" and not await self._store.read_input(batch.id):
                return
            if batch.status == "cancelling":
                job.stop.set()
            await self._store.end_batch(batch.id, await self._work(job))
            logger.info("batch ended", extra={"fields": {"batch": batch.id}})
        except InferEngineError as error:
            logger.warning("a batch waits", extra={"fields": {"batch": batch.id, "error": error.message}})
            await asyncio.sleep(LONGEST_WAIT_S)
        except Exception:
            logger.exception("a batch waits")
            await asyncio.sleep(LONGEST_WAIT_S)
        finally:
            self._jobs.pop(batch.id, None)
            self.wake()  # another may begin

    async def _work(self, job: _Job) -> str:
        """Run the lines until all have ended, the batch is cancelled or its time is over. Returns the final status."""
        work, stop = asyncio.create_task(self._lines(job)), asyncio.create_task(job.stop.wait())
        try:
            left_s = max(0.0, job.batch.expires_s - time.time())
            if not job.stop.is_set():
                await asyncio.wait({work, stop}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if job.stop.is_set():
                return "cancelled"
            if work.done():
                work.result()
                return "completed"
            return "expired"
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)

    async def _lines(self, job: _Job) -> None:
        batch, last = job.batch, -1
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                await self._take_slot(batch)
                try:
                    line = await self._store.begin_line(batch.id, last)
                except BaseException:
                    self._leave_slot(batch)
                    raise
                if line is None:
                    self._leave_slot(batch)
                    break
                last = line.place
                running.add(task := asyncio.create_task(self._line(batch, line)))
                task.add_done_callback(lambda _: self._leave_slot(batch))
                for ended in [one for one in running if one.done()]:
                    running.remove(ended)
                    ended.result()
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _take_slot(self, batch: OpenBatch) -> None:
        """Wait for a place among the lines in flight, of all and of the key, and among the key's requests of this
        minute, while engines have no others waiting. One line goes on though others wait. Batches take turns: places
        are given in the order in which they are asked for."""
        while True:
            await self._slots.acquire()
            if not self._host.draining and self._may_begin(batch):
                self._by_key[batch.key_name] += 1
                return
            self._slots.release()  # another batch may be able to use it
            await asyncio.sleep(HOLD_S)

    def _may_begin(self, batch: OpenBatch) -> bool:
        key = self._key(batch)
        most = 0 if key is None else key.max_in_flight
        if most and self._by_key[batch.key_name] >= most:
            return False
        is_first = not self._by_key.total()
        if not is_first and any((item.status or {}).get("waiting_requests") for item in self._host.engines.health()):
            return False
        return key is None or self._host.quotas.try_charge(key)  # lines of a removed key are refused at once

    def _leave_slot(self, batch: OpenBatch) -> None:
        self._by_key[batch.key_name] -= 1
        self._slots.release()

    async def _line(self, batch: OpenBatch, line: Line) -> None:
        """Run one line, and write its result once."""
        request_id = new_line_id()
        status, body, tries, wait_s = 0, b"", 0, FIRST_WAIT_S
        while True:
            status, body, code = await self._answer(batch, line, request_id)
            tries += code in AGAIN
            if code not in LATER and (code not in AGAIN or tries >= MAX_TRIES):
                break
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        head = dumps({"id": request_id, "custom_id": line.custom_id, "error": None})[:-1]
        answer = dumps({"status_code": status, "request_id": request_id})[:-1] + b',"body":' + body + b"}"
        await self._keep(batch, line, head + b',"response":' + answer + b"}", failed=status != 200)

    async def _keep(self, batch: OpenBatch, line: Line, result: bytes, *, failed: bool) -> None:
        """Write a result, and retry while the disk is full, rather than run the line again."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                await self._store.end_line(batch.id, line.place, result, failed=failed)
                return
            except InferEngineError as error:
                if error.code != "overloaded":
                    raise
                if wait_s == FIRST_WAIT_S:
                    fields = {"batch": batch.id, "error": error.message}
                    logger.warning("a result of a batch waits to be written", extra={"fields": fields})
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _answer(self, batch: OpenBatch, line: Line, request_id: str) -> tuple[int, bytes, str]:
        """Return status, body and error code of the route's answer to a line."""
        try:
            if line.starts >= MAX_STARTS:
                raise InferEngineError("engine_stalled", f"The server ended {line.starts} times on this request.")
            response = await self._ask(batch, parse(line.body), request_id)
            body = bytearray()

            async def take(message: Any) -> None:
                body.extend(message.get("body", b""))
                if len(body) > MAX_RESULT_BYTES:
                    raise InferEngineError("request_too_large", f"The answer has more than {MAX_RESULT_BYTES} bytes.")

            await response({"type": "http", "asgi": _ASGI, "method": "POST"}, _nothing_more, take)
            if response.status_code == 200 and _is_cancelled(body):
                raise InferEngineError("cancelled", "The answer was cancelled before it was complete.")
            return response.status_code, bytes(body), "" if response.status_code == 200 else "answered"
        except InferEngineError as error:
            report(error, request_id)
            found = error
        except Exception:
            logger.exception("a line of a batch failed", extra={"fields": {"request_id": request_id}})
            found = unexpected()
        code = "given_up" if line.starts >= MAX_STARTS else found.code
        return found.http_status, dumps({"error": error_object(found)}), code

    async def _ask(self, batch: OpenBatch, document: Any, request_id: str) -> Response:
        key = self._key(batch)
        if key is None:
            raise InferEngineError("unauthorized", "The key that made this batch is not known any more.")
        for name in NOT_IN_A_BATCH:
            if document.get(name):
                raise InvalidRequest(name, "is not possible in a batch: leave it out", code="unsupported")
        priority = document.get("priority")
        if priority is None or (type(priority) is int and abs(priority) < 2**31):
            document["priority"] = min(max(priority or 0, 0) + LOWEST_PRIORITY, 2**31 - 1)
        content = dumps(document)
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return await _nothing_more()
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        route = self._routes[batch.endpoint]
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": batch.endpoint,
            "raw_path": batch.endpoint.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
            "app": self._app,
            "route": route,
            "api_key": key,
            "request_id": request_id,
        }
        answer: Response = await route.endpoint(Request(scope, receive))
        return answer

    def _key(self, batch: OpenBatch) -> ApiKey | None:
        """Return the current rights of the key that created a batch; None if it is gone or of another tenant."""
        keys = self._host.keys
        if not keys.required:
            return ANYBODY if not batch.key_name else None
        return next((key for key in keys.keys if (key.name, key.tenant) == (batch.key_name, batch.tenant)), None)


class _Job:
    """A batch that this worker runs."""

    task: asyncio.Task[None]

    def __init__(self, batch: OpenBatch) -> None:
        self.batch = batch
        self.stop = asyncio.Event()


_ASGI = {"version": "3.0", "spec_version": "2.4"}


def _is_cancelled(body: bytearray) -> bool:
    """Return whether an answer of one of the routes is what there was of it when it was cancelled."""
    if b'"finish_reason":"abort"' not in body and b'"status":"cancelled"' not in body:
        return False
    document = json.loads(body)  # the values may also be the request's, such as its metadata
    reasons = {choice.get("finish_reason") for choice in document.get("choices", ())}
    return "abort" in reasons or document.get("status") == "cancelled"


async def _nothing_more() -> Message:
    """Stand in for ASGI's receive and never return: a line has no client to disconnect."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
