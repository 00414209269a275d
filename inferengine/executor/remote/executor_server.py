"""ExecutorServer: serves the executor of this process to one engine at a time, over gRPC (executor.proto).

One thread does all of the executor's work. The model stays loaded when an engine disconnects. The next engine begins
with empty slots and blocks, like an engine that was restarted.
"""

from __future__ import annotations

import ipaddress
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc

from inferengine.config import Config
from inferengine.config.model_path import model_folder
from inferengine.core.executor import Capacity, Executor, StepFuture, is_fatal
from inferengine.errors import ConfigError, InferEngineError
from inferengine.executor.remote import payloads
from inferengine.executor.remote.plan_codec import decode_plan
from inferengine.executor.remote.remote_executor import read_file, read_pair

logger = logging.getLogger(__name__)

LOOK_S = 0.0002  # between checks of whether the device has computed a step
MAX_CALLS = 8
STOP_S = 5.0

SendStepResult = Callable[[bytes | None], None]


class _OpenStep:
    """A step that was started and not yet answered."""

    def __init__(self, number: int, future: StepFuture, waits_for_masks: bool) -> None:
        self.number, self.future, self.waits_for_masks = number, future, waits_for_masks


class ExecutorServer:
    """Serves one executor. Begin with `start`. `lost` is set when the device has failed and the process should end."""

    def __init__(self, config: Config, build: Callable[[], Executor]) -> None:
        """Raises ConfigError for an address that may not be listened on."""
        self._config, self._build = config, build
        self._fingerprint = payloads.model_fingerprint(model_folder(config))
        self._device = ThreadPoolExecutor(1, thread_name_prefix="inferengine-device")
        self._executor: Executor | None = None
        self._capacity: Capacity | None = None
        self._is_warm = False
        self._session = threading.Lock()
        self.lost = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(MAX_CALLS), options=payloads.CHANNEL_OPTIONS)
        methods = {
            "Load": grpc.unary_stream_rpc_method_handler(self._load),
            "WarmUp": grpc.unary_stream_rpc_method_handler(self._warm_up),
            "Steps": grpc.stream_stream_rpc_method_handler(self._steps),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(payloads.SERVICE, methods),))
        self.port = self._listen()

    def start(self) -> None:
        """Begin to answer calls."""
        self._server.start()
        logger.info("the device is lent on port %d", self.port)

    def stop(self) -> None:
        """Abort what runs and free the device."""
        self._server.stop(0.2).wait(STOP_S)
        if self._executor is not None:
            self._device.submit(self._executor.close).result()
        self._device.shutdown()

    def _listen(self) -> int:
        remote = self._config.remote
        key, certificate = read_pair(self._config)
        authority = read_file("remote.tls_ca", remote.tls_ca)
        if not (certificate and authority) and not _is_loopback(remote.listen):
            message = "beyond loopback addresses needs remote.tls_certificate, tls_key and tls_ca, for both sides"
            raise ConfigError("remote.listen", message)
        try:
            if certificate is None or key is None:
                return int(self._server.add_insecure_port(remote.listen))
            credentials = grpc.ssl_server_credentials([(key, certificate)], authority, authority is not None)
            return int(self._server.add_secure_port(remote.listen, credentials))
        except RuntimeError:
            raise ConfigError("remote.listen", f"{remote.listen} cannot be bound: choose another port") from None

    # -- RPC methods; each call runs in a thread of gRPC's pool ------------------------------------------------------

    def _load(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        asked = payloads.plain(payloads.decode_whole(request)[0], dict[str, Any])
        if asked.get("model") != self._fingerprint:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the device serves a model of other files")
        if self._capacity is None:  # else the device's thread may be busy with another engine
            yield from self._run_with_progress(self._load_executor, context)
        executor, capacity = self._executor, self._capacity
        if executor is None or capacity is None:
            raise RuntimeError("not loaded")
        roofline = getattr(executor, "roofline", lambda: None)()
        described = {
            "capacity": capacity,
            "max_in_flight": executor.max_in_flight,
            "dtype": str(getattr(executor, "dtype", "")).removeprefix("torch."),
            "device": str(getattr(getattr(executor, "device", None), "type", "cpu")),
            "implementation": getattr(executor, "implementation", ""),
            "roofline": None if roofline is None else (roofline.work, roofline.peaks),
        }
        yield payloads.encode("loaded", described)

    def _warm_up(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if not self._is_warm:
            yield from self._run_with_progress(self._warm_executor, context)

    def _steps(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        if not self._session.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another engine uses this device")
        try:
            if not self._is_warm:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "call Load and WarmUp first")
            yield payloads.encode("ready")
            inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            context.add_callback(lambda: inbox.put(None))
            threading.Thread(target=_pump, args=(requests, inbox), daemon=True).start()
            session = self._device.submit(self._run_session, inbox, outbox.put)
            yield from iter(outbox.get, None)
            session.result()
        finally:
            self._session.release()

    # -- the device's thread -----------------------------------------------------------------------------------------

    def _load_executor(self, progress: Callable[[str, float], None]) -> None:
        if self._capacity is None:
            self._executor = self._build()
            self._capacity = self._executor.load(progress)

    def _warm_executor(self, progress: Callable[[str, float], None]) -> None:
        if self._executor is not None and not self._is_warm:
            self._executor.warm_up(progress)
            self._is_warm = True

    def _run_session(self, inbox: queue.SimpleQueue[bytes | None], reply: SendStepResult) -> None:
        """Run one engine's steps until its stream ends, then wait for the steps that are still running."""
        executor = self._executor
        if executor is None:
            raise RuntimeError("not loaded")
        executor.flush()
        steps: deque[_OpenStep] = deque()
        is_open = True
        try:
            while is_open or steps:
                message: bytes | None = b""
                if is_open:
                    try:
                        message = inbox.get(timeout=LOOK_S if steps and not steps[0].waits_for_masks else None)
                    except queue.Empty:
                        message = b""
                if message is None:
                    is_open = False
                    if any(step.waits_for_masks for step in steps):
                        return  # the masks will never come
                elif message:
                    self._do(executor, message, steps, reply)
                while steps and not steps[0].waits_for_masks and (not is_open or steps[0].future.done()):
                    self._answer(steps.popleft().future, reply)
        finally:
            reply(None)

    def _do(self, executor: Executor, message: bytes, steps: deque[_OpenStep], reply: SendStepResult) -> None:
        kind, parts = payloads.decode(message)
        if kind == "step":
            plan = decode_plan(parts[0])
            try:
                future = executor.execute(plan)
            except Exception as error:
                while steps:  # answers must be in the order of the steps
                    self._answer(steps.popleft().future, reply)
                self._fail(error, reply)
                return
            steps.append(_OpenStep(plan.step, future, bool(plan.masked)))
        elif kind == "masks":
            number = payloads.plain(parts[0], int)
            waiting = next((step for step in steps if step.number == number and step.waits_for_masks), None)
            if waiting is not None:  # else the step has failed already
                waiting.future.provide_masks(bytearray(payloads.plain(parts[1], bytes)))
                waiting.waits_for_masks = False
        elif kind == "flush":
            executor.flush()

    def _answer(self, future: StepFuture, reply: SendStepResult) -> None:
        try:
            result = future.result()
        except Exception as error:
            self._fail(error, reply)
        else:
            reply(payloads.encode_result(result))

    def _fail(self, error: Exception, reply: SendStepResult) -> None:
        logger.error("a step failed", exc_info=error)
        reply(payloads.encode("error", type(error).__name__, str(error)[:500], is_fatal(error)))
        if is_fatal(error):
            self.lost.set()

    def _run_with_progress(
        self, work: Callable[[Callable[[str, float], None]], None], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Do some work in the device's thread, and yield messages about its progress."""
        messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        done: Future[None] = self._device.submit(
            work, lambda phase, share: messages.put(payloads.encode("progress", phase, float(share)))
        )
        done.add_done_callback(lambda _: messages.put(None))
        yield from iter(messages.get, None)
        error = done.exception()
        if error is not None:
            logger.error("the device cannot be used", exc_info=error)
            text = str(error) if isinstance(error, InferEngineError) else type(error).__name__
            context.abort(grpc.StatusCode.INTERNAL, text)


def _pump(requests: Iterator[bytes], inbox: queue.SimpleQueue[bytes | None]) -> None:
    try:
        for message in requests:
            inbox.put(message)
    except Exception as error:  # gRPC raises plain Exception when the stream breaks
        logger.info("the engine's stream broke: %s", error)
    inbox.put(None)


def _is_loopback(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
