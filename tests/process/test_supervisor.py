"""The supervisor with real processes: restarts, giving up, draining, abort, watchdog."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from inferengine.errors import ExitCode
from inferengine.process.child import Child, ChildSpec, parse_notification
from inferengine.process.supervisor import (
    FAST_FAILURE_S,
    LONGEST_DELAY_S,
    MAX_FAST_FAILURES,
    STALLS_FORGOTTEN_S,
    RestartPolicy,
    Supervisor,
    describe_exit,
)
from tests.process.services import RecordingView, notes, service, steady

WAIT_S = 60.0  # generous: tests may share two cores with much else


class Outcome:
    """What a supervised run left behind."""

    def __init__(self, code: int, view: RecordingView, ready_count: int) -> None:
        self.code = code
        self.view = view
        self.ready_count = ready_count


def supervise(
    engine: ChildSpec | Sequence[ChildSpec],
    front_ends: Sequence[ChildSpec],
    folder: Path,
    *,
    steps: Sequence[tuple[Callable[[RecordingView], bool], Callable[[], None]]] = (),
    drain_timeout_s: float = 30.0,
) -> Outcome:
    """Run a supervisor in this thread while another waits for each condition of `steps` and then does its action."""
    engines = [engine] if isinstance(engine, ChildSpec) else engine
    view = RecordingView()
    ready: list[float] = []
    supervisor = Supervisor(
        engines, front_ends, folder, view, drain_timeout_s=drain_timeout_s, when_ready=lambda s: ready.append(s)
    )
    failures: list[str] = []

    def conduct() -> None:
        deadline = time.monotonic() + WAIT_S
        for number, (condition, action) in enumerate(steps):
            while not condition(view):
                if time.monotonic() > deadline:
                    failures.append(f"step {number} never came; notices: {view.notices}")
                    os.kill(os.getpid(), signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                time.sleep(0.01)
            action()

    conductor = threading.Thread(target=conduct)
    conductor.start()
    code = supervisor.run()
    conductor.join(WAIT_S)
    assert not failures, failures
    return Outcome(code, view, len(ready))


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def noted(folder: Path, *texts: str) -> Callable[[RecordingView], bool]:
    return lambda view: all(text in notes(folder) for text in texts)


def test_sigterm_tells_all_at_once_and_the_engine_may_outlast_the_streams_of_the_front_ends(tmp_path: Path) -> None:
    """Neither waits for the other: each has been told before any has ended."""
    patient = """
def stop(*_):
    note("{name} told")
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and sum(line.endswith("told\\n") for line in open(LOG)) < 3:
        time.sleep(0.01)
    note("{name} stopped")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("{name} started")
notify("READY=1")
while True:
    until_signal()
"""
    engine, http, ws = [service(name, patient.replace("{name}", name), tmp_path) for name in ("engine", "http", "ws")]
    outcome = supervise(
        engine,
        [http, ws],
        tmp_path,
        steps=[(noted(tmp_path, "engine started", "http started", "ws started"), send(signal.SIGTERM))],
        drain_timeout_s=50.0,
    )
    assert outcome.code == ExitCode.OK
    lines = [note for note in notes(tmp_path) if not note.endswith("started")]
    assert sorted(lines[:3]) == ["engine told", "http told", "ws told"]
    assert sorted(lines[3:]) == ["engine stopped", "http stopped", "ws stopped"]


def test_a_stopping_service_turns_newcomers_away_instead_of_letting_them_wait(tmp_path: Path) -> None:
    slow = """
def stop(*_):
    os.close(3)  # as a front end does
    note("told")
    while not os.path.exists(LOG + ".go"):
        time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("up")
notify("READY=1")
while True:
    until_signal()
