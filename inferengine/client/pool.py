"""EnginePool: several engines behind one front end. There is no coordinator: each pool chooses engines by itself.

`load_balancing` decides which engine takes a request. The pool reports each engine's load to it: the last STATUS, up to
a quarter of a second old, and what the pool has sent since. An engine that drains, is frozen, or whose STATUS stops
gets no new requests.

A request without output moves to another engine, under the same id, when its engine refuses it (overloaded, draining)
or is gone. A request with output moves, with the output so far, when its engine is lost: the engine has another epoch,
was silent for a lease, or says that it gives up. If no other engine can take the request, it waits for its own. A
connection that breaks for less than FAILOVER_S moves nothing: the session resumes.

An engine whose requests fail repeatedly gets single probes only, until it recovers (circuit_breaker.py). If no other
engine is left it gets requests all the same.

With `hedge_share`, a request that produces nothing for too long gets a second run on an idle engine (hedging.py). The
run with the first output continues as the request; the other one is cancelled. The reader sees one stream with one end,
and the usage of the run that won: of all choices. Only requests with a single reader (not detached, no id of the
caller's own) are hedged.

A reader who attached waits for its engine when that is lost, and asks the others meanwhile: it reads on at the one
where the submitter has resumed the request. If none has it, the stream ends with an error that says so.

Engines may be added and removed (discovery.py). An engine that is no longer listed gets no new request, finishes what
it has, and is then forgotten. If it is not connected either, it counts as lost: its requests move without waiting for a
lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from inferengine.client.circuit_breaker import CircuitBreaker, CircuitState
from inferengine.client.client import AsyncClient, Stream, Submission
from inferengine.client.discovery import REFRESH_S as DISCOVERY_S
from inferengine.client.discovery import EngineDiscovery
from inferengine.client.hedging import HedgeBudget
from inferengine.client.load_balancing import (
    ChosenEngine,
    LoadBalancer,
    PromptHashes,
    remembered_beginnings,
    session_key,
)
from inferengine.client.requests import RESUME_WAIT_S, Delta, OpenRequest, engine_mismatch, error_of
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.wire.curve import ClientKeys
from inferengine.wire.messages import Accept, ModelFiles, Welcome, to_u64

FROZEN_LOOP_MS = 30_000.0
STATUS_SILENCE_S = 3.0  # a connected engine whose STATUS stops for so long is unhealthy
FAILOVER_S = 1.0  # how long a connection may be broken before requests without output move
REFRESH_S = 0.05  # between reports of the engines' loads
MAX_MOVES = 3
SEARCH_S = 0.5  # between two rounds in which all engines are asked for the request of a reader whose engine is lost
SEARCH_TIMEOUT_S = 5.0  # for the answer of each
REMEMBERED_REQUESTS = 65_536
_MOVABLE = {"overloaded", "draining", "engine_unavailable", "engine_restarted"}
_LOST = {"engine_unavailable", "engine_restarted"}
EVENTS = ("moved", "hedged", "hedge_won", "circuit_opened")  # arguments of `on_event`

logger = logging.getLogger(__name__)


class EngineHealth(NamedTuple):
    """State of one engine as its client sees it. `loop_age_ms` is None until the first PONG."""

    address: str
    connected: bool
    state: str | None
    loop_age_ms: float | None
    status: dict[str, Any] | None
    circuit: CircuitState = CircuitState.CLOSED


class _Engine:
    """One engine as this pool sees it."""

    def __init__(self, index: int, client: AsyncClient) -> None:
        self.index = index
        self.client = client
        self.circuit = CircuitBreaker()
        self.reported_s: float | None = None  # arrival of the STATUS that was last reported to the balancer
        self.spacing_s = 0.0  # seconds between the last two STATUS
        self.away_since_s: float | None = None
        self.is_named = True  # listed in the latest addresses
        self.is_closed = False  # no longer listed, and without requests

    def is_healthy(self, now: float) -> bool:
        """Return whether it takes new requests, as far as its client knows."""
        client = self.client
        if not self.is_named or not client.ready or _is_frozen(client):
            return False
        seen = client.status_received_s
        return seen is None or now - seen < max(STATUS_SILENCE_S, 4 * self.spacing_s)


class _PooledRequest:
    """A submission that the pool may move to another engine, and its hedge."""

    __slots__ = (
        "engine",
        "hedge",
        "moves",
        "num_prompt",
        "prompt",
        "refused_by",
        "submission",
        "submitted_s",
        "timer",
    )

    def __init__(
        self, submission: Submission, engine: _Engine, prompt: PromptHashes, num_prompt: int, now: float
    ) -> None:
        """`num_prompt`: tokens or characters of the prompt."""
        self.submission = submission
        self.engine = engine
        self.prompt = prompt
        self.num_prompt = num_prompt
        self.submitted_s = now
        self.refused_by: set[int] = set()
        self.moves = 0
        self.timer: asyncio.TimerHandle | None = None  # fires when the request may be hedged
        self.hedge: _Hedge | None = None


class _Hedge(NamedTuple):
    """The second run of a request."""

    engine: _Engine
    request: OpenRequest


class _PooledReader:
    """A reader who attached, and the engine where it reads."""

    __slots__ = ("engine", "is_searching", "submission")

    def __init__(self, submission: Submission, engine: _Engine) -> None:
        self.submission = submission
        self.engine = engine
        self.is_searching = False  # other engines are asked for its request


class EnginePool:
    """The methods of AsyncClient, over several engines."""

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
        discovery_s: float = DISCOVERY_S,
        hedge_share: float = 0.0,
    ) -> None:
        """Create the pool; `start` or `connect` connects it. Raises ConfigError for an entry that is no address.

        Args:
            addresses: Addresses of engines, or entries that stand for several engines (discovery.py).
            role: As AsyncClient's, like `name`, `window` and `resume_wait_s`.
            policy: A name in load_balancing.POLICIES.
            generator: Source of random choices.
            curve: Keys for engines on TCP that demand them.
            discovery_s: Seconds between lookups of the entries.
            hedge_share: Largest share of requests that get a second run; 0: none.
        """
        if not addresses:
            raise ValueError("at least one engine address is needed")
        # Called when a request has resumed after its engine was lost, with the length of the pause.
        self.on_resumed: Callable[[float], None] = lambda pause_s: None
        self.on_event: Callable[[str], None] = lambda event: None  # called with one of EVENTS
        self._hedges = HedgeBudget(hedge_share)
        self.num_moved = 0  # times that a request moved to another engine, or was sent again to its own
        self._make_client = partial(
            AsyncClient, role=role, name=name, window=window, curve=curve, resume_wait_s=resume_wait_s
        )
        self._discovery = EngineDiscovery(addresses)
        self._discovery_s = discovery_s
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._searches: set[asyncio.Task[None]] = set()
        self._engines: list[_Engine] = []  # only grows, so that an engine's index stays valid
        self._balancer = LoadBalancer((), policy, generator=generator)
        for address in self._discovery.fixed():
            self._add(address)
        self._engine_of: OrderedDict[bytes, _Engine] = OrderedDict()
        self._movable: dict[bytes, _PooledRequest] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._refreshed_s = float("-inf")
        self._closed = False

    @property
    def clients(self) -> list[AsyncClient]:
        """The clients of all engines, including engines that are no longer listed but still have requests."""
        return [engine.client for engine in self._engines if not engine.is_closed]

    @property
    def addresses(self) -> list[str]:
        """The addresses of the engines that may take new requests."""
        return [engine.client.address for engine in self._engines if engine.is_named]

    def start(self) -> None:
        """Connect to all engines in the background, and look for new ones. Needs a running event loop."""
        for client in self.clients:
            client.start()
        if self._discovery.is_dynamic and self._watching is None:
            self._watching = asyncio.create_task(self._discovery.watch(self.set_addresses, self._discovery_s))

    async def connect(self, timeout_s: float = 5.0) -> Welcome:
        """Connect to all in the background and wait for the first WELCOME. Raises engine_unavailable."""
        await self._find_any(timeout_s)
        return await self._first(timeout_s, lambda client: client.connect(timeout_s))

    async def wait_ready(self, timeout_s: float) -> Welcome:
        """Wait until one engine is READY. Raises engine_unavailable."""
        await self._find_any(timeout_s)
        return await self._first(timeout_s, lambda client: client.wait_ready(timeout_s))

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Use the engines at these addresses from now on.

        New engines are connected. An engine that is missing gets no new request, and its connection is closed when its
        last request has ended.
        """
        named = set(addresses)
        present = {engine.client.address: engine for engine in self._engines if not engine.is_closed}
        for address, engine in present.items():
            engine.is_named = address in named
        for address in addresses:
            if address not in present:
                self._add(address).client.start()
        self._refreshed_s = float("-inf")
        self._close_unnamed()

    async def _find_any(self, timeout_s: float) -> None:
        """Wait until a lookup has found an engine, or the time is over."""
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.clients:
                    await asyncio.sleep(0.02)

    def _add(self, address: str) -> _Engine:
        engine = _Engine(len(self._engines), self._make_client(address))
        engine.client.on_resumed = self._note_resumed
        engine.client.on_placed = partial(self._balancer.learn, engine.index)
        self._engines.append(engine)
        self._balancer.loads.add(address)
        return engine

    def _close_unnamed(self) -> None:
        """Close the connections to engines that are no longer named and have no request left."""
        waiting = False
        for engine in self._engines:
            if engine.is_named or engine.is_closed:
                continue
            if engine.client.num_open:
                engine.client.give_up()
                waiting = True
                continue
            engine.is_closed = True
            task = asyncio.ensure_future(engine.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        if waiting:
            self._plan_watch()

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
        """Whether some engine takes requests."""
        return any(client.ready for client in self.clients)

    @property
    def connected(self) -> bool:
        """Whether some engine is connected."""
        return any(client.connected for client in self.clients)

    @property
    def welcome(self) -> Welcome:
        """The WELCOME of a READY engine, else of any that has answered."""
        return self._any_client().welcome

    @property
    def status(self) -> dict[str, Any] | None:
        """The last STATUS of a READY engine, else of any."""
        return self._any_client().status

    def health(self) -> list[EngineHealth]:
        """Return the health of every engine."""
        return [_health(engine) for engine in self._engines if not engine.is_closed]

    async def close(self) -> None:
        """Close all connections, as AsyncClient.close."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._movable.clear()
        for search in self._searches:
            search.cancel()
        await asyncio.gather(*self._searches, return_exceptions=True)
        await asyncio.gather(*self._closing, *(client.close() for client in self.clients))

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
        """Submit a request to the engine that the policy chooses; arguments as for AsyncClient.submit.

        Requests of one `session` go to one engine while it is available and not overloaded. Sessions are separate for
        each tenant. Raises engine_unavailable when no engine takes requests.
        """
        request_id = arguments.get("request_id")
        known = self._engine_of.get(request_id) if request_id is not None else None  # a known id goes to its engine
        text = _affinity_text(prompt_ids, arguments)
        session = session_key(arguments.get("session", ""), arguments.get("tenant", ""))
        prompt = self._read(text, arguments.get("salt", b""), session)
        if known is not None and known.client.connected:
            engine, num_new_tokens = known, 0
        else:
            engine, num_new_tokens = self._choose(prompt)

        def prepare(submission: Submission) -> None:
            now = asyncio.get_running_loop().time()
            self._sent(engine, num_new_tokens, now)
            self._remember(submission.id, engine)
            pooled = _PooledRequest(submission, engine, prompt, len(text), now)
            submission.request.failover = partial(self._failover, pooled)
            submission.on_first(partial(self._on_first, pooled))
            if request_id is None and not arguments.get("detached"):
                self._plan_hedge(pooled, arguments)
            if self._can_move:
                self._movable[submission.id] = pooled
                self._plan_watch()

        placement = to_u64(remembered_beginnings(prompt.keys)), b"" if session is None else to_u64([session])
        return engine.client.submit(prompt_ids, params, prepare=prepare, placement=placement, **arguments)

    def attach(
        self, request_id: bytes, cursors: Sequence[int] = (), n: int = 1, reply: str = "tokens"
    ) -> Submission | PooledAttachment:
        """Attach as AsyncClient.attach does. Await `accepted()` before reading `streams`: the engine may have to be
        found."""
        known = self._engine_of.get(request_id)
        if known is None and len(self.clients) != 1:
            return PooledAttachment(self.clients, request_id, cursors, n, reply, on_accepted=self._follow)
        client = known.client if known is not None else self.clients[0]
        submission = client.attach(request_id, cursors, n, reply)
        self._follow(submission, client)
        return submission

    def cancel_request(self, request_id: bytes) -> None:
        """Cancel by id on the engine that has it, or on all when unknown."""
        known = self._engine_of.get(request_id)
        for client in self.clients if known is None else [known.client]:
            if client.connected or client.reads(request_id):
                client.cancel_request(request_id)

    async def model_files(self, files: Sequence[str] | None = None) -> ModelFiles:
        """Fetch the model's files as AsyncClient.model_files does, from a READY engine."""
        return await self._any_client().model_files(files)

    async def admin(self, op: str, **arguments: Any) -> Any:
        """Run an operation as AsyncClient.admin does, on any READY engine; to address a certain engine use
        `clients`."""
        return await self._any_client().admin(op, **arguments)

    def choose(self, prompt: Sequence[int] | str = (), salt: bytes = b"") -> AsyncClient:
        """Return the engine for a request with this prompt. Raises engine_unavailable when none is connected."""
        return self._choose(self._read(prompt, salt))[0].client

    # -- choosing and moving -----------------------------------------------------------------------------------------

    def _read(self, prompt: Sequence[int] | str, salt: bytes, session: int | None = None) -> PromptHashes:
        """Return what choosing an engine needs of a prompt."""
        now = asyncio.get_running_loop().time()
        if now - self._refreshed_s > REFRESH_S:  # with a single engine the prompt need not be hashed
            self._refresh(now)
        return self._balancer.read(prompt, salt, session)

    def _choose(self, prompt: PromptHashes) -> tuple[_Engine, int]:
        """Return the engine for a request, and how many prompt tokens it is expected to compute."""
        choice = self._pick(prompt, ())
        if choice is not None:
            return self._engines[choice.engine], choice.num_new_tokens
        for engine in self._engines:
            if engine.is_named and engine.client.connected:
                return engine, 0  # it is starting or draining; its REJECT tells the caller
        raise InferEngineError("engine_unavailable", "No engine is connected.", retry_after_s=1.0)

    def _pick(self, prompt: PromptHashes, avoid: Sequence[int] | set[int]) -> ChosenEngine | None:
        now = asyncio.get_running_loop().time()
        if now - self._refreshed_s > REFRESH_S:
            self._refresh(now)
        choice = self._balancer.place(prompt, avoid=avoid)
        if choice is not None and not self._engines[choice.engine].client.ready:
            self._refresh(now)
            choice = self._balancer.place(prompt, avoid=avoid)
        if choice is not None:
            return choice
        # No engine is healthy. An engine that is READY but seems frozen may only be slow.
        ready = (item.index for item in self._engines if item.is_named and item.client.ready)
        return next((ChosenEngine(index, 0) for index in ready if index not in avoid), None)

    def _refresh(self, now: float) -> None:
        """Report the engines' new STATUS to the balancer."""
        self._refreshed_s = now
        loads = self._balancer.loads
        for engine in self._engines:
            seen, status = engine.client.status_received_s, engine.client.status
            if seen is None or status is None or seen == engine.reported_s:
                continue
            engine.spacing_s = 0.0 if engine.reported_s is None else seen - engine.reported_s
            engine.reported_s = seen
            figures = [status.get(key, 0) for key in ("waiting_tokens", "running_requests", "waiting_requests")]
            if all(isinstance(figure, int) for figure in figures):
                loads.report(engine.index, figures[0], figures[1] + figures[2])
        available = [item for item in self._engines if item.is_healthy(now) and item.circuit.allows(now)]
        loads.set_available([engine.index for engine in available])

    def _failover(
        self, pooled: _PooledRequest, request: OpenRequest, error: InferEngineError
    ) -> InferEngineError | None:
        """Move a request whose engine refused it or is gone. Returns None when it moved or waits, else the error."""
        if self._closed or error.code not in _MOVABLE:
            return error
        if error.code in _LOST:
            self._note_failure(pooled.engine)
        if pooled.hedge is not None and self._go_on_as_hedge(pooled):
            return None
        if request.lost_s is not None:
            if request.resubmitted_s is None:  # sent to no engine since it was lost
                pooled.refused_by.clear()
            pooled.refused_by.add(pooled.engine.index)
            return None if self._move_lost(pooled) else error
        if request.begun or any(collector.cancelled for collector in request.collectors):
            if error.code in _LOST and request.begun:
                return InferEngineError("engine_restarted", "The engine that ran this request is gone.")
            return error
        return None if self._move_unstarted(pooled, is_engine_back=error.code == "engine_restarted") else error

    def _move_unstarted(self, pooled: _PooledRequest, *, is_engine_back: bool) -> bool:
        """Send a request without output to another engine. Returns whether an engine was found.

        `is_engine_back`: the request's engine has restarted, and may take the request if no other engine can.
        """
        if not is_engine_back:
            pooled.refused_by.add(pooled.engine.index)
        while pooled.moves < MAX_MOVES:
            pooled.moves += 1
            self._refreshed_s = float("-inf")
            choice = self._pick(pooled.prompt, pooled.refused_by)
            if choice is not None:
                index = choice.engine
            elif is_engine_back:
                index = pooled.engine.index
            else:
                return False
            try:
                pooled.submission.move_to(self._engines[index].client)
            except InferEngineError:
                pooled.refused_by.add(index)
                continue
            self._moved(pooled, index)
            return True
        return False

    def _moved(self, pooled: _PooledRequest, index: int) -> None:
        """Record that a request was sent to another engine."""
        pooled.engine = self._engines[index]
        self.num_moved += 1
        self.on_event("moved")
        self._sent(pooled.engine, 0, asyncio.get_running_loop().time())
        self._remember(pooled.submission.id, pooled.engine)

    def _move_lost(self, pooled: _PooledRequest) -> bool:
        """Resume a request whose engine is lost on another engine. Returns False when none can take it now.

        The request is then tried again: by the session that holds it, after the pause that its engine named, or by
        `_watch` when an engine is available.
        """
        request, unfit = pooled.submission.request, {pooled.engine.index, *pooled.refused_by}
        for engine in self._engines:
            if engine.client.ready and engine_mismatch(request, engine.client.welcome) is not None:
                unfit.add(engine.index)
        while (choice := self._pick(pooled.prompt, unfit)) is not None:
            index = choice.engine
            target = self._engines[index].client
            if not target.ready or target.reads(request.id):
                unfit.add(index)
                continue
            pooled.engine.client.release(pooled.submission)
            self._moved(pooled, index)
            pooled.submission.move_to(target)
            return True
        pooled.refused_by.clear()  # every engine has refused: the next round begins after the pause that the last named
        if self._can_move:
            self._movable[request.id] = pooled
            self._plan_watch()
        return False

    # -- readers who attached ----------------------------------------------------------------------------------------

    def _follow(self, submission: Submission, client: AsyncClient) -> None:
        """Have a reader who attached follow the request to another engine, if its submitter resumes it there."""
        if self._can_move and not submission.request.finished:
            engine = next(engine for engine in self._engines if engine.client is client)
            submission.request.failover = partial(self._reader_lost, _PooledReader(submission, engine))

    def _reader_lost(
        self, reader: _PooledReader, request: OpenRequest, error: InferEngineError
    ) -> InferEngineError | None:
        """Look for the request of a reader whose engine is lost. Returns the error that ends it if that is final."""
        if request.lost_s is None:
            return error
        if reader.engine.client.reads(request.id):  # it waits for its engine meanwhile
            if not reader.is_searching and not self._closed:
                reader.is_searching = True
                task = asyncio.ensure_future(self._search(reader))
                self._searches.add(task)
                task.add_done_callback(self._searches.discard)
            return error
        text = f"{error.message} Its engine was lost, and no other has the request: submit it again."
        return InferEngineError(error.code, text, field=error.field, retry_after_s=error.retry_after_s)

    async def _search(self, reader: _PooledReader) -> None:
        """Ask the other engines for a lost request until one has it, its own engine is back, or it has ended."""
        try:
            while self._is_searched(reader):
                for engine in self._engines:
                    if await self._has_request(engine, reader) and self._is_searched(reader):
                        reader.engine.client.forget(reader.submission.request)
                        reader.engine = engine
                        reader.submission.move_to(engine.client)
                        self._remember(reader.submission.id, engine)
                        return
                await asyncio.sleep(SEARCH_S)
        except InferEngineError as error:
            reader.submission.request.end(error)  # the engine was lost in that moment: no session has the request
        finally:
            reader.is_searching = False

    async def _has_request(self, engine: _Engine, reader: _PooledReader) -> bool:
        """Ask an engine that is not the reader's for its request, by attaching to it at the end of what is read."""
        client, request = engine.client, reader.submission.request
        if engine is reader.engine or engine.is_closed or not client.ready or client.reads(request.id):
            return False
        if engine_mismatch(request, client.welcome) is not None:
            return False
        reply = request.origin.reply
        cursors = [item.num_characters if reply == "text" else item.num_tokens for item in request.collectors]
        probe = None
        try:
            probe = client.attach(request.id, cursors, len(cursors), reply)
            async with asyncio.timeout(SEARCH_TIMEOUT_S):
                await probe.accepted()
            return True
        except (InferEngineError, TimeoutError):
            return False
        finally:
            if probe is not None:
                client.forget(probe.request)

    def _is_searched(self, reader: _PooledReader) -> bool:
        """Return whether a reader's request is still lost and waits for its engine."""
        request = reader.submission.request
        return request.lost_s is not None and not request.finished and reader.engine.client.reads(request.id)

    # -- circuits and hedges -----------------------------------------------------------------------------------------

    def _sent(self, engine: _Engine, num_new_tokens: int, now: float) -> None:
        """Count a request that is sent to an engine."""
        self._balancer.loads.sent(engine.index, num_new_tokens)
        if engine.circuit.sent(now):
            self._refreshed_s = float("-inf")  # it is a probe: the engine is not available before its outcome

    def _note_failure(self, engine: _Engine) -> None:
        circuit = engine.circuit
        if circuit.failed(asyncio.get_running_loop().time()):
            self._refreshed_s = float("-inf")
            self.on_event("circuit_opened")
            logger.warning(
                "engine %s gets no requests for %g s: %d failed in a row",
                engine.client.address,
                circuit.pause_s,
                circuit.num_failures,
            )

    def _note_success(self, engine: _Engine) -> None:
        if engine.circuit.succeeded():
            self._refreshed_s = float("-inf")
            logger.warning("engine %s gets requests again", engine.client.address)

    def _on_first(self, pooled: _PooledRequest, delta: Delta) -> None:
        """Record that a reader takes the first output of a request, of any choice, or the end of one."""
        if pooled.timer is not None:
            pooled.timer.cancel()
        if pooled.hedge is not None:
            self._end_hedge(pooled)
        finish = delta.finish
        if finish is None or finish.reason in ("stop", "length") or delta.token_ids or delta.text:
            self._note_success(pooled.engine)
            if not pooled.moves:
                took_s = asyncio.get_running_loop().time() - pooled.submitted_s
                self._hedges.observed(pooled.num_prompt, took_s)
        elif error_of(finish).code == "engine_error":
            self._note_failure(pooled.engine)
        else:
            pooled.engine.circuit.ended()

    def _plan_hedge(self, pooled: _PooledRequest, arguments: dict[str, Any]) -> None:
        """Schedule the hedge of a request, if it may have one."""
        delay_s = self._hedges.submitted(pooled.num_prompt)
        if delay_s is None or not arguments.get("resubmit", True):
            return
        if arguments.get("reply") != "embedding":
            pooled.timer = asyncio.get_running_loop().call_later(delay_s, self._hedge, pooled)

    def _hedge(self, pooled: _PooledRequest) -> None:
        """Start a second run of a request without output, if an engine is idle and the budget is not spent."""
        pooled.timer = None
        request = pooled.submission.request
        if self._closed or not self._is_undecided(request) or request.lost_s is not None or request.held:
            return
        # Without the session: it stays at its engine unless this run wins.
        choice = self._pick(pooled.prompt._replace(session=None), {*pooled.refused_by, pooled.engine.index})
        if choice is None:
            return
        engine = self._engines[choice.engine]
        client = engine.client
        if engine.circuit.state is not CircuitState.CLOSED or self._balancer.loads.waiting_tokens[engine.index]:
            return
        if not client.ready or client.reads(request.id) or engine_mismatch(request, client.welcome) is not None:
            return
        if not self._hedges.take():
            return
        try:
            hedge = client.hedge(request)
        except InferEngineError:
            return
        self._sent(engine, choice.num_new_tokens, asyncio.get_running_loop().time())
        pooled.hedge = _Hedge(engine, hedge)
        self.on_event("hedged")
        for collector in hedge.collectors:
            collector.on_output = partial(self._on_hedge_output, pooled, hedge)
        client.send()

    def _on_hedge_output(self, pooled: _PooledRequest, hedge: OpenRequest) -> None:
        """Handle output or the end of the second run."""
        if pooled.hedge is None or pooled.hedge.request is not hedge:
            return
        if hedge.failed:
            pooled.hedge = None  # refused, or lost: the first run goes on alone
            return
        if hedge.has_failed_choice:
            self._end_hedge(pooled)
            return
        loser = pooled.engine
        if self._go_on_as_hedge(pooled):
            self._note_failure(loser)
            self.on_event("hedge_won")

    def _go_on_as_hedge(self, pooled: _PooledRequest) -> bool:
        """Continue a request as its second run.

        Returns False if that is not possible, because the request has output or an end, or the second run has failed.
        The second run is then ended.
        """
        hedge, request = pooled.hedge, pooled.submission.request
        if hedge is None:
            return False
        if not self._is_undecided(request) or hedge.request.failed or not hedge.engine.client.reads(request.id):
            self._end_hedge(pooled)
            return False
        pooled.hedge = None
        pooled.engine.client.release(pooled.submission)
        pooled.refused_by.add(pooled.engine.index)
        pooled.engine = hedge.engine
        self._balancer.note_session(pooled.prompt, hedge.engine.index)
        self._remember(request.id, hedge.engine)
        pooled.submission.go_on_as(hedge.request, hedge.engine.client)
        return True

    def _end_hedge(self, pooled: _PooledRequest) -> None:
        """End the second run, if there is one."""
        hedge, pooled.hedge = pooled.hedge, None
        if hedge is not None:
            pooled.refused_by.add(hedge.engine.index)  # that engine may still run it, under the same id
            hedge.engine.client.end_hedge(hedge.request)

    @staticmethod
    def _is_undecided(request: OpenRequest) -> bool:
        """Return whether a request has neither output nor an end, and is not cancelled."""
        return not request.begun and not any(item.cancelled for item in request.collectors)

    @property
    def _can_move(self) -> bool:
        """Whether there is another engine to move to, or may be later."""
        return len(self._engines) > 1 or self._discovery.is_dynamic

    def _note_resumed(self, pause_s: float) -> None:
        self.on_resumed(pause_s)

    def _plan_watch(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(FAILOVER_S / 4, self._watch)

    def _watch(self) -> None:
        """Check the engines of requests that can move; repeated while there are such requests."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        for engine in self._engines:
            if engine.client.connected:
                engine.away_since_s = None
            elif engine.away_since_s is None:
                engine.away_since_s = now
        for request_id, pooled in list(self._movable.items()):
            request = pooled.submission.request
            if request.lost_s is not None and not request.finished:
                client = pooled.engine.client  # if READY, it refused the request and named the time of the next try
                if (request.held and not client.ready) or not client.connected:
                    self._move_lost(pooled)
                continue
            if request.begun or request.failover is None:
                if pooled.hedge is not None:
                    self._end_hedge(pooled)
                del self._movable[request_id]
                continue
            away_s = pooled.engine.away_since_s
            if away_s is not None and now - away_s >= FAILOVER_S:
                self._move_away(pooled)
        self._close_unnamed()
        if self._movable:
            self._plan_watch()

    def _move_away(self, pooled: _PooledRequest) -> None:
        """Move a request off an engine that does not answer, if another engine is available."""
        refused_by = {*pooled.refused_by, pooled.engine.index}
        if self._pick(pooled.prompt._replace(session=None), refused_by) is None:
            return
        pooled.engine.client.release(pooled.submission)
        pooled.submission.request.fail(InferEngineError("engine_unavailable", "The engine is gone."))

    def _remember(self, request_id: bytes, engine: _Engine) -> None:
        if not self._can_move:
            return  # there is one engine for all requests
        self._engine_of[request_id] = engine
        self._engine_of.move_to_end(request_id)
        while len(self._engine_of) > REMEMBERED_REQUESTS:
            self._engine_of.popitem(last=False)

    def _any_client(self) -> AsyncClient:
        for wanted in ("ready", "connected"):
            for client in self.clients:
                if getattr(client, wanted):
                    return client
        if not (clients := self.clients):
            raise InferEngineError("engine_unavailable", "No engine is known yet.", retry_after_s=1.0)
        return clients[0]


class PooledAttachment:
    """An ATTACH to a request whose engine the pool does not know, for instance after a restart: asks each in turn."""

    def __init__(
        self,
        clients: Sequence[AsyncClient],
        request_id: bytes,
        cursors: Sequence[int],
        n: int,
        reply: str,
        *,
        on_accepted: Callable[[Submission, AsyncClient], None],
    ) -> None:
        """`on_accepted` is called with what was accepted and where."""
        self.id = request_id
        self.streams: list[Stream] = []
        self._clients = clients
        self._arguments = (cursors, n, reply)
        self._on_accepted = on_accepted
        self._submission: Submission | None = None
        self._cancelled = self._left = False

    async def accepted(self) -> Accept:
        """Wait for ACCEPT and fill `streams`. Raises not_found when no engine has the request."""
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
            self._on_accepted(submission, client)
            if self._cancelled:
                submission.cancel()
            if self._left:
                submission.leave()
            return accept
        raise failure

    def cancel(self) -> None:
        """Cancel as Submission.cancel does."""
        self._cancelled = True
        if self._submission is not None:
            self._submission.cancel()

    def leave(self) -> None:
        """Leave as Submission.leave does."""
        self._left = True
        if self._submission is not None:
            self._submission.leave()


def _affinity_text(prompt_ids: Sequence[int] | None, arguments: dict[str, Any]) -> Sequence[int] | str:
    """Return the tokens or text from which prefix affinity is computed, for every form of prompt."""
    if prompt_ids is not None:
        return prompt_ids
    if isinstance(text := arguments.get("text"), str):
        return text
    return "\0".join(str(message.get("content", "")) for message in arguments.get("messages") or ())


def _is_frozen(client: AsyncClient) -> bool:
    pong = client.last_pong
    return pong is not None and pong.loop_age_ms > FROZEN_LOOP_MS


def _health(engine: _Engine) -> EngineHealth:
    client = engine.client
    pong = client.last_pong
    state = client.welcome.state if client.connected else None
    return EngineHealth(
        client.address,
        client.connected,
        state,
        None if pong is None else pong.loop_age_ms,
        client.status,
        engine.circuit.state,
    )
