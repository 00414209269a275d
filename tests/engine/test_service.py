"""The process: states, signals' meaning, exit codes, what the supervisor and systemd are told, and idleness."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from inferengine.config import Config
from inferengine.core.executor import Capacity, Executor, Progress, StepPlan
from inferengine.engine.io.endpoint import Endpoint
from inferengine.engine.process import exit_code_of
from inferengine.engine.service import EngineService
from inferengine.errors import ConfigError, ExitCode, Unreachable
from inferengine.process.listen import AddressTaken
from inferengine.process.system import Notifier, Watchdog
from inferengine.simulation.simulated_executor import SimulatedExecutor
from inferengine.wire.messages import (
    Accept,
    Admin,
    AdminReply,
    Bye,
    Goodbye,
    Model,
    ModelFiles,
    Ping,
    Pong,
    Reject,
    Step,
    Welcome,
)
from tests.engine.builders import (
    RawClient,
    address_of,
    check_idle,
    make_card,
    make_config,
    run_held,
    run_service,
    small_capacity,
    wait_until,
)
from tests.engine.conftest import Connect
from tests.ports import free_port


class Gate(SimulatedExecutor):
    """Loads only when it is let, reporting its progress; or fails to."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(small_capacity())
        self.opened = threading.Event()
        self.error = error

    def load(self, progress: Progress) -> Capacity:
        progress("weights", 0.5)
        self.opened.wait(120.0)
        if self.error is not None:
            raise self.error
        return super().load(progress)


def start(folder: Path, executor: Executor, **arguments: object) -> EngineService:
    service = EngineService(make_config(str(folder)), make_card(), lambda: executor, **arguments)  # type: ignore[arg-type]
    service.start()
    return service


class TestStarting:
    def test_the_wire_answers_and_shows_the_progress_while_the_model_loads(self, tmp_path: Path) -> None:
        gate = Gate()
        service = start(tmp_path, gate)
        client = RawClient(address_of(service))
        assert client.welcome is not None
        welcome = client.welcome
        while welcome.progress != ("weights", 0.5):
            welcome = client.expect(Welcome)
        assert (welcome.state, welcome.model) == ("STARTING", None)
        client.submit(1)
        reject = client.expect(Reject)
        assert (reject.code, reject.retryable) == ("engine_unavailable", True)
        client.send(Model())
        assert "tokenizer.json" in client.expect(ModelFiles).files
        gate.opened.set()
        while welcome.state != "READY":
            welcome = client.expect(Welcome)
        assert welcome.model is not None
        assert welcome.model.max_model_len == 1024
        client.submit(2)
        assert len(client.collect({2}).tokens[2]) == 4
        client.close()
        service.abort()
        assert service.wait(60.0) == ExitCode.ABORTED

    def test_a_model_that_cannot_be_loaded_ends_the_engine_with_its_code(self, tmp_path: Path) -> None:
        gate = Gate(ValueError("a tensor is missing"))
        gate.opened.set()
        service = start(tmp_path, gate, exit_code_of=exit_code_of)
        assert service.wait(60.0) == ExitCode.MODEL

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (ConfigError("engine.device", "no"), ExitCode.USAGE),
            (ConfigError("model.path", "no"), ExitCode.MODEL),
            (Unreachable("remote.address", "no"), ExitCode.CRASH),
            (MemoryError(), ExitCode.MEMORY),
            (FileNotFoundError(), ExitCode.MODEL),
            (ZeroDivisionError(), ExitCode.CRASH),
        ],
    )
    def test_every_failure_has_its_exit_code(self, error: BaseException, code: int) -> None:
        assert exit_code_of(error) == code

    def test_being_stopped_while_loading_ends_at_once(self, tmp_path: Path) -> None:
        gate = Gate()
        service = start(tmp_path, gate)
        service.drain()
        assert service.wait(60.0) == ExitCode.OK
        assert service._loop_thread.is_alive(), "nobody has waited for it"
        gate.opened.set()