"""
    refused: list[bool] = []

    def knock() -> None:
        try:
            socket.create_connection(address, timeout=10).close()
        except ConnectionRefusedError:
            refused.append(True)
        (tmp_path / "notes.go").touch()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        front_end = service("http", slow, tmp_path)._replace(listener=listener)
        supervise(
            steady("engine", tmp_path),
            [front_end],
            tmp_path,
            steps=[(noted(tmp_path, "up", "engine started"), send(signal.SIGTERM)), (noted(tmp_path, "told"), knock)],
        )
    assert refused == [True]


def test_an_engine_that_was_told_before_it_could_listen_has_nothing_to_finish(tmp_path: Path) -> None:
    """Ctrl-C in the first moments: the signal ends it as the kernel does, and that is a stop as asked."""
    outcome = supervise(
        service("engine", 'note("up")\nwhile True:\n    until_signal()', tmp_path),
        [],
        tmp_path,
        steps=[(noted(tmp_path, "up"), send(signal.SIGINT))],
    )
    assert outcome.code == ExitCode.OK


def test_readiness_is_announced_once_when_everything_is_ready(tmp_path: Path) -> None:
    outcome = supervise(
        steady("engine", tmp_path),
        [steady("http", tmp_path)],
        tmp_path,
        steps=[(noted(tmp_path, "engine started", "http started"), lambda: time.sleep(0.2)), (always, send(2))],
    )
    assert outcome.ready_count == 1


def always(view: RecordingView) -> bool:
    return True


def test_a_crashed_front_end_is_started_again_and_the_engine_left_alone(tmp_path: Path) -> None:
    once = str(tmp_path / "once")
    body = f"""
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
notify("READY=1")
if not os.path.exists({once!r}):
    open({once!r}, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
note("http again")
while True:
    until_signal()
"""
    outcome = supervise(
        steady("engine", tmp_path),
        [service("http", body, tmp_path)],
        tmp_path,
        steps=[(noted(tmp_path, "engine started", "http again"), send(signal.SIGTERM))],
    )
    assert outcome.code == ExitCode.OK
    assert notes(tmp_path).count("engine started") == 1
    assert any("http ended with killed by SIGKILL; starting it again" in notice for notice in outcome.view.notices)


def test_a_code_that_cannot_get_better_ends_everything_with_that_code(tmp_path: Path) -> None:
    body = "print('model.path: there is no such folder'); sys.exit(3)"
    outcome = supervise(service("engine", body, tmp_path), [steady("http", tmp_path)], tmp_path)
    assert outcome.code == ExitCode.MODEL
    assert ("engine", "model.path: there is no such folder") in outcome.view.lines
    assert any("not started again" in notice for notice in outcome.view.notices)


def test_a_model_that_has_fitted_is_tried_until_it_fits_again(tmp_path: Path) -> None:
    """Another program took the memory between two lives of the engine. One that never fitted is not tried again."""
    lives = str(tmp_path / "lives")
    body = f"""
with open({lives!r}, "a") as file:
    file.write("+")
life = os.path.getsize({lives!r})
note(f"life {{life}}")
if life == 2:
    sys.exit({ExitCode.MEMORY})
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
notify("READY=1")
if life == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    until_signal()
"""
    outcome = supervise(
        service("engine", body, tmp_path), [], tmp_path, steps=[(noted(tmp_path, "life 3"), send(signal.SIGTERM))]
    )
    assert outcome.code == ExitCode.OK
    assert RestartPolicy().after_exit(ExitCode.MEMORY, 5.0).delay_s is None


@pytest.mark.parametrize("code", [ExitCode.USAGE, ExitCode.MODEL, ExitCode.MEMORY, ExitCode.ADDRESS])
def test_what_was_right_before_is_waited_for(code: int) -> None:
    """Another program has the memory for a time, or a file is half copied. A first start is not repeated."""
    policy = RestartPolicy()
    assert policy.after_exit(code, 5.0).delay_s is None
    policy.has_served = True
    assert [policy.after_exit(code, 5.0).delay_s for _ in range(20)] == [LONGEST_DELAY_S] * 20


def test_an_engine_that_was_drained_by_an_operator_ends_the_service(tmp_path: Path) -> None:
    body = """
notify("READY=1")
while not os.path.exists(LOG):  # until the front end runs
    time.sleep(0.01)
time.sleep(0.2)
"""
    outcome = supervise(service("engine", body, tmp_path), [steady("http", tmp_path)], tmp_path)
    assert outcome.code == ExitCode.OK
    assert "http stopped" in notes(tmp_path)


def test_the_end_of_one_of_several_engines_is_not_the_end_of_the_service(tmp_path: Path) -> None:
    """One is drained and stays away. One that has served and cannot be started any more is left for a later try."""
    other = steady("engine-0", tmp_path)
    drained = service("engine-1", 'notify("READY=1")\nnote("drained")', tmp_path)
    told = ("engine-1 was drained by an operator: the other engines go on", "the other engines go on, another try")
    ready = tmp_path / "others"
    broken = f"""
notify("READY=1")
while not os.path.exists({str(ready)!r}):
    time.sleep(0.01)
sys.exit({ExitCode.USAGE})
"""
    outcome = supervise(
        [other, drained, service("engine-2", broken, tmp_path)],
        [steady("http", tmp_path)],
        tmp_path,
        steps=[
            (noted(tmp_path, "engine-0 started", "http started", "drained"), ready.touch),
            (lambda view: all(any(text in notice for notice in view.notices) for text in told), send(15)),
        ],
    )
    assert outcome.code == ExitCode.OK
    assert notes(tmp_path).count("drained") == 1
    assert {"engine-0 stopped", "http stopped"} <= set(notes(tmp_path))


def test_an_engine_that_never_served_ends_the_start_of_all(tmp_path: Path) -> None:
    broken = service("engine-1", "sys.exit(3)", tmp_path)
    outcome = supervise([steady("engine-0", tmp_path), broken], [], tmp_path)
    assert outcome.code == ExitCode.MODEL


def test_a_second_signal_ends_a_drain_that_hangs(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: note("told"))
notify("READY=1")
note("up")
while True:
    until_signal()
"""
    began = time.monotonic()
    outcome = supervise(
        service("engine", body, tmp_path),
        [],
        tmp_path,
        steps=[(noted(tmp_path, "up"), send(signal.SIGTERM)), (noted(tmp_path, "told"), send(signal.SIGTERM))],
        drain_timeout_s=600.0,
    )
    assert outcome.code == ExitCode.ABORTED
    assert time.monotonic() - began < WAIT_S
    assert "engine did not end in time: killing it" in outcome.view.notices


@pytest.mark.parametrize("first", ["READY=1\\nWATCHDOG=1", "READY=1"])
def test_a_child_that_stops_feeding_the_watchdog_is_killed_and_started_again(tmp_path: Path, first: str) -> None:
    """It may have frozen before it fed it at all."""
    body = f"""
again = os.path.exists({str(tmp_path / "once")!r})
open({str(tmp_path / "once")!r}, "w").close()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
notify("{first}")
note("second life" if again else "first life")
if not again:
    time.sleep(60)
while True:
    notify("WATCHDOG=1")
    time.sleep(0.05)
"""
    outcome = supervise(
        service("engine", body, tmp_path, watchdog_s=2.0),
        [],
        tmp_path,
        steps=[(noted(tmp_path, "second life"), send(signal.SIGTERM))],
    )
    assert any("gave no sign of life for 2 s" in notice for notice in outcome.view.notices)
    assert outcome.code == ExitCode.OK


def test_a_child_that_has_given_up_and_cannot_leave_is_killed_and_started_again(tmp_path: Path) -> None:
    body = f"""
again = os.path.exists({str(tmp_path / "once")!r})
open({str(tmp_path / "once")!r}, "w").close()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
notify("READY=1\\nWATCHDOG=1")
note("second life" if again else "first life")
if not again:
    notify("WATCHDOG=trigger")
while True:
    until_signal()
"""
    outcome = supervise(
        service("engine", body, tmp_path, watchdog_s=600.0),
        [],
        tmp_path,
        steps=[(noted(tmp_path, "second life"), send(signal.SIGTERM))],
    )
    assert "engine has given up and does not end: killing it" in outcome.view.notices
    assert outcome.code == ExitCode.OK


def test_a_signal_to_a_child_that_has_not_begun_its_program_ends_it_and_reaches_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between fork and exec the child would run the supervisor's handler, which tells the supervisor."""
    reader, writer = socket.socketpair()
    forked, seen = os.pipe()

    def stay_before_exec() -> None:
        os.write(seen, b"x")
        time.sleep(30)

    monkeypatch.setattr("inferengine.process.child.parent_death_signal", lambda number: stay_before_exec)
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        previous_descriptor = signal.set_wakeup_fd(writer.fileno())
        previous = signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            child = Child(service("engine", "note('began')", tmp_path), tmp_path, 0.0)
            assert os.read(forked, 1) == b"x"
            child.kill(signal.SIGTERM)
            _, status = os.waitpid(child.pid, 0)
            child.close()
        finally:
            signal.signal(signal.SIGTERM, previous)
            signal.set_wakeup_fd(previous_descriptor)
        os.close(forked)
        os.close(seen)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        with pytest.raises(BlockingIOError):
            reader.recv(1)
    assert notes(tmp_path) == []


def test_time_in_which_the_supervisor_was_stopped_does_not_count_for_the_watchdog(tmp_path: Path) -> None:
    """As after a suspended machine: the signs of life of that time are lost."""
    child = Child(service("engine", "time.sleep(600)", tmp_path, watchdog_s=10.0), tmp_path, 0.0)
    try:
        child.ready, child.last_sign_at = True, 100.0
        assert child.watchdog_expires_at() == 110.0
        child.extend_watchdog(50.0, now=200.0)
        assert child.watchdog_expires_at() == 160.0
    finally:
        child.kill(signal.SIGKILL)
        os.waitpid(child.pid, 0)
        child.close()


def test_progress_and_output_reach_the_view_under_the_childs_name(tmp_path: Path) -> None:
    body = """
notify("STATUS=loading weights 40 %")
print("a line")
notify("READY=1")
time.sleep(0.2)
"""
    outcome = supervise(service("engine", body, tmp_path), [], tmp_path)
    assert outcome.view.statuses == [("engine", "loading weights 40 %")]
    assert outcome.view.lines == [("engine", "a line")]


def test_a_child_inherits_its_listener_as_descriptor_three(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        body = """
assert os.environ["LISTEN_PID"] == str(os.getpid()) and os.environ["LISTEN_FDS"] == "1"
note(str(socket.socket(fileno=3).getsockname()[1]))
notify("READY=1")
time.sleep(0.1)
"""
        port = listener.getsockname()[1]
        spec = service("engine", body, tmp_path)._replace(listener=listener)
        supervise(spec, [], tmp_path)
        assert notes(tmp_path) == [str(port)]


def test_delays_grow_with_each_quick_failure_until_it_gives_up() -> None:
    policy = RestartPolicy()
    verdicts = [policy.after_exit(1, 0.1) for _ in range(MAX_FAST_FAILURES)]
    delays = [verdict.delay_s for verdict in verdicts[:-1]]
    assert delays == sorted(set(delays), key=float)  # type: ignore[arg-type]
    assert verdicts[-1].delay_s is None
    assert verdicts[-1].code == 1


def test_a_long_run_forgives_earlier_failures() -> None:
    policy = RestartPolicy()
    for _ in range(MAX_FAST_FAILURES * 3):
        assert policy.after_exit(1, 0.1).delay_s is not None
        assert policy.after_exit(1, FAST_FAILURE_S + 1).delay_s is not None


@pytest.mark.parametrize("code", [ExitCode.STALLED, ExitCode.FROZEN])
def test_after_a_first_stall_there_is_no_delay_and_after_each_further_one_a_longer_one(code: int) -> None:
    policy = RestartPolicy()
    delays = [policy.after_exit(code, FAST_FAILURE_S + 1).delay_s for _ in range(4)]
    assert delays[0] == 0.0
    assert delays[1:] == sorted(set(delays[1:]), key=float)  # type: ignore[arg-type]
    assert delays[1] != 0.0


def test_a_long_run_forgives_earlier_stalls() -> None:
    policy = RestartPolicy()
    for _ in range(3):
        assert policy.after_exit(ExitCode.STALLED, STALLS_FORGOTTEN_S + 1).delay_s == 0.0


@pytest.mark.parametrize("code", [ExitCode.USAGE, ExitCode.MODEL, ExitCode.MEMORY, ExitCode.ADDRESS])
def test_codes_that_another_try_would_repeat_are_final(code: int) -> None:
    assert RestartPolicy().after_exit(code, 100.0).delay_s is None


@pytest.mark.parametrize("code", [ExitCode.CRASH, ExitCode.FROZEN, ExitCode.STALLED, 128 + signal.SIGKILL])
def test_other_codes_are_tried_again(code: int) -> None:
    assert RestartPolicy().after_exit(code, 0.1).delay_s is not None


def test_exits_are_described_as_people_say_them() -> None:
    assert describe_exit(1) == "exit code 1"
    assert describe_exit(128 + 9) == "killed by SIGKILL"
    assert describe_exit(130) == "exit code 130"


def test_notifications_are_read_line_by_line_and_unknown_ones_ignored() -> None:
    assert parse_notification(b"READY=1\nSTATUS=loading 3 %\nMAINPID=7") == (True, False, "loading 3 %", False)
    assert parse_notification(b"WATCHDOG=1\n") == (False, True, None, False)
    assert parse_notification(b"WATCHDOG=trigger") == (False, False, None, True)
    assert parse_notification(b"\xff\xfe") == (False, False, None, False)
