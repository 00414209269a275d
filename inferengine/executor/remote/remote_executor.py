"""RemoteExecutor: a core.executor.Executor whose device is in another process or on another machine, over gRPC.

The engine keeps the scheduler, the bookkeeping of the KV cache and all requests. The remote side has the slots, the
blocks and the model. One stream carries plans to it and results back. When the stream breaks, brings what is no result
of its step, or a step takes longer than `remote.step_timeout_s`, the device counts as lost: the engine ends, as with a
local device, and is restarted. It then connects to the device again, which still has the model loaded.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import grpc
import msgspec

from inferengine.config import Config
from inferengine.config.model_path import model_folder
from inferengine.core.executor import Capacity, DeviceLost, Progress, StepPlan, StepResult
from inferengine.core.step_time import DevicePeaks, ModelWork, Roofline
from inferengine.errors import ConfigError, Unreachable
from inferengine.executor.remote import payloads

CLOSE_S = 2.0
MOST_TEXT = 500  # characters of a device's error that are kept


class RemoteStepFailed(RuntimeError):
    """A step raised on the remote device; its log has the cause."""


class RemoteDevice:
    """The remote device as `executor.device`: only its type is known."""

    def __init__(self, type: str) -> None:
        self.type = type


class RemoteStep:
    """Implements core.executor.StepFuture."""

    def __init__(
        self, step: int, future: Future[StepResult], provide: Callable[[bytes], None], timeout_s: float
    ) -> None:
        self._step, self._future, self._provide, self._timeout_s = step, future, provide, timeout_s

    def done(self) -> bool:
        """Return whether `result` would return at once."""
        return self._future.done()

    def provide_masks(self, words: bytearray) -> None:
        """Send the masks of this step."""
        self._provide(payloads.encode("masks", self._step, bytes(words)))

    def result(self) -> StepResult:
        """Wait for the step. Raises DeviceLost if the device does not answer in time."""
        try:
            return self._future.result(self._timeout_s)
        except FutureTimeout:
            raise DeviceLost(f"the remote device gave no result in {self._timeout_s:g} s") from None


class RemoteExecutor:
    """An executor on one remote device. It has no `launched` and no `adapters`: a remote device runs no adapters."""

    max_in_flight = 1

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for a wrong address or files that cannot be read."""
        remote = config.remote
        if not remote.address:
            raise ConfigError("remote.address", "name the device, such as 10.0.0.5:50051 (inferengine executor)")
        if config.model.adapters:
            raise ConfigError("model.adapters", "a remote device runs no adapters: leave it out")
        self._config = config
        self._channel = open_channel(config)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self._vocab_size = 0
        self._lost: DeviceLost | None = None
        self._on_lost: Callable[[BaseException], None] = lambda error: None
        self._call: Any = None
        self._roofline: Roofline | None = None
        self._closing = False
        self.dtype = ""
        self.implementation = ""
        self.device = RemoteDevice("cpu")

    def on_lost(self, function: Callable[[BaseException], None]) -> None:
        """Have `function` called once, from another thread, when the device is lost."""
        self._on_lost = function

    def roofline(self) -> Roofline | None:
        """Return the roofline model of the remote device, or None."""
        return self._roofline

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    def load(self, progress: Progress) -> Capacity:
        """Connect to the device and load its model.

        Raises Unreachable if it does not answer, ConfigError if it has another model, DeviceLost if it answers what no
        device of this version does.
        """
        progress("waiting for the remote device", 0.0)
        remote = self._config.remote
        try:
            grpc.channel_ready_future(self._channel).result(remote.connect_timeout_s)
        except grpc.FutureTimeoutError:
            message = (
                f"no answer from {remote.address} in {remote.connect_timeout_s:g} s: is the device there, and have "
                "both sides certificates of each other's authority (remote.tls_*), or neither?"
            )
            raise Unreachable("remote.address", message) from None
        asked = {"model": payloads.model_fingerprint(Path(model_folder(self._config)))}
        parts = self._follow("Load", payloads.encode(asked), progress)
        try:
            return self._read_description(payloads.plain(parts[0], dict[str, Any]))
        except payloads.NO_MESSAGE as error:
            raise self._no_device("Load", error) from None

    def _read_description(self, found: dict[str, Any]) -> Capacity:
        """Keep what the device says of itself. Raises one of NO_MESSAGE."""
        capacity = payloads.read_capacity(found["capacity"])
        self.max_in_flight = msgspec.convert(found["max_in_flight"], payloads.Size)
        self.dtype, self.implementation = str(found["dtype"]), str(found.get("implementation", ""))
        self.device = RemoteDevice(str(found["device"]))
        if found.get("roofline") is not None:
            work, peaks = msgspec.convert(found["roofline"], tuple[ModelWork, DevicePeaks])
            self._roofline = Roofline(work, peaks)
        self._vocab_size = capacity.vocab_size
        return capacity

    def _no_device(self, method: str, error: BaseException) -> DeviceLost:
        reason = f"{type(error).__name__}: {error}"[:MOST_TEXT]
        address = self._config.remote.address
        return DeviceLost(f"{address} answers {method} as no device of this version does ({reason}): compare versions")

    def warm_up(self, progress: Progress) -> None:
        """Warm the device up, then open the stream of steps. Raises DeviceLost if another engine uses the device."""
        self._follow("WarmUp", payloads.encode(), progress)
        steps = self._channel.stream_stream(f"/{payloads.SERVICE}/Steps")
        self._call = steps(iter(self._outbox.get, None))
        try:
            kind, _ = payloads.decode(next(self._call))
            if kind != "ready":
                raise ValueError(f"it says {kind!r:.40}")
        except grpc.RpcError as error:
            raise _refusal(error, self._config) from None
        except (StopIteration, *payloads.NO_MESSAGE) as error:
            raise self._no_device("Steps", error) from None
        threading.Thread(target=self._read, name="inferengine-remote", daemon=True).start()

    def flush(self) -> None:
        """Tell the device to drop what it keeps between requests."""
        self._outbox.put(payloads.encode("flush"))

    def close(self) -> None:
        """Disconnect from the device, which stays loaded."""
        self._closing = True
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()
        self._channel.close()

    # -- a step ------------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> RemoteStep:
        """Send one step. Raises DeviceLost."""
        future: Future[StepResult] = Future()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._open.append((plan, future))
        self._outbox.put(payloads.encode_step(plan))
        return RemoteStep(plan.step, future, self._outbox.put, self._config.remote.step_timeout_s)

    def _read(self) -> None:
        """Read the results of the steps in order until the stream breaks. Runs in a thread of its own."""
        reason = "the remote device ended the stream"
        try:
            for message in self._call:
                plan, future = self._open[0]  # it stays there until its message has proved to be one
                outcome = self._outcome(plan, message)
                self._open.popleft()
                if isinstance(outcome, StepResult):
                    future.set_result(outcome)
                else:
                    future.set_exception(outcome)
        except grpc.RpcError as error:
            reason = f"the remote device is gone: {error.code().name}: {error.details()}"
        except Exception as error:  # a thread that ended without a word would leave its steps waiting
            reason = f"the remote device sent what is no result: {type(error).__name__}: {error}"[:MOST_TEXT]
        if self._closing:
            return
        lost = DeviceLost(reason)
        with self._lock:
            self._lost = lost
            open_steps = list(self._open)
            self._open.clear()
        for _, future in open_steps:
            future.set_exception(lost)
        self._on_lost(lost)

    def _outcome(self, plan: StepPlan, message: bytes) -> StepResult | Exception:
        """Return the result or the error of a step that a message of the device tells. Raises one of NO_MESSAGE."""
        kind, parts = payloads.decode(message)
        if kind == "result":
            result = payloads.read_result(parts[0])
            payloads.check_result(result, plan, self._vocab_size)
            return result
        if kind != "error":
            raise ValueError(f"a message {kind!r:.40}")
        name, text, is_lost = (payloads.plain(part) for part in parts)
        error = DeviceLost if is_lost else RemoteStepFailed
        return error(f"on the remote device: {name}: {text}"[:MOST_TEXT])

    def _follow(self, method: str, request: bytes, progress: Progress) -> Any:
        """Call a method that streams its progress. Returns the parts of its final message."""
        last: Any = ()
        try:
            for message in self._channel.unary_stream(f"/{payloads.SERVICE}/{method}")(request):
                kind, parts = payloads.decode(message)
                if kind == "progress":
                    progress(payloads.plain(parts[0], str), payloads.plain(parts[1], float))
                else:
                    last = parts
        except grpc.RpcError as error:
            raise _refusal(error, self._config) from None
        except payloads.NO_MESSAGE as error:
            raise self._no_device(method, error) from None
        return last


