"""EnginePool: several engines behind one front end. No coordinator: each pool chooses by itself.

The choice is the power of two (Mitzenmacher 2001): of two READY engines drawn at random the one with fewer waiting
prompt tokens, then fewer running requests. STATUS is up to a quarter of a second old, so what this pool has sent since
counts too. A draining, silent or frozen engine gets no new work.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from inferengine.client.async_client import AsyncClient, Stream, Submission
from inferengine.errors import InferEngineError
from inferengine.params import SamplingParams
from inferengine.wire.messages import Accept, ModelFiles, Welcome

FROZEN_LOOP_MS = 30_000.0
REMEMBERED_REQUESTS = 65_536


class EngineHealth(NamedTuple):
    """What this end knows of one engine. `loop_age_ms` is None until the first PONG."""

    address: str
    connected: bool
    state: str | None
    loop_age_ms: float | None
    status: dict[str, Any] | None


class _Load:
    """What this pool sent to an engine since its last STATUS."""

    def __init__(self) -> None:
        self.status_s: float | None = None
        self.tokens = 0
        self.requests = 0


class PooledAttachment:
    """An ATTACH for a request whose engine this pool does not know: each engine is asked in turn."""

    def __init__(
        self, clients: Sequence[AsyncClient], request_id: bytes, cursors: Sequence[int], n: int, reply: str
    ) -> None:
        self.id = request_id
        self.streams: list[Stream] = []
        self._clients = clients
        self._arguments = (cursors, n, reply)
        self._submission: Submission | None = None
        self._cancelled = False

    async def accepted(self) -> Accept:
        """Raises not_found when no engine has the request. `streams` is filled afterwards."""
        failure = InferEngineError("engine_unavailable", "No engine is connected.")
        for client in self._clients:
            try:
                submission = client.attach(self.id, *self._arguments)
                accept = await submission.accepted()
            except InferEngineError as error:
                failure = error
                if error.code in ("not_found", "engine_unavailable"):
                    continue
                break
            self._submission, self.streams = submission, submission.streams
            if self._cancelled:
                submission.cancel()
            return accept
        raise failure

    def cancel(self) -> None:
        self._cancelled = True
        if self._submission is not None:
            self._submission.cancel()


class EnginePool:
    """The same calls as AsyncClient's, spread over engines."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        role: str = "client",
        name: str = "",
        window: int | None = None,
        generator: random.Random | None = None,
    ) -> None:
        if not addresses:
            raise ValueError("at least one engine address is needed")
        self.clients = [AsyncClient(address, role=role, name=name, window=window) for address in addresses]
        self._random = generator or random.Random()
        self._loads = {id(client): _Load() for client in self.clients}
        self._homes: OrderedDict[bytes, AsyncClient] = OrderedDict()

    async def connect(self, timeout_s: float = 5.0) -> Welcome:
        """Connect to all in the background and wait for the first WELCOME. Raises engine_unavailable."""
        return await self._first(timeout_s, lambda client: client.connect(timeout_s))

    async def wait_ready(self, timeout_s: float) -> Welcome:
        """Wait until one engine is READY. Raises engine_unavailable."""
        return await self._first(timeout_s, lambda client: client.wait_ready(timeout_s))

    async def _first(self, timeout_s: float, wait: Any) -> Welcome:
        pending = {asyncio.ensure_future(wait(client)) for client in self.clients}
        failure: BaseException = InferEngineError("engine_unavailable", "No engine answers.")
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (error := task.exception()) is None:
                        welcome: Welcome = task.result()
                        return welcome
                    failure = error
            raise failure
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    @property
    def ready(self) -> bool:
        return any(client.ready for client in self.clients)

    @property
    def connected(self) -> bool:
        return any(client.connected for client in self.clients)

    @property
    def welcome(self) -> Welcome:
        """Of a READY engine, else of any that has answered."""
        return self._any_client().welcome

    @property
    def status(self) -> dict[str, Any] | None:
        """The last STATUS of a READY engine, else of any."""
        return self._any_client().status

    def health(self) -> list[EngineHealth]:
        return [_health(client) for client in self.clients]

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))

    async def __aenter__(self) -> EnginePool:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self, prompt_ids: Sequence[int] | None = None, params: SamplingParams | None = None, **arguments: Any
    ) -> Submission:
        """As AsyncClient.submit. Raises engine_unavailable when no engine takes requests."""
        request_id = arguments.get("request_id")
        client = self._homes.get(request_id) if request_id is not None else None  # an id again goes to its engine
        if client is None or not client.connected:
            client = self.choose()
        submission = client.submit(prompt_ids, params, **arguments)
        load = self._load(client)
        load.requests += 1
        load.tokens += len(prompt_ids) if prompt_ids is not None else 0
        self._remember(submission.id, client)
        return submission

    def attach(
        self, request_id: bytes, cursors: Sequence[int] = (), n: int = 1, reply: str = "tokens"
    ) -> Submission | PooledAttachment:
        """As AsyncClient.attach. Await `accepted()` before reading `streams`: the engine may have to be found."""
        home = self._homes.get(request_id)
        if home is None and len(self.clients) > 1:
            return PooledAttachment(self.clients, request_id, cursors, n, reply)
        return (home or self.clients[0]).attach(request_id, cursors, n, reply)

    def cancel_request(self, request_id: bytes) -> None:
        """Cancel by id on the engine that has it, or on all when unknown."""
        home = self._homes.get(request_id)
        for client in self.clients if home is None else [home]:
            if client.connected:
                client.cancel_request(request_id)

    async def model_files(self, files: Sequence[str] | None = None) -> ModelFiles:
        return await self._any_client().model_files(files)

    async def admin(self, op: str, **arguments: Any) -> Any:
        """On one engine, the READY one; for a certain one use `clients`."""
        return await self._any_client().admin(op, **arguments)

    def choose(self) -> AsyncClient:
        """The engine for the next request."""
        ready = [client for client in self.clients if client.ready]
        healthy = [client for client in ready if not _is_frozen(client)]
        candidates = healthy or ready
        if not candidates:
            connected = [client for client in self.clients if client.connected]
            if connected:
                return connected[0]  # it is starting or draining: its REJECT says so better than we can
            raise InferEngineError("engine_unavailable", "No engine is connected.", retry_after_s=1.0)
        if len(candidates) > 2:
            candidates = self._random.sample(candidates, 2)
        elif len(candidates) == 2:
            self._random.shuffle(candidates)  # ties are broken evenly
        return min(candidates, key=self._pressure)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _pressure(self, client: AsyncClient) -> tuple[int, int]:
        load, status = self._load(client), client.status or {}
        waiting, running = status.get("waiting_tokens", 0), status.get("running_requests", 0)
        queued = status.get("waiting_requests", 0)
        if not all(isinstance(figure, int) for figure in (waiting, running, queued)):
            waiting = running = queued = 0
        return waiting + load.tokens, running + queued + load.requests

    def _load(self, client: AsyncClient) -> _Load:
        load = self._loads[id(client)]
        if load.status_s != client.status_received_s:
            load.status_s, load.tokens, load.requests = client.status_received_s, 0, 0
        return load

    def _remember(self, request_id: bytes, client: AsyncClient) -> None:
        self._homes[request_id] = client
        self._homes.move_to_end(request_id)
        while len(self._homes) > REMEMBERED_REQUESTS:
            self._homes.popitem(last=False)

    def _any_client(self) -> AsyncClient:
        for wanted in ("ready", "connected"):
            for client in self.clients:
                if getattr(client, wanted):
                    return client
        return self.clients[0]


def _is_frozen(client: AsyncClient) -> bool:
    pong = client.last_pong
    return pong is not None and pong.loop_age_ms > FROZEN_LOOP_MS


def _health(client: AsyncClient) -> EngineHealth:
    pong = client.last_pong
    state = client.welcome.state if client.connected else None
    return EngineHealth(
        client.address, client.connected, state, None if pong is None else pong.loop_age_ms, client.status
    )
