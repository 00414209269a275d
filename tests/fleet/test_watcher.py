"""What a watcher writes for front ends."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from inferengine.client.discovery import EngineDiscovery
from inferengine.config import Config, load
from inferengine.errors import ConfigError, InferEngineError
from inferengine.fleet import watcher as watcher_module
from inferengine.fleet.probe import is_refused
from inferengine.fleet.spec import engine_settings
from inferengine.fleet.watcher import EngineWatcher, write_front_end_files
from inferengine.wire import curve
from tests.fleet.test_host import until

A, B = "tcp://10.0.0.1:20000", "tcp://10.0.0.2:20000"


def test_front_ends_find_keys_and_engines_by_the_configuration_that_is_written(tmp_path: Path) -> None:
    engine, front = curve.new_pair(), curve.new_pair()
    files = write_front_end_files(tmp_path / "fleet", front, engine.public.decode())
    config = load(str(files.configuration), {})
    assert curve.client_keys(config) == curve.ClientKeys(front, engine.public)
    assert config.wire.engines == f"file:{files.engines}"
    assert EngineDiscovery([config.wire.engines]).is_dynamic
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    assert front.secret.decode() not in files.configuration.read_text()
    write_front_end_files(tmp_path / "fleet", front, engine.public.decode())  # once more: after a restart


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet").chmod(0o777)
    with pytest.raises(ConfigError, match="--folder"):
        write_front_end_files(tmp_path / "fleet", curve.new_pair(), "x" * 40)


def test_the_file_follows_the_directory_and_stays_while_that_is_away(tmp_path: Path) -> None:
    answers: list[list[str] | InferEngineError | None] = []

    def read() -> list[str] | None:
        if isinstance(answer := answers.pop(0), InferEngineError):
            raise answer
        return answer

    file = tmp_path / "engines"
    watcher = EngineWatcher(file, read)
    lost = InferEngineError("engine_unavailable", "The directory does not run.")
    expected = [([A], [A]), ([A, B], [A, B]), (lost, [A, B]), (None, [A, B]), ([B], [B])]
    for answer, addresses in expected:
        answers.append(answer)  # type: ignore[arg-type]
        assert watcher.turn() == (answer is not lost)
        lines = file.read_text().splitlines()
        assert [line for line in lines if not line.startswith("#")] == addresses
    assert watcher.num_engines == 1


def test_engines_whose_ports_refuse_are_left_out_while_the_directory_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engines"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        there, gone = (f"tcp://127.0.0.1:{listener.getsockname()[1]}" for listener in (server, other))
        watcher = EngineWatcher(file, lambda: [there, gone])
        watcher.turn()
        other.close()
        for _ in range(10):
            watcher.leave_out_refused()  # the directory has just answered: its word counts
        assert gone in file.read_text()
        monkeypatch.setattr(watcher_module, "SILENT_S", 0.0)
        until(lambda: watcher.leave_out_refused() or gone not in file.read_text())
        assert [line for line in file.read_text().splitlines() if not line.startswith("#")] == [there]
        watcher.turn()
        assert gone in file.read_text()


def test_only_a_refusal_says_that_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: object) -> None:
        raise TimeoutError

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert not is_refused(address)
    assert is_refused(address)
    monkeypatch.setattr(socket, "create_connection", time_out)
    assert not is_refused(address)


@pytest.mark.parametrize("key", ["socket", "tcp", "engines", "curve_secret_file"])
def test_addresses_and_keys_are_the_fleets_own(key: str) -> None:
    with pytest.raises(ConfigError, match=f"wire.{key}"):
        engine_settings(Config().with_values(wire={key: "x"}))


def test_engines_elsewhere_get_what_differs_from_the_defaults_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "of this machine")
    config = Config().with_values(engine={"device": "cpu", "name": "mine"}, http={"port": 9000})
    assert engine_settings(config) == {"INFERENGINE_ENGINE_DEVICE": "cpu"}