def open_channel(config: Config) -> grpc.Channel:
    """Open a channel as the section [remote] says. Raises ConfigError for files that cannot be read."""
    remote = config.remote
    if not (remote.tls_ca or remote.tls_certificate):
        return grpc.insecure_channel(remote.address, payloads.CHANNEL_OPTIONS)
    key, certificate = read_pair(config)
    credentials = grpc.ssl_channel_credentials(read_file("remote.tls_ca", remote.tls_ca), key, certificate)
    return grpc.secure_channel(remote.address, credentials, payloads.CHANNEL_OPTIONS)


def read_pair(config: Config) -> tuple[bytes | None, bytes | None]:
    """Return this side's private key and certificate; None for each if not configured. Raises ConfigError."""
    remote = config.remote
    certificate = read_file("remote.tls_certificate", remote.tls_certificate)
    key = read_file("remote.tls_key", remote.tls_key)
    if (certificate is None) != (key is None):
        raise ConfigError("remote.tls_key", "certificate and key belong together: name both")
    return key, certificate


def read_file(key: str, path: str) -> bytes | None:
    """Return the content of the file that a configuration key names; None for an empty name. Raises ConfigError."""
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(key, f"cannot be read: {error.strerror}") from None


def _refusal(error: grpc.RpcError, config: Config) -> Exception:
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return ConfigError("model.path", f"{config.remote.address}: {details}")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return DeviceLost(f"{config.remote.address}: {details}")
    return DeviceLost(f"{config.remote.address}: {code.name}: {details}")
