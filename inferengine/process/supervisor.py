"""Supervisor: starts a few child processes, restarts them with backoff, drains and aborts them, for `inferengine up`.

To stop, all children get SIGTERM at once, as with the systemd units. Front ends accept no more connections and let
their streams end. The engine refuses new requests and finishes those that run. One deadline applies to all.

The supervisor is one thread with one selector, which wakes for output, notifications, signals and timers. It imports
neither torch nor zmq, so it starts at once and their failures cannot end it.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from inferengine.errors import ExitCode
from inferengine.process.child import Child, ChildSpec
from inferengine.process.system import missed_s

FAST_FAILURE_S = 10.0  # a run shorter than this counts towards giving up
MAX_FAST_FAILURES = 5
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
DRAIN_GRACE_S = 10.0  # on top of engine.drain_timeout_s, before SIGKILL: time for the last messages
ABORT_S = 3.0
LOST_RETRY_S = 60.0  # between restarts of an engine that keeps failing while others serve
RETRY_S = 0.2  # between attempts to write output that waits for its reader
STALLS_FORGOTTEN_S = 120.0  # after a run this long, stalls are counted from zero
STALLS = (ExitCode.STALLED, ExitCode.FROZEN)
FINAL_CODES = {  # exit codes that a restart would repeat, of a process that has not served yet
    ExitCode.USAGE: "the configuration or the command line is wrong",
    ExitCode.MODEL: "the model cannot be loaded",
    ExitCode.MEMORY: "the model does not fit into memory",
    ExitCode.ADDRESS: "a socket cannot be bound",
}


class View(Protocol):
    """Shows what happens, such as a terminal."""

    def line(self, name: str, text: str) -> None:
        """Show a line of output of a child."""
        ...

    def status(self, name: str, text: str) -> None:
        """Show the status of a child."""
        ...

    def notice(self, text: str) -> None:
        """Show a message of the supervisor."""
        ...

    def retry(self) -> bool:
        """Write what could not be written before. Returns whether something still waits."""
        ...


class RestartDecision(NamedTuple):
    """What to do after an exit: restart after `delay_s` seconds, or end with `code` if that is None."""

    delay_s: float | None
    code: int
    reason: str


class RestartPolicy:
    """Decides whether and when to restart one child.

    The delay is short after a long run, and grows with consecutive short runs. After a stall the restart is immediate,
    because clients wait for the engine; only repeated stalls have a delay. A process that has served is restarted after
    every code: another program may use the memory or the port for a time, or a file be half copied.
    """

    def __init__(self) -> None:
        self.has_served = False  # whether it has ever been ready
        self.fast_failures = 0
        self.stalls = 0

    def after_exit(self, code: int, lifetime_s: float) -> RestartDecision:
        """Return what to do. `code`: the exit code, or 128 + the signal's number. `lifetime_s`: seconds of the run."""
        if code in FINAL_CODES:
            return RestartDecision(LONGEST_DELAY_S if self.has_served else None, code, FINAL_CODES[code])
        self.fast_failures = self.fast_failures + 1 if lifetime_s < FAST_FAILURE_S else 0
        if self.fast_failures >= MAX_FAST_FAILURES:
            return RestartDecision(
                None, code, f"it failed {self.fast_failures} times in a row within {FAST_FAILURE_S:g} s"
            )
        if lifetime_s >= STALLS_FORGOTTEN_S:
            self.stalls = 0
        if code in STALLS:
            self.stalls += 1
            return RestartDecision(_delay_s(self.stalls - 1) if self.stalls > 1 else 0.0, code, "")
        return RestartDecision(_delay_s(self.fast_failures), code, "")


def _delay_s(number: int) -> float:
    """Return the seconds before a restart after `number` failures in a row."""
    delay_s: float = FIRST_DELAY_S * 2 ** max(0, number - 1)
    return min(LONGEST_DELAY_S, delay_s)


def describe_exit(code: int) -> str:
    """Return a text such as `exit code 1` or `killed by SIGKILL`."""
    if code > 128 and code != ExitCode.ABORTED:
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


