"""SIGHUP: reloads what can be reloaded and stops nothing, but for `up` where its terminal is gone."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from inferengine.config import Config, load
from inferengine.errors import ConfigError, ExitCode
from inferengine.process.reload import Reload
from inferengine.process.supervisor import Supervisor
from tests.engine.builders import wait_until
from tests.process.services import RecordingView, notes, service, steady

RELOADING = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGHUP, lambda *_: note("reloaded"))
notify("READY=1")
while True:
    until_signal()
"""


@pytest.fixture(autouse=True)
def as_before():  # type: ignore[no-untyped-def]
    level, handler = logging.getLogger().level, signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and a supervisor honours that
    yield
    logging.getLogger().setLevel(level)
    signal.signal(signal.SIGHUP, handler)


def hang_up() -> None:
    signal.raise_signal(signal.SIGHUP)


class TestReload:
    def test_the_log_level_is_applied_and_other_keys_are_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "service.toml"
        file.write_text('[log]\nlevel = "info"\n')
        reload = Reload(load(file), lambda: load(file))
        file.write_text('[log]\nlevel = "debug"\n[http]\nport = 9000\n[wire]\nwindow = 8\n')
        hang_up()
        with caplog.at_level("INFO"):
            reload.run_if_due()
            assert logging.getLogger().level == logging.DEBUG
        assert "after a restart only: http.port, wire.window" in caplog.text

    def test_a_file_that_cannot_be_used_changes_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        def read() -> Config:
            raise ConfigError("log.level", "must be one of debug, info")

        reload = Reload(Config(), read)
        before, also = logging.getLogger().level, []
        hang_up()
        reload.run_if_due(lambda: also.append("keys"))
        assert logging.getLogger().level == before
        assert "nothing is changed" in caplog.text
        assert also == ["keys"]

    @pytest.mark.parametrize("content", [b"[log", b"\xff", b"a = " + b"[" * 10_000, b"[http]\nport = " + b"9" * 10_000])
    def test_a_file_of_any_bytes_changes_nothing(
        self, content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "service.toml"
        file.write_bytes(content)
        reload = Reload(Config(), lambda: load(file))
        hang_up()
        reload.run_if_due()
        assert "service.toml is not valid TOML" in caplog.text
        assert "nothing is changed" in caplog.text

    def test_only_a_signal_has_it_read_and_once(self) -> None:
        read: list[Config] = []
        reload = Reload(Config(), lambda: read.append(Config()) or read[0])  # type: ignore[func-returns-value]
        reload.run_if_due()
        assert read == []
        hang_up()
        reload.run_if_due()
        reload.run_if_due()
        assert len(read) == 1


def supervise(folder: Path, engine_body: str | None, *, hangup_stops: bool, then) -> tuple[int, RecordingView]:  # type: ignore[no-untyped-def]
    """Run a supervisor that gets SIGHUP once its children are ready, and `then` something else."""
    view = RecordingView()

    def when_ready(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        threading.Thread(target=then, daemon=True).start()

    engine = steady("engine", folder) if engine_body is None else service("engine", engine_body, folder)
    supervisor = Supervisor(
        [engine], [steady("http", folder)], folder, view, drain_timeout_s=20.0, when_ready=when_ready,
        hangup_stops=hangup_stops,
    )  # fmt: skip
    return supervisor.run(), view


def test_a_supervisor_whose_terminal_is_gone_stops_in_good_order(tmp_path: Path) -> None:
    code, _ = supervise(tmp_path, None, hangup_stops=True, then=lambda: None)
    assert code == ExitCode.OK
    assert {"engine stopped", "http stopped"} <= set(notes(tmp_path))


def test_a_supervisor_without_a_terminal_passes_a_hangup_on_and_goes_on(tmp_path: Path) -> None:
    def stop_after_reload() -> None:
        wait_until(lambda: "reloaded" in notes(tmp_path), 30.0)
        os.kill(os.getpid(), signal.SIGTERM)

    code, view = supervise(tmp_path, RELOADING, hangup_stops=False, then=stop_after_reload)
    assert code == ExitCode.OK
    assert "reloaded" in notes(tmp_path)
    assert notes(tmp_path).count("http started") == 1  # it ignores what it does not handle
    assert any("SIGHUP" in notice for notice in view.notices)
