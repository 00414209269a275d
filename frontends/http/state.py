"""HttpState: what all routes of one worker share. RunningCall: ends a generation when its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Receive

from frontends.common.auth import ApiKey, KeyRing, Quotas, key_of
from frontends.common.event_loop import AdmissionThrottle, Coalescer
from frontends.common.generation import Submitter
from frontends.common.json import OffLoop, read_flag
from frontends.common.model import ModelContext, ServedModel
from frontends.common.resumable import Registry, RequestMetadata
from frontends.common.shares import share_of
from frontends.http.detached import LogSubmitter, StreamState, new_stream
from frontends.http.openai.batch_runner import BatchRunner
from frontends.http.openai.batch_store import BatchStore, store_folder, store_limits
from frontends.http.openai.response_store import ResponseStore
from frontends.http.telemetry import HttpMetrics, TracedSubmitter
from inferengine.client import EnginePool, Submission
from inferengine.config import Config
from inferengine.errors import InferEngineError
from inferengine.observability.tracing import Span, Tracing
from inferengine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

STREAM_HEADER = "x-stream-id"
SESSION_HEADER = "x-session-id"
GRACE_S = 2.0  # the engine ends a request at its deadline; this much later the front end does it alone


class HttpState:
    """Engines, model, configuration and calls in flight of one worker. Create it, then `start` it in the event loop."""

    def __init__(
        self,
        config: Config,
        engines: EnginePool,
        metrics: HttpMetrics,
        keys: KeyRing,
        quotas: Quotas,
        responses_path: Path | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`responses_path`: the database in which the workers of one front end keep responses; None with one worker."""
        self.config = config
        self.engines = engines
        self.metrics = metrics
        self.keys = keys
        self.quotas = quotas
        self.tracing = tracing
        self.model = ModelContext(engines)
        self.registry = Registry(engines, config.wire.resume_ttl_s, cancel_unread=False)
        self.responses = ResponseStore(responses_path)
        self.files = BatchStore(store_folder(config), store_limits(config))
        self.batches = BatchRunner(self)
        self.coalescer = Coalescer()
        self.admission = AdmissionThrottle()
        self.off_loop = OffLoop()
        self.draining = False
        self.started_s = time.time()
        self._calls: set[RunningCall] = set()
        self._prefetch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect to the engines in the background; the front end may be up before any of them."""
        self.engines.start()
        self._prefetch = asyncio.create_task(self._fetch_model())

    async def close(self) -> None:
        """Close the stream registry, the response store, the engine connections and tracing."""
        if self._prefetch is not None:
            self._prefetch.cancel()
        await self.batches.close()
        self.files.close()
        self.registry.close()
        self.responses.close()
        await self.engines.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def drain(self) -> None:
        """Refuse new generations. Those in flight go on."""
        self.draining = True

    def abandon_all(self) -> None:
        """End all calls in flight with `draining`, because the drain timeout is over."""
        for call in list(self._calls):
            call.end(InferEngineError("draining", "The server is shutting down.", retry_after_s=1.0))

    @property
    def num_calls(self) -> int:
        """Number of calls being answered."""
        return len(self._calls)

    async def served(self) -> ServedModel:
        """Return the model for a new request. Raises `draining` or `engine_unavailable` if none may begin."""
        if self.draining:
            raise InferEngineError("draining", "The server is shutting down.", retry_after_s=1.0)
        await self.admission.wait()
        return await self.model.get()

    def engines_for(self, request: Request, served: ServedModel, *, detachable: bool = True) -> Submitter:
        """Return where to submit this request's generation, with its key's tenant, salt and priority.

        Call it after the body has been read: its fields may detach the request. `detachable` false: this route's
        streams cannot be resumed. Raises `forbidden` for a model that the key may not use.
        """
        chosen: Submitter = self._submitter(request, served, detachable)
        span: Span | None = request.scope.get("span")
        if span is not None:
            return TracedSubmitter(chosen, span, served.name, request.scope["path"])
        return chosen

    def _submitter(self, request: Request, served: ServedModel, detachable: bool) -> Any:
        """Return what submits, as `engines_for` does. A request is detached by `detached: true`, or by an id for its
        stream. `model` may name a LoRA adapter."""
        scope = request.scope
        key = key_of(scope)
        document: dict[str, Any] = scope.get("document", {})
        model = str(document.get("model") or served.name)
        if not key.may_use(model):
            raise InferEngineError("forbidden", "This key may not use that model.", field="model")
        adapter = served.adapter_of(model) or ""
        session = request.headers.get(SESSION_HEADER, "")
        common: dict[str, Any] = {"session": session, "share": share_of(scope.get("client"), document, session)}
        if not detachable:
            return KeyedSubmitter(self.engines, key, adapter, **common)
        state: StreamState | None = scope.get("stream")  # a stream that is resumed
        if state is not None:
            return LogSubmitter(self.registry, state, key, None, adapter, **common)
        chosen_id = request.headers.get(STREAM_HEADER)
        if chosen_id is None and not read_flag(document, "detached"):
            return KeyedSubmitter(self.engines, key, adapter, **common)
        state = scope["stream"] = new_stream(chosen_id, request.headers.get("last-event-id"))
        body: bytes = scope.get("body", b"")
        metadata = RequestMetadata(key.tenant, scope["path"], scope["request_id"], int(time.time()), body)
        return LogSubmitter(self.registry, state, key, metadata, adapter, **common)

    @contextlib.contextmanager
    def call(self, generation: Submitted, receive: Receive) -> Iterator[RunningCall]:
        """Watch a generation while it is answered, as a context manager.

        The generation ends when the client disconnects, and GRACE_S after its deadline at the latest. At exit what has
        not finished is cancelled.
        """
        call = RunningCall(generation, receive, self.config.http.request_timeout_s + GRACE_S)
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)
            call.close()

    async def _fetch_model(self) -> None:
        """Fetch the tokenizer before the first request needs it."""
        while True:
            try:
                await self.engines.wait_ready(3600.0)
                await self.model.get()
                return
            except InferEngineError as error:
                logger.debug("the model is not at hand yet: %s", error)
                await asyncio.sleep(0.2)


class Submitted(Protocol):
    """The part of a generation that RunningCall uses."""

    def cancel(self) -> None:
        """Cancel the generation in the engine. May be called repeatedly."""

    def abandon(self, error: InferEngineError) -> None:
        """End the generation at once, without waiting for the engine; its readers get `error`."""


class RunningCall:
    """Ends a generation when its client disconnects or its deadline is over.

    It listens for the disconnect from the start: while the request waits, is computed, and is streamed.
    """

    def __init__(self, generation: Submitted, receive: Receive, timeout_s: float) -> None:
        self.client_gone = False
        self._generation = generation
        self._watch: asyncio.Task[None] | None = asyncio.create_task(self._listen(receive))
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._too_late)

    def end(self, error: InferEngineError) -> None:
        """End the generation at once, without waiting for the engine."""
        self._generation.abandon(error)

    def close(self) -> None:
        """Stop watching the client and the deadline, and cancel what has not finished."""
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # a cancelled task keeps its error, and with it the frame that has this object
        self._generation.cancel()

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        self.client_gone = True
        self.end(InferEngineError("cancelled", "The client went away."))

    def _too_late(self) -> None:
        self.end(InferEngineError("deadline_exceeded", "The request took longer than http.request_timeout_s."))


class KeyedSubmitter:
    """Submits to the engines with the tenant, cache salt and priority of an API key."""

    def __init__(
        self, engines: Submitter, key: ApiKey, adapter: str, *, session: str = "", share: tuple[str, ...] = ()
    ) -> None:
        """`session`: for requests without one. `share`: see `frontends.common.shares`."""
        self._engines = engines
        self._key = key
        self._adapter = adapter
        self._session = session
        self._share = share

    def submit(
        self, prompt_ids: Sequence[int] | None = None, params: SamplingParams | None = None, **arguments: Any
    ) -> Submission:
        """Submit one prompt, given as token ids or as one of `arguments`."""
        arguments |= {"session": arguments.get("session") or self._session, "share": self._share}
        return self._engines.submit(prompt_ids, params, **self._key.restrict(arguments, self._adapter))