class Supervisor:
    """Runs `engines` and `front_ends` until a signal comes or a child cannot be kept running.

    With several engines the service does not end with one of them. An engine that an operator drained is not restarted.
    An engine that has served and now keeps failing is restarted every LOST_RETRY_S while another engine is ready.
    """

    def __init__(
        self,
        engines: Sequence[ChildSpec],
        front_ends: Sequence[ChildSpec],
        folder: Path,
        view: View,
        *,
        drain_timeout_s: float,
        when_ready: Callable[[float], None],
        hangup_stops: bool = False,
    ) -> None:
        """`when_ready` is called with the seconds until every child was ready. `hangup_stops`: SIGHUP means that the
        terminal was closed, and stops the service; otherwise it is passed on to the children, which reload."""
        self._engines = {spec.name for spec in engines}
        self._specs = {spec.name: spec for spec in (*engines, *front_ends)}
        self._folder = folder
        self._view = view
        self._drain_timeout_s = drain_timeout_s
        self._when_ready = when_ready
        self._hangup_stops = hangup_stops
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, Child] = {}
        self._policies = {name: RestartPolicy() for name in self._specs}
        self._restarts: dict[str, float] = {}
        self._kill_at: float | None = None
        self._signals = 0
        self._stopping = False
        self._announced = False
        self._exit_code = ExitCode.OK
        self._started_at = time.monotonic()

    def run(self) -> int:
        """Start everything and return the exit code once nothing runs any more."""
        wake_reader, wake_writer = socket.socketpair()
        wake_reader.setblocking(False)
        wake_writer.setblocking(False)
        previous_descriptor = signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
        handled = [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            handled.append(signal.SIGHUP)
        previous = {number: signal.signal(number, lambda *_: None) for number in handled}
        self._selector.register(wake_reader, selectors.EVENT_READ, lambda: self._on_signals(wake_reader))
        try:
            for name in self._specs:
                self._start(name)
            while self._children or self._restarts:
                self._turn()
        finally:
            for child in self._children.values():
                child.kill(signal.SIGKILL)
            signal.set_wakeup_fd(previous_descriptor)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._selector.close()
            wake_reader.close()
            wake_writer.close()
        return self._exit_code

    def _turn(self) -> None:
        wait_s = self._seconds_to_next_timer()
        if self._view.retry():
            wait_s = min(RETRY_S, RETRY_S if wait_s is None else wait_s)
        due_s = time.monotonic() + (wait_s or 0.0)
        for key, _ in self._selector.select(wait_s):
            key.data()
        self._reap()
        now = time.monotonic()
        if wait_s is not None and (paused_s := missed_s(now, due_s)):
            for child in self._children.values():  # `docker pause` stops all processes: the children were not silent
                child.extend_watchdog(paused_s, now)
        for name in [name for name, at in self._restarts.items() if at <= now]:
            del self._restarts[name]
            self._start(name)
        if self._kill_at is not None and self._kill_at <= now:
            self._kill_at = None
            self._on_overdue()
        self._kill_frozen(now)

    def _kill_frozen(self, now: float) -> None:
        for child in self._children.values():
            expires_at = child.watchdog_expires_at()
            if expires_at is None or expires_at > now:
                continue
            if child.gone_by is not None:
                why = "has given up and does not end"
            else:
                why = f"gave no sign of life for {child.spec.watchdog_s:g} s"
            self._view.notice(f"{child.spec.name} {why}: killing it")
            child.last_sign_at = child.gone_by = None
            child.kill(signal.SIGKILL)

    def _seconds_to_next_timer(self) -> float | None:
        times = [*self._restarts.values()]
        times += [at for child in self._children.values() if (at := child.watchdog_expires_at()) is not None]
        if self._kill_at is not None:
            times.append(self._kill_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _start(self, name: str) -> None:
        try:
            child = Child(self._specs[name], self._folder, time.monotonic())
        except OSError as error:  # a full disk, or no process or descriptor left: this may be temporary
            self._view.notice(f"{name} cannot be started ({error.strerror}); another try in {LONGEST_DELAY_S:g} s")
            self._restarts[name] = time.monotonic() + LONGEST_DELAY_S
            return
        self._children[name] = child
        self._selector.register(child.output, selectors.EVENT_READ, lambda: self._on_output(child))
        self._selector.register(child.notify, selectors.EVENT_READ, lambda: self._on_notify(child))

    def _on_output(self, child: Child) -> None:
        lines = child.read_lines()
        if lines is None:
            self._selector.unregister(child.output)
            return
        for line in lines:
            self._view.line(child.spec.name, line)

    def _on_notify(self, child: Child) -> None:
        was_ready = child.ready
        for notification in child.read_notifications(time.monotonic()):
            if notification.status:
                self._view.status(child.spec.name, notification.status)
        if child.ready and not was_ready:
            self._on_ready(child)

    def _on_ready(self, child: Child) -> None:
        self._policies[child.spec.name].has_served = True
        if self._announced:
            self._view.notice(f"{child.spec.name} is ready again")
        elif len(self._children) == len(self._specs) and all(other.ready for other in self._children.values()):
            self._announced = True
            self._when_ready(time.monotonic() - self._started_at)

    def _on_signals(self, reader: socket.socket) -> None:
        for number in reader.recv(4096):
            if number == signal.SIGHUP:
                self._hang_up()
            elif number in (signal.SIGTERM, signal.SIGINT):
                self._signals += 1
                if self._signals == 1:
                    self._stop()
                elif self._signals == 2:
                    self._abort()

    def _reap(self) -> None:
        for name, child in list(self._children.items()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid == 0:
                continue
            number = os.waitstatus_to_exitcode(status)
            code = number if number >= 0 else 128 - number
            for line in child.read_lines() or []:
                self._view.line(name, line)
            if child.output in self._selector.get_map():
                self._selector.unregister(child.output)
            self._selector.unregister(child.notify)
            child.close()
            del self._children[name]
            self._on_exit(name, code, time.monotonic() - child.started_at)

    def _on_exit(self, name: str, code: int, lifetime_s: float) -> None:
        if self._stopping:
            # SIGTERM ended it before its handler was installed. That counts as a clean end, as for systemd.
            terminated = code == 128 + signal.SIGTERM
            if name in self._engines and self._exit_code == ExitCode.OK and not terminated:
                self._exit_code = code
            return
        if name in self._engines and code == ExitCode.OK:
            self._on_drained(name)
            return
        decision = self._policies[name].after_exit(code, lifetime_s)
        if (decision.delay_s is None or code in FINAL_CODES) and self._others_serve(name):
            self._view.notice(
                f"{name} ended with {describe_exit(code)}: {decision.reason}; the other engines go on, another try in "
                f"{LOST_RETRY_S:g} s"
            )
            self._restarts[name] = time.monotonic() + LOST_RETRY_S
            return
        if decision.delay_s is None:
            self._view.notice(f"{name} ended with {describe_exit(code)} and is not started again: {decision.reason}")
            self._exit_code = decision.code or ExitCode.CRASH
            self._stop()
            return
        when = f"in {decision.delay_s:g} s" if decision.delay_s else "now"
        why = f" ({decision.reason})" if decision.reason else ""
        self._view.notice(f"{name} ended with {describe_exit(code)}{why}; starting it again {when}")
        self._restarts[name] = time.monotonic() + decision.delay_s

    def _on_drained(self, name: str) -> None:
        if any(other in self._children or other in self._restarts for other in self._engines):
            self._view.notice(f"{name} was drained by an operator: the other engines go on")
            return
        self._view.notice("the engine was drained by an operator: stopping the front ends")
        self._stop()

    def _others_serve(self, name: str) -> bool:
        """Return whether `name` is an engine that has served, and another engine serves now."""
        if name not in self._engines or not self._policies[name].has_served:
            return False
        return any(child.ready for other, child in self._children.items() if other in self._engines)

    def _stop(self) -> None:
        self._stopping = True
        self._restarts.clear()
        if self._signals and self._children:
            self._view.notice(
                f"stopping: running requests have {self._drain_timeout_s:g} s to finish; once more to stop at once"
            )
        for spec in self._specs.values():
            if spec.listener is not None:
                spec.listener.close()  # connections are refused from now on, instead of waiting in the backlog
        for child in self._children.values():
            child.kill(signal.SIGTERM)
        self._kill_at = time.monotonic() + self._drain_timeout_s + DRAIN_GRACE_S

    def _hang_up(self) -> None:
        """Handle SIGHUP. Both kernel and shell may send it, so it never counts as the second signal to stop."""
        if not self._hangup_stops:
            self._view.notice(
                "SIGHUP: the API keys are read again; "
                "other changes of the configuration need a restart of 'inferengine up'"
            )
            for child in self._children.values():
                child.kill(signal.SIGHUP)
        elif not self._signals:
            self._signals = 1
            self._stop()

    def _abort(self) -> None:
        self._view.notice("stopping at once")
        self._exit_code = ExitCode.ABORTED
        for child in self._children.values():
            child.kill(signal.SIGTERM)
        self._kill_at = time.monotonic() + ABORT_S

    def _on_overdue(self) -> None:
        for name, child in self._children.items():
            self._view.notice(f"{name} did not end in time: killing it")
            child.kill(signal.SIGKILL)
