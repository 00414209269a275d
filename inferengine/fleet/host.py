"""Host of one engine process: starts `inferengine engine` with CURVE keys on a free port, and reports its state.

A thread of the host starts the process, and lives as long as the host's process. The kernel kills the engine when the
thread that started it is gone (PR_SET_PDEATHSIG), so the engine never outlives its host, however that ends.
Keys and the unix socket lie in a folder of mode 0700 that belongs to this engine.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inferengine.client import Client
from inferengine.config.environment import variables
from inferengine.errors import ExitCode, InferEngineError
from inferengine.fleet.scaling import Load
from inferengine.fleet.spec import FleetKeys
from inferengine.process.child import Child, ChildSpec
from inferengine.process.supervisor import DRAIN_GRACE_S
from inferengine.wire.curve import KeyPair, write_pair

TURN_S = 0.2  # longest wait of the host's thread for output, before it looks at the process again
LOAD_S = 1.0  # between requests for the engine's load
LOAD_TIMEOUT_S = 5.0
WINDOW_S = 30.0  # the percentile is of first tokens in the last WINDOW_S
SHARE = 0.95  # the percentile
FIRST_PORT, LAST_PORT = 20_000, 32_000  # below the ephemeral ports that systems give to clients
PORTS = 3  # requests, STATUS, KV events
PORT_TRIES = 5
KEPT_LINES = 12  # last lines of output, kept to tell why an engine ended


class EngineHost:
    """One engine process, from start to end. Thread-safe."""

    def __init__(
        self,
        name: str,
        host: str,
        settings: Mapping[str, str],
        keys: FleetKeys,
        *,
        drain_timeout_s: float,
        watchdog_s: float = 0.0,
    ) -> None:
        """Start the engine.

        Args:
            name: The engine's name, for logs and process lists.
            host: This machine's address, at which front ends reach the engine.
            settings: INFERENGINE_* variables.
            keys: The CURVE keys of the fleet.
            drain_timeout_s: Seconds that a drain may take; the engine is killed a little later.
            watchdog_s: An engine without a sign of life for so many seconds is killed; 0: it is not watched.
        """
        self._name = name
        self._host = f"[{host}]" if ":" in host else host
        self._settings = dict(settings)
        self._drain_timeout_s = drain_timeout_s
        self._watchdog_s = watchdog_s
        self._folder = Path(tempfile.mkdtemp(prefix="inferengine-fleet-"))  # mode 0700
        write_pair(self._folder / "engine.key", KeyPair(keys.engine_public.encode(), keys.engine_secret.encode()))
        (self._folder / "clients.toml").write_text(f'front = "{keys.front_public}"\n')
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt the thread that holds it
        self._status = "starting"
        self._address = ""
        self._child: Child | None = None
        self._load = Load()
        self._exit_code: int | None = None
        self._lifetime_s = 0.0
        self._num_sigterms = 0  # SIGTERMs still to send
        self._kill_at: float | None = None
        self.ended = threading.Event()
        threading.Thread(target=self._run, name="inferengine-host", daemon=True).start()

    def report(self) -> dict[str, Any]:
        """Return state, address and load as plain values. `exit_code` is None while the process runs."""
        with self._lock:
            child = self._child
            is_ready = child is not None and child.ready and self._exit_code is None
            return {
                "pid": child.pid if child is not None else 0,
                "ready": is_ready,
                "address": self._address,
                "status": self._status,
                "load": list(self._load),
                "exit_code": self._exit_code,
                "lifetime_s": self._lifetime_s,
            }

    def drain(self) -> None:
        """Tell the engine to refuse new requests, finish what runs and exit. A second call ends it at once."""
        with self._lock:
            self._num_sigterms += 1

    def kill(self) -> None:
        """End the engine at once, as SIGKILL does."""
        with self._lock:
            if self._child is not None and self._exit_code is None:
                self._child.kill(signal.SIGKILL)

    # -- the host's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for _ in range(PORT_TRIES):
                code, lifetime_s = self._run_once(free_ports(self._host))
                if code != ExitCode.ADDRESS:
                    break
        except Exception as error:
            code, lifetime_s = ExitCode.CRASH, 0.0
            self._lines.append(f"the engine cannot be started: {error}")
        with self._lock:
            self._exit_code, self._lifetime_s = code, lifetime_s
            self._status = last_words(self._lines)
        shutil.rmtree(self._folder, ignore_errors=True)
        self.ended.set()

    def _run_once(self, port: int) -> tuple[int, float]:
        """Run the engine until it ends.

        Returns its exit code (128 + the signal's number after a signal) and its lifetime in seconds.
        """
        address = f"tcp://{self._host}:{port}"
        child = Child(self._spec(address), self._folder, time.monotonic())
        with self._lock:
            self._child, self._address = child, address
        threading.Thread(target=self._read_loads, args=(child,), name="inferengine-load", daemon=True).start()
        with selectors.DefaultSelector() as selector:
            selector.register(child.output, selectors.EVENT_READ)
            selector.register(child.notify, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(TURN_S):
                    if key.fileobj is child.notify:
                        self._read_notifications(child)
                    elif not self._read_lines(child):
                        selector.unregister(child.output)
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    break
                self._send_signals(child)
        self._read_lines(child)
        child.close()
        number = os.waitstatus_to_exitcode(status)
        return (number if number >= 0 else 128 - number), time.monotonic() - child.started_at

    def _spec(self, address: str) -> ChildSpec:
        environment = {
            **variables(),
            **self._settings,
            "INFERENGINE_ENGINE_NAME": self._name,
            "INFERENGINE_WIRE_SOCKET": f"ipc://{self._folder}/engine.sock",
            "INFERENGINE_WIRE_TCP": address,
            "INFERENGINE_WIRE_CURVE_SECRET_FILE": str(self._folder / "engine.key"),
            "INFERENGINE_WIRE_CURVE_CLIENTS_FILE": str(self._folder / "clients.toml"),
        }
        # The name is passed as an argument so that a process list shows which engine it is.
        command = [sys.executable, "-m", "inferengine.cli", "engine", "--engine.name", self._name]
        return ChildSpec("engine", command, environment, watchdog_s=self._watchdog_s, dies_by=signal.SIGKILL)

    def _read_lines(self, child: Child) -> bool:
        lines = child.read_lines()
        for line in lines or []:
            self._lines.append(line)
            print(line, file=sys.stderr, flush=True)  # Ray keeps it as the actor's log
        return lines is not None

    def _read_notifications(self, child: Child) -> None:
        with self._lock:
            for notification in child.read_notifications(time.monotonic()):
                if notification.status:
                    self._status = notification.status

    def _send_signals(self, child: Child) -> None:
        now = time.monotonic()
        with self._lock:
            num_sigterms, self._num_sigterms = self._num_sigterms, 0
        for _ in range(num_sigterms):
            child.kill(signal.SIGTERM)
            self._kill_at = self._kill_at or now + self._drain_timeout_s + DRAIN_GRACE_S
        frozen_at = child.watchdog_expires_at()
        if any(at is not None and at <= now for at in (self._kill_at, frozen_at)):
            child.kill(signal.SIGKILL)

    # -- the thread that asks for the load ---------------------------------------------------------------------------

    def _read_loads(self, child: Child) -> None:
        """Read the engine's load over its unix socket every LOAD_S, until it ends."""
        first_tokens = RecentFirstTokens(WINDOW_S)
        client = Client(f"ipc://{self._folder}/engine.sock", status_address="", role="fleet")
        try:
            while self._child is child and not self.ended.wait(LOAD_S):
                if not child.ready:
                    continue
                with contextlib.suppress(InferEngineError):
                    client.connect(LOAD_TIMEOUT_S)
                    stats = client.admin("stats")
                    histogram = stats["histograms"]["time_to_first_token_seconds"]
                    first_s = first_tokens.add(time.monotonic(), histogram["buckets"], histogram["counts"])
                    self._load = Load(
                        stats.get("running_requests", 0),
                        stats.get("waiting_requests", 0),
                        stats.get("kv_usage", 0.0),
                        first_s,
                    )
        finally:
            client.close()


class RecentFirstTokens:
    """The 95th percentile of recent times to the first token, from a histogram that counts since the engine's start."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, list[int]]] = deque()

    def add(self, now: float, bounds: Sequence[float], counts: Sequence[int]) -> float:
        """Add a reading of the histogram and return the percentile over the window.

        Args:
            now: Time of the reading, in seconds.
            bounds: Upper bound of each bucket, in seconds.
            counts: Count of each bucket, and of the values above the last bound.

        Returns the upper bound in seconds of the bucket that holds the percentile; 0 if no first token came.
        """
        self._seen.append((now, list(counts)))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        fresh = [after - before for before, after in zip(self._seen[0][1], counts, strict=True)]
        wanted, below = SHARE * sum(fresh), 0
        for bound, count in zip((*bounds, bounds[-1]), fresh, strict=True):
            below += count
            if below and below >= wanted:
                return bound
        return 0.0


@contextlib.contextmanager
def end_of_process(pid: int) -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for the end of a process for so many seconds at most, and returns whether it has
    come. Without pidfd (Linux before 5.3) it only waits."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield lambda wait_s: True
        return
    except OSError:
        yield _only_wait
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        yield lambda wait_s: bool(poll.poll(1000 * wait_s))
    finally:
        os.close(descriptor)


def _only_wait(wait_s: float) -> bool:
    time.sleep(wait_s)
    return False


def free_ports(host: str) -> int:
    """Return the first of PORTS neighbouring ports that are free now. Raises OSError if there are none.

    Another program may still take one before the engine does; the engine then ends with ExitCode.ADDRESS.
    """
    generator = random.SystemRandom()
    for _ in range(100):
        first = generator.randrange(FIRST_PORT, LAST_PORT)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + PORTS):
                family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
                probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.bind((host.strip("[]"), port))
            return first
    raise OSError(f"no {PORTS} neighbouring ports of {host} between {FIRST_PORT} and {LAST_PORT} are free")


def last_words(lines: Sequence[str]) -> str:
    """Return the line that tells why an engine ended: the last that reads like an error, else the last of all."""
    telling = [line for line in lines if any(word in line.lower() for word in ("error", "cannot", "must", "fit"))]
    return (telling or list(lines) or ["it wrote nothing"])[-1]
