"""EnginePool: several engines behind one front end. No coordinator: each pool chooses by itself.

`chooser` says which engine takes a request; this file tells it what is known of each: its last STATUS, up to a quarter
of a second old, and what this pool has sent since. An engine that drains, is frozen, or whose STATUS stays away gets no
new work.

A request goes on elsewhere under the same id as long as nothing of its output has come: when its engine refuses it
(overloaded, draining) or is gone. One that has begun goes on elsewhere with the output so far when its engine is lost:
it has another epoch, was silent for a lease, or says that it gives up. Where no other engine can take it, it waits for
its own. A connection that breaks for less than FAILOVER_S changes nothing: the session resumes.

PooledAttachment: reading a request on whose engine is not known, after a front end's restart for instance.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from inferengine.client import resume as going_on
from inferengine.client.async_client import AsyncClient
from inferengine.client.load_balancing import Chooser
from inferengine.client.resume import RESUME_WAIT_S
from inferengine.client.streams import Call
from inferengine.client.submission import Stream, Submission
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.wire.curve import ClientKeys
from inferengine.wire.messages import Accept, ModelFiles, Welcome


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
        self._cancelled = self._left = False

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
            if self._left:
                submission.leave()
            return accept
        raise failure

    def cancel(self) -> None:
        self._cancelled = True
        if self._submission is not None:
            self._submission.cancel()

    def leave(self) -> None:
        """As Submission.leave."""
        self._left = True
        if self._submission is not None:
            self._submission.leave()


FROZEN_LOOP_MS = 30_000.0
STATUS_SILENCE_S = 3.0  # a connected engine that has published STATUS and stops is not well
FAILOVER_S = 1.0  # how long a broken connection may take to come back before waiting requests go elsewhere
REFRESH_S = 0.05  # what is known of the engines is looked at again after so long
MAX_MOVES = 3
REMEMBERED_REQUESTS = 65_536
_MOVABLE = {"overloaded", "draining", "engine_unavailable", "engine_restarted"}
_LOST = {"engine_unavailable", "engine_restarted"}


class EngineHealth(NamedTuple):
    """What this end knows of one engine. `loop_age_ms` is None until the first PONG."""

    address: str
    connected: bool
    state: str | None
    loop_age_ms: float | None
    status: dict[str, Any] | None


class _Engine:
    """One engine as this pool sees it."""

    def __init__(self, index: int, client: AsyncClient) -> None:
        self.index = index
        self.client = client
        self.reported_s: float | None = None  # the STATUS that the chooser knows
        self.spacing_s = 0.0  # between the last two
        self.away_since_s: float | None = None

    def is_well(self, now: float) -> bool:
        """Takes new requests, as far as can be seen from here."""
        client = self.client
        if not client.ready or _is_frozen(client):
            return False
        seen = client.status_received_s
        return seen is None or now - seen < max(STATUS_SILENCE_S, 4 * self.spacing_s)


class _Waiting:
    """A submission whose output has not begun, so that it can still go elsewhere."""

    __slots__ = ("arguments", "engine", "moves", "refused_by", "submission")

    def __init__(self, submission: Submission, engine: _Engine, prompt: Sequence[int] | str, salt: bytes) -> None:
        self.submission = submission
        self.engine = engine
        self.arguments = (prompt, salt)
        self.refused_by: set[int] = set()
        self.moves = 0


class EnginePool:
    """The same calls as AsyncClient's, spread over engines."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        role: str = "client",
        name: str = "",
        window: int | None = None,
        policy: str = "power_of_two",
        generator: random.Random | None = None,
        curve: ClientKeys | None = None,
        resume_wait_s: float = RESUME_WAIT_S,
    ) -> None:
        """`policy`: one of chooser.POLICIES. `curve`: the keys for engines on TCP that ask for them. `resume_wait_s`:
        as AsyncClient's."""
        if not addresses:
            raise ValueError("at least one engine address is needed")
        self.clients = [
            AsyncClient(address, role=role, name=name, window=window, curve=curve, resume_wait_s=resume_wait_s)
            for address in addresses
        ]
        self.on_resumed: Callable[[float], None] = lambda pause_s: None  # a request goes on after its engine was lost
        for client in self.clients:
            client.on_resumed = self._note_resumed
        self.num_moved = 0  # times that a request went on at another engine, or was sent to the same one again
        self._engines = [_Engine(index, client) for index, client in enumerate(self.clients)]
        self._chooser = Chooser(addresses, policy, generator=generator)
        self._chooser.table.set_available(())
        self._homes: OrderedDict[bytes, _Engine] = OrderedDict()
        self._waiting: dict[bytes, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._refreshed_s = float("-inf")
        self._closed = False

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
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
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
        home = self._homes.get(request_id) if request_id is not None else None  # an id again goes to its engine
        prompt = _beginning(prompt_ids, arguments)
        salt = arguments.get("salt", b"")
        engine = home if home is not None and home.client.connected else self._choose(prompt, salt)

        def prepare(submission: Submission) -> None:
            self._chooser.table.sent(engine.index, len(prompt_ids) if prompt_ids is not None else 0)
            self._remember(submission.id, engine)
            waiting = _Waiting(submission, engine, prompt, salt)
            submission.call.rescue = partial(self._rescue, waiting)
            if len(self._engines) > 1:
                self._waiting[submission.id] = waiting
                self._plan_watch()

        return engine.client.submit(prompt_ids, params, prepare=prepare, **arguments)

    def attach(
        self, request_id: bytes, cursors: Sequence[int] = (), n: int = 1, reply: str = "tokens"
    ) -> Submission | PooledAttachment:
        """As AsyncClient.attach. Await `accepted()` before reading `streams`: the engine may have to be found."""
        home = self._homes.get(request_id)
        if home is None and len(self.clients) > 1:
            return PooledAttachment(self.clients, request_id, cursors, n, reply)
        client = home.client if home is not None else self.clients[0]
        return client.attach(request_id, cursors, n, reply)

    def cancel_request(self, request_id: bytes) -> None:
        """Cancel by id on the engine that has it, or on all when unknown."""
        home = self._homes.get(request_id)
        for client in self.clients if home is None else [home.client]:
            if client.connected or client.reads(request_id):
                client.cancel_request(request_id)

    async def model_files(self, files: Sequence[str] | None = None) -> ModelFiles:
        return await self._any_client().model_files(files)

    async def admin(self, op: str, **arguments: Any) -> Any:
        """On one engine, the READY one; for a certain one use `clients`."""
        return await self._any_client().admin(op, **arguments)

    def choose(self, prompt: Sequence[int] | str = (), salt: bytes = b"") -> AsyncClient:
        """The engine for a request that begins so. Raises engine_unavailable when none is connected."""
        return self._choose(prompt, salt).client

    # -- inside ------------------------------------------------------------------------------------------------------

    def _choose(self, prompt: Sequence[int] | str, salt: bytes) -> _Engine:
        index = self._pick(prompt, salt, ())
        if index is not None:
            return self._engines[index]
        for engine in self._engines:
            if engine.client.connected:
                return engine  # it is starting or draining: its REJECT says so better than we can
        raise InferEngineError("engine_unavailable", "No engine is connected.", retry_after_s=1.0)

    def _pick(self, prompt: Sequence[int] | str, salt: bytes, avoid: Sequence[int] | set[int]) -> int | None:
        now = asyncio.get_running_loop().time()
        if now - self._refreshed_s > REFRESH_S:
            self._refresh(now)
        index = self._chooser.choose(prompt, salt, avoid=avoid)
        if index is not None and not self._engines[index].client.ready:
            self._refresh(now)
            index = self._chooser.choose(prompt, salt, avoid=avoid)
        if index is not None:
            return index
        # None is well; one that is READY and seems frozen may only be slow, as everything on this machine may be.
        return next((item.index for item in self._engines if item.client.ready and item.index not in avoid), None)

    def _refresh(self, now: float) -> None:
        """Tell the chooser what has been heard since the last time."""
        self._refreshed_s = now
        table = self._chooser.table
        for engine in self._engines:
            seen, status = engine.client.status_received_s, engine.client.status
            if seen is None or status is None or seen == engine.reported_s:
                continue
            engine.spacing_s = 0.0 if engine.reported_s is None else seen - engine.reported_s
            engine.reported_s = seen
            figures = [status.get(key, 0) for key in ("waiting_tokens", "running_requests", "waiting_requests")]
            if all(isinstance(figure, int) for figure in figures):
                table.report(engine.index, figures[0], figures[1] + figures[2])
        table.set_available([engine.index for engine in self._engines if engine.is_well(now)])

    def _rescue(self, waiting: _Waiting, call: Call, error: InferEngineError) -> InferEngineError | None:
        """What becomes of a request whose engine refused it or is gone: None when it goes on elsewhere."""
        if self._closed or error.code not in _MOVABLE:
            return error
        if call.lost_s is not None:
            if call.asked_s is None:  # nobody was asked since it was lost
                waiting.refused_by.clear()
            waiting.refused_by.add(waiting.engine.index)
            return None if self._move_lost(waiting) else error
        if call.begun or any(collector.cancelled for collector in call.collectors):
            if error.code in _LOST and call.begun:
                return InferEngineError("engine_restarted", "The engine that ran this request is gone.")
            return error
        if error.code != "engine_restarted":  # that one is back, and knows nothing of it
            waiting.refused_by.add(waiting.engine.index)
        while waiting.moves < MAX_MOVES:
            waiting.moves += 1
            self._refreshed_s = float("-inf")
            index = self._pick(*waiting.arguments, waiting.refused_by)
            if index is None and error.code == "engine_restarted":
                index = waiting.engine.index  # nobody else is there; it may take it again
            if index is None:
                break
            try:
                waiting.submission.move_to(self._engines[index].client)
            except InferEngineError:
                waiting.refused_by.add(index)
                continue
            waiting.engine = self._engines[index]
            self.num_moved += 1
            self._chooser.table.sent(index, 0)
            self._remember(call.id, waiting.engine)
            return None
        return error

    def _move_lost(self, waiting: _Waiting) -> bool:
        """Let a request whose engine is lost go on at another one. False: none can take it now; it is tried again, by
        the session that holds it when that is told to, or here as soon as another engine is there."""
        call, unfit = waiting.submission.call, {waiting.engine.index, *waiting.refused_by}
        for engine in self._engines:
            if engine.client.ready and going_on.misfit(call, engine.client.welcome) is not None:
                unfit.add(engine.index)
        while (index := self._pick(*waiting.arguments, unfit)) is not None:
            target = self._engines[index].client
            if not target.ready or target.reads(call.id):
                unfit.add(index)
                continue
            waiting.engine.client.release(waiting.submission)
            waiting.engine = self._engines[index]
            self.num_moved += 1
            self._chooser.table.sent(index, 0)
            self._remember(call.id, waiting.engine)
            waiting.submission.move_to(target)
            return True
        waiting.refused_by.clear()  # each has been asked once: the next time is after the pause that the last one named
        if len(self._engines) > 1:
            self._waiting[call.id] = waiting
            self._plan_watch()
        return False

    def _note_resumed(self, pause_s: float) -> None:
        self.on_resumed(pause_s)

    def _plan_watch(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(FAILOVER_S / 4, self._watch)

    def _watch(self) -> None:
        """While requests wait for their first token: is their engine still there?"""
        self._timer = None
        now = asyncio.get_running_loop().time()
        for engine in self._engines:
            if engine.client.connected:
                engine.away_since_s = None
            elif engine.away_since_s is None:
                engine.away_since_s = now
        for request_id, waiting in list(self._waiting.items()):
            call = waiting.submission.call
            if call.lost_s is not None and not call.finished:
                client = waiting.engine.client  # one that is READY has refused it and said when to ask again
                if (call.held and not client.ready) or not client.connected:
                    self._move_lost(waiting)
                continue
            if call.begun or call.rescue is None:
                del self._waiting[request_id]
                continue
            away_s = waiting.engine.away_since_s
            if away_s is not None and now - away_s >= FAILOVER_S:
                self._leave(waiting)
        if self._waiting:
            self._plan_watch()

    def _leave(self, waiting: _Waiting) -> None:
        """Take a request from an engine that does not answer, if another one is there to take it."""
        refused_by = {*waiting.refused_by, waiting.engine.index}
        if self._pick(*waiting.arguments, refused_by) is None:
            return
        waiting.engine.client.release(waiting.submission)
        waiting.submission.call.fail(InferEngineError("engine_unavailable", "The engine is gone."))

    def _remember(self, request_id: bytes, engine: _Engine) -> None:
        self._homes[request_id] = engine
        self._homes.move_to_end(request_id)
        while len(self._homes) > REMEMBERED_REQUESTS:
            self._homes.popitem(last=False)

    def _any_client(self) -> AsyncClient:
        for wanted in ("ready", "connected"):
            for client in self.clients:
                if getattr(client, wanted):
                    return client
        return self.clients[0]


def _beginning(prompt_ids: Sequence[int] | None, arguments: dict[str, Any]) -> Sequence[int] | str:
    """What affinity goes by, in whatever form the prompt comes."""
    if prompt_ids is not None:
        return prompt_ids
    if isinstance(text := arguments.get("text"), str):
        return text
    return "\0".join(str(message.get("content", "")) for message in arguments.get("messages") or ())


def _is_frozen(client: AsyncClient) -> bool:
    pong = client.last_pong
    return pong is not None and pong.loop_age_ms > FROZEN_LOOP_MS


def _health(client: AsyncClient) -> EngineHealth:
    pong = client.last_pong
    state = client.welcome.state if client.connected else None
    return EngineHealth(
        client.address, client.connected, state, None if pong is None else pong.loop_age_ms, client.status
    )