class TestAddresses:
    def test_an_address_that_another_engine_serves_is_not_taken_over(self, tmp_path: Path) -> None:
        with run_service(wire={"socket": f"ipc://{tmp_path}/e.sock"}) as engine:
            with pytest.raises(AddressTaken, match="another engine"):
                Endpoint(engine.config)
            client = RawClient(address_of(engine))
            client.close()

    def test_a_file_left_by_a_dead_engine_is_no_obstacle(self, tmp_path: Path) -> None:
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(tmp_path / "e.sock"))
        left.close()
        with run_service(wire={"socket": f"ipc://{tmp_path}/e.sock"}) as engine:
            assert engine.lifecycle.state == "READY"

    def test_an_address_is_not_taken_from_an_engine_that_is_stopped(self, tmp_path: Path) -> None:
        config = Config().with_values(wire={"socket": f"ipc://{tmp_path}/e.sock"})
        with socket.socket(socket.AF_UNIX) as stopped, contextlib.ExitStack() as stack:
            stopped.bind(str(tmp_path / "e.sock"))
            stopped.listen(0)
            for _ in range(4):  # more than may wait
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect_ex(str(tmp_path / "e.sock"))
            with pytest.raises(AddressTaken, match="another engine"):
                Endpoint(config)

    def test_an_engine_that_ends_leaves_its_successor_s_socket_alone(self, tmp_path: Path) -> None:
        config = Config().with_values(wire={"socket": f"ipc://{tmp_path}/e.sock"})
        first, successors = Endpoint(config), []
        destroy = first.context.destroy

        def binds_again(linger: int | None = None) -> None:
            destroy(linger=linger)  # may take as long as `linger`, after the names are free
            successors.append(Endpoint(config))

        with patch.object(first.context, "destroy", binds_again):
            first.close(0)
        assert (tmp_path / "e.sock").exists()
        assert (tmp_path / "e.sock.status").exists()
        successors[0].close(0)
        assert not list(tmp_path.iterdir())

    def test_a_file_that_is_no_socket_is_not_removed(self, tmp_path: Path) -> None:
        precious = tmp_path / "e.sock"
        precious.write_text("of somebody")
        with pytest.raises(AddressTaken, match="is no socket"):
            Endpoint(Config().with_values(wire={"socket": f"ipc://{precious}"}))
        assert precious.read_text() == "of somebody"

    @pytest.mark.parametrize(
        ("at", "message"),
        [
            (0, r"tcp://127.0.0.1:\d+ cannot be bound \(Address already in use\): choose another wire.tcp"),
            (1, r"tcp://127.0.0.1:\d+ for STATUS, beside tcp://127.0.0.1:\d+, cannot be .*: choose another wire.tcp"),
        ],
    )
    def test_a_taken_port_is_named_by_its_key_and_leaves_no_files(self, at: int, message: str, tmp_path: Path) -> None:
        port = free_port()
        with socket.create_server(("127.0.0.1", port + at)):
            tcp = f"tcp://127.0.0.1:{port}"
            with pytest.raises(AddressTaken, match=message):
                Endpoint(Config().with_values(wire={"socket": f"ipc://{tmp_path}/e.sock", "tcp": tcp}))
        assert not list(tmp_path.iterdir())

    def test_a_taken_port_of_metrics_leaves_no_files(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = {"metrics_port": other.getsockname()[1]}
            config = make_config(str(tmp_path), engine=taken)
            with pytest.raises(AddressTaken, match=r"engine.metrics_port \d+ on 127.0.0.1 cannot be bound"):
                EngineService(config, make_card(), Gate)
        assert not list(tmp_path.glob("**/*.sock*"))

    def test_a_port_of_metrics_that_is_none_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"engine\.metrics_port: must be at most 65535; got 70000"):
            make_config(str(tmp_path), engine={"metrics_port": 70000})

    def test_the_socket_is_not_for_everybody(self, tmp_path: Path) -> None:
        with run_service(wire={"socket": f"ipc://{tmp_path}/e.sock"}):
            assert not stat.S_IMODE(os.stat(tmp_path / "e.sock").st_mode) & 0o007

    @pytest.mark.parametrize(
        "address",
        [
            "tcp://0.0.0.0:5555",
            "tcp://192.168.1.5:5555",
            "tcp://127.0.0.1:0",
            "udp://x",
            "ipc:///nowhere/at/all/e.sock",
            "ipc:///tmp/" + "x" * 120,
        ],
    )
    def test_an_unsafe_or_impossible_address_is_refused(self, address: str) -> None:
        with pytest.raises(ConfigError) as caught:
            Endpoint(make_config("", wire={"socket": address}))
        assert caught.value.field == "wire.socket"

    def test_tcp_serves_beside_ipc(self, connect: Connect) -> None:
        port = free_port()
        with run_service(wire={"tcp": f"tcp://127.0.0.1:{port}"}):
            client = RawClient(f"tcp://127.0.0.1:{port}")
            client.submit(1)
            assert len(client.collect({1}).tokens[1]) == 4
            client.close()


class TestEnding:
    def test_an_engine_that_ends_waits_for_the_answer_to_its_goodbye(
        self, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A GOODBYE that lies unread when the connection ends is lost, and its client would hold requests for long."""
        monkeypatch.setattr("inferengine.engine.service.FAREWELL_S", 60.0)
        with run_service() as engine:
            client = connect(engine)
            engine.abort()
            client.expect(Goodbye)
            assert engine.wait(0.3) is None
            client.send(Bye())
            assert engine.wait(60.0) is not None

    def test_draining_finishes_what_runs_and_refuses_what_comes(self, connect: Connect) -> None:
        with run_held() as (engine, device):
            client = connect(engine)
            client.submit(1, max_tokens=60)
            device.let(1)
            client.expect(Step)
            engine.drain()
            welcome = client.expect(Welcome)
            assert welcome.state == "DRAINING"
            client.submit(2)
            reject = client.expect(Reject)
            assert (reject.code, reject.retryable) == ("draining", True)
            device.let()
            collected = client.collect({1})
            assert collected.done[1][0].reason == "length"
            client.expect(Goodbye)
            assert engine.wait(60.0) == ExitCode.OK

    def test_a_client_that_reads_late_gets_all_before_the_engine_ends(self, connect: Connect) -> None:
        """A client's socket drops what is unread when its connection ends."""
        with run_service(step_s=0.01) as service:
            client = connect(service, drops_unread=True)
            client.submit(1, max_tokens=50)
            client.expect(Accept)
            service.drain()
            service.wait(2.0)  # the client does not read meanwhile
            assert len(client.collect({1}).tokens[1]) == 50
            assert service.wait(60.0) == ExitCode.OK

    def test_a_client_that_never_reads_does_not_keep_the_engine(self, connect: Connect) -> None:
        with run_service() as service:
            client = connect(service)
            client.submit(1)
            client.expect(Accept)
            service.drain()
            assert service.wait(60.0) == ExitCode.OK

    def test_a_drain_that_takes_too_long_ends_the_rest_with_abort(self, connect: Connect) -> None:
        with run_service(step_s=0.02, engine={"drain_timeout_s": 0.2}) as engine:
            client = connect(engine)
            client.submit(1, max_tokens=1000)
            client.expect(Step)
            engine.drain()
            (done,) = client.collect({1}).done[1]
            assert (done.reason, done.detail[0]) == ("abort", "draining")
            assert engine.wait(60.0) == ExitCode.OK

    def test_a_second_signal_ends_at_once(self, connect: Connect) -> None:
        with run_service(step_s=0.02) as engine:
            client = connect(engine)
            client.submit(1, max_tokens=1000)
            client.expect(Step)
            engine.drain()
            engine.abort()
            assert client.collect({1}).done[1][0].reason == "abort"
            assert engine.wait(60.0) == ExitCode.ABORTED

    def test_an_operator_drains_over_the_wire(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.send(Admin("drain", 1))
        assert client.expect(AdminReply).ok
        assert engine.wait(60.0) == ExitCode.OK

    def test_an_operator_may_change_his_mind(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.send(Admin("drain", 1, {"exit": False}))
        client.submit(1)
        assert client.expect(Reject).code == "draining"
        client.send(Admin("resume", 2))
        assert client.expect(AdminReply).ok
        client.submit(2)
        assert len(client.collect({2}).tokens[2]) == 4

    def test_a_frozen_loop_is_seen_and_ends_the_engine(
        self, connect: Connect, caplog: pytest.LogCaptureFixture
    ) -> None:
        """In Python code of its own, not in a step: that is the step watch's to judge."""
        with run_service(engine={"frozen_after_s": 2.0}) as engine:
            client = connect(engine)
            assert engine.core is not None
            engine.core.scheduler.schedule = stuck_scheduler  # type: ignore[method-assign]
            client.submit(1)
            time.sleep(0.3)
            client.send(Ping(1))
            assert client.expect(Pong).loop_age_ms > 100
            (done,) = client.collect({1}).done[1]
            assert (done.reason, done.detail[0]) == ("error", "engine_stalled"), "anybody's request may be the cause"
            assert engine.wait(60.0) == ExitCode.FROZEN
        assert "stuck_scheduler" in caplog.text, "the stacks say where it hangs"

    def test_a_frozen_io_thread_is_seen_and_ends_the_engine(self, caplog: pytest.LogCaptureFixture) -> None:
        with run_service(engine={"frozen_after_s": 2.0}) as engine:
            released = threading.Event()
            engine.io._thread.call(lambda: stuck_io(released))
            assert engine.wait(60.0) == ExitCode.FROZEN
            released.set()
        assert "stuck_io" in caplog.text


def stuck_scheduler(now: float) -> None:
    time.sleep(8.0)


def stuck_io(released: threading.Event) -> None:
    released.wait(30.0)


class TestAdmin:
    def test_statistics_and_configuration(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.submit(1, max_tokens=7, prompt=[1] * 40)
        client.collect({1})
        check_idle(engine)
        wait_until(lambda: engine.loaded.loop.snapshot.num_blocks_held == 0)
        client.send(Admin("stats", 1))
        stats = client.expect(AdminReply).result
        assert stats["model"] == "simulated"
        assert (stats["completed_requests"], stats["active_requests"], stats["waiting_requests"]) == (1, 0, 0)
        assert (stats["prompt_tokens"], stats["output_tokens"]) == (40, 7)
        assert stats["cache"]["used_pages"] == 0
        assert stats["cache"]["cached_pages"] > 0
        assert stats["cache"]["free_pages"] == stats["cache"]["max_pages"] == 512
        assert stats["histograms"]["time_to_first_token_seconds"]["count"] == 1
        assert stats["histograms"]["inter_token_latency_seconds"]["count"] == 6
        assert stats["histograms"]["iteration_tokens_total"]["sum"] == 46, "all but the last token are computed"
        assert stats["finished_by_reason"] == {"length": 1}
        assert stats["config"]["cache"]["block_size"] == Config().cache.block_size

    def test_flush_forgets_the_prefix_cache(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.submit(1, prompt=[1] * 40)
        client.collect({1})
        client.submit(2, prompt=[1] * 40)
        assert client.collect({2}).done[2][0].cached_tokens == 32
        client.send(Admin("flush", 3))
        assert client.expect(AdminReply).result["blocks"] > 0
        client.submit(3, prompt=[1] * 40)
        assert client.collect({3}).done[3][0].cached_tokens == 0

    def test_cancelling_everything(self, connect: Connect) -> None:
        with run_service(step_s=0.03) as engine:
            client, operator = connect(engine), connect(engine)
            for stream in range(1, 40):
                client.submit(stream, max_tokens=1000)
            # Two connections have no order between them: a request that is still on its way would not be cancelled.
            wait_until(lambda: engine.io.publisher.num_open == 39)
            operator.send(Admin("cancel_all", 1))
            assert operator.expect(AdminReply).ok
            assert {rows[0].reason for rows in client.collect(set(range(1, 40))).done.values()} == {"abort"}
            check_idle(engine)

    def test_an_unknown_operation_names_those_that_exist(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.send(Admin("explode", 5))
        reply = client.expect(AdminReply)
        assert (reply.ok, reply.nonce, reply.code) == (False, 5, "invalid_request")
        assert "stats" in (reply.message or "")


@pytest.mark.parametrize(
    ("num_snapshots", "without"), [(0, ("prefix_caching", "speculation", "swap")), (4, ("speculation", "swap"))]
)
def test_what_a_model_with_states_cannot_use_is_told(num_snapshots: int, without: tuple[str, ...]) -> None:
    capacity = small_capacity()._replace(has_states=True, num_snapshots=num_snapshots)
    with (
        run_service(lambda: SimulatedExecutor(capacity)) as service,
        contextlib.closing(RawClient(address_of(service))) as client,
    ):
        assert client.welcome is not None
        assert client.welcome.model is not None
        assert client.welcome.model.without == without


class TestSupervision:
    def test_systemd_hears_ready_status_watchdog_and_stopping(self, tmp_path: Path) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60.0)
        notifier = Notifier(str(tmp_path / "notify"))
        service = start(
            tmp_path,
            SimulatedExecutor(small_capacity()),
            notifier=notifier,
            watchdog=Watchdog(notifier, 0.1, time.monotonic),
        )
        heard = ""
        while not all(word in heard for word in ("READY=1", "STATUS=serving simulated", "WATCHDOG=1")):
            heard += listener.recv(4096).decode() + "\n"
        service.drain()
        while "STOPPING=1" not in heard:
            heard += listener.recv(4096).decode() + "\n"
        assert service.wait(60.0) == ExitCode.OK
        listener.close()

    def test_the_watchdog_starves_while_the_loop_does_not_turn(self, tmp_path: Path) -> None:
        heard = self.heard_while_stuck(tmp_path, in_step=False)
        assert b"WATCHDOG" not in heard

    def test_the_watchdog_is_fed_while_a_step_is_within_its_time(self, tmp_path: Path) -> None:
        """A prompt on a slow processor takes a minute. That is no reason to kill the engine."""
        heard = self.heard_while_stuck(tmp_path, in_step=True)
        assert b"WATCHDOG" in heard

    def heard_while_stuck(self, tmp_path: Path, *, in_step: bool) -> bytes:
        """Return what a supervisor hears of an engine whose loop hangs, in a step or outside of any."""
        stuck, released = threading.Event(), threading.Event()

        def hang(*_: object) -> None:
            stuck.set()
            released.wait(30.0)

        class Slow(SimulatedExecutor):
            def execute(self, plan: StepPlan):  # type: ignore[no-untyped-def]
                if in_step:
                    hang()
                return super().execute(plan)

        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        notifier = Notifier(str(tmp_path / "notify"))
        watchdog = Watchdog(notifier, 0.05, time.monotonic)
        service = start(tmp_path, Slow(small_capacity()), notifier=notifier, watchdog=watchdog)
        wait_until(lambda: service.lifecycle.state == "READY")
        core = service.core
        assert core is not None
        if not in_step:
            schedule = core.scheduler.schedule
            core.scheduler.schedule = lambda now: hang() or schedule(now)  # type: ignore[method-assign, func-returns-value]
        client = RawClient(address_of(service))
        client.submit(1, max_tokens=1)
        assert stuck.wait(60.0)
        read_all(listener)
        time.sleep(1.0)
        heard = read_all(listener)
        released.set()
        client.collect({1})
        client.close()
        service.abort()
        service.wait(10.0)
        listener.close()
        return heard

    def test_an_idle_engine_uses_less_than_a_hundredth_of_a_core(self, engine: EngineService, connect: Connect) -> None:
        client = connect(engine)
        client.submit(1)
        client.collect({1})
        check_idle(engine)
        time.sleep(0.2)
        begin, begin_s = time.process_time(), time.monotonic()
        time.sleep(3.0)
        share = (time.process_time() - begin) / (time.monotonic() - begin_s)
        assert share < 0.01, f"{share:.2%} of a core"


def read_all(listener: socket.socket) -> bytes:
    heard = b""
    while True:
        try:
            heard += listener.recv(4096)
        except BlockingIOError:
            return heard
