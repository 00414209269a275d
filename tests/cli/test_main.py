"""`inferengine COMMAND ...`: what is understood, what is refused, and with which exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inferengine import __version__, config
from inferengine.cli import main as cli
from inferengine.cli.command import resolve
from inferengine.errors import ConfigError, ExitCode


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == ExitCode.OK
        assert capsys.readouterr().out.startswith(f"usage: inferengine {name}")


def test_the_general_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli.COMMANDS)


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == ExitCode.USAGE
    assert "usage:" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out == f"inferengine {__version__}\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["uo"], "no command 'uo'; did you mean 'up'?"),
        (["config", "--http.prot", "1"], "--http.prot: no such key; did you mean"),
        (["config", "--port", "1"], "did you mean --http.port or --ws.port?"),
        (["config", "--http.port", "many"], "http.port: must be a whole number"),
        (["config", "--http.port"], "--http.port: a value must follow"),
        (["config", "--config", "missing.toml"], "no such file: missing.toml"),
        (["config", "one", "two"], "one model at most, and 'one' was given already"),
        (["config", "one", "--model.path", "two"], "was given twice"),
        (["http", "a-model"], "this command takes no bare word"),
    ],
)
def test_a_mistake_names_the_word_and_the_remedy(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == ExitCode.USAGE
    assert complaint in capsys.readouterr().err


def test_config_prints_what_it_can_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERENGINE_WS_PORT", "7001")
    assert cli.main(["config", "some/model", "--http.port", "9000", "--cache.prefix_caching", "false"]) == ExitCode.OK
    printed = capsys.readouterr().out
    (tmp_path / "printed.toml").write_text(printed)
    read = config.load(tmp_path / "printed.toml", environment={})
    assert (read.model.path, read.http.port, read.ws.port) == ("some/model", 9000, 7001)
    assert read.cache.prefix_caching is False
    assert set(tomllib.loads(printed)) == {name.partition(".")[0] for name in list(config.keys())}


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "service.toml"
    file.write_text("[http]\nport = 1\n[ws]\nport = 1\n[engine]\nthreads = 1\n")
    monkeypatch.setenv("INFERENGINE_HTTP_PORT", "2")
    monkeypatch.setenv("INFERENGINE_WS_PORT", "2")
    resolved = resolve(["--config", str(file), "--http.port", "3"])
    assert (resolved.http.port, resolved.ws.port, resolved.engine.threads) == (3, 2, 1)


def test_an_unknown_key_in_the_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text("[http]\nprot = 1\n")
    with pytest.raises(ConfigError, match=r"http\.prot: no such key in the file; did you mean"):
        resolve([f"--config={file}"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"[http]\nport = 8000.5\n", r"http\.port: must be a whole number; got 8000\.5 \(in service\.toml\)"),
        (b"[engine]\ndrain_timeout_s = nan\n", r"engine\.drain_timeout_s: must be a number; got nan"),
        (b"[http]\nport = " + b"1" * 400, r"http\.port: must be a whole number; got 1+ \(in service\.toml\)"),
        (b"[engine]\ndrain_timeout_s = " + b"1" * 400, r"engine\.drain_timeout_s: must be a number; got 1+"),
        (b"[http]\nport = " + b"[" * 100_000, r"service\.toml is not valid TOML"),
        (b"[http]\nport = -1\n", r"http\.port: must be at least 0; got -1 \(in service\.toml\)"),
        (b"port = 1\n", "port: keys stand inside a"),
        (b"[http\n", "service.toml is not valid TOML"),
        (b"\xff\xfe", "service.toml is not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_names_the_key_and_the_file(tmp_path: Path, text: bytes, complaint: str) -> None:
    file = tmp_path / "service.toml"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=complaint):
        resolve(["--config", str(file)])


def test_whole_numbers_may_be_written_as_toml_does(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text("[http]\nport = 9000.0\n[engine]\ndrain_timeout_s = 3\n")
    resolved = resolve(["--config", str(file)])
    assert (resolved.http.port, resolved.engine.drain_timeout_s) == (9000, 3.0)


def test_a_folder_is_no_configuration_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve(["--config", str(tmp_path)])


def test_a_mistake_in_the_environment_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENGINE_HTTP_PORT", "many")
    with pytest.raises(ConfigError, match=r"http\.port: must be a whole number; got 'many' \(from the environment\)"):
        resolve([])


def test_a_runtime_folder_that_cannot_be_made_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inferengine").write_text("a file in its place")
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert cli.main(["up", "--http.port", "0", "--ws.port", "0"]) == ExitCode.USAGE
    complaint = capsys.readouterr().err
    assert "is no folder: replace it" in complaint
    assert "or set wire.socket" in complaint


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert cli.main(["config"]) == ExitCode.ABORTED


def test_chat_without_an_engine_says_where_it_looked_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("inferengine.cli.command.CONNECT_TIMEOUT_S", 0.05)
    address = f"ipc://{tmp_path}/nobody.sock"
    assert cli.main(["chat", "--wire.socket", address]) == ExitCode.CRASH
    complaint = capsys.readouterr().err
    assert address in complaint
    assert "inferengine check" in complaint


@pytest.mark.parametrize(("name", "complaint"), [("", "is a folder"), ("nowhere/report.json", "there is no folder")])
def test_a_report_that_could_not_be_written_is_refused_before_the_work(
    tmp_path: Path, name: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "--requests", "10", "--json", str(tmp_path / name)]) == ExitCode.USAGE
    told = capsys.readouterr()
    assert "--json" in told.err
    assert complaint in told.err
    assert told.out == "", "nothing was simulated"


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at its end", "at its first line"])
def test_a_reader_that_has_gone_ends_a_command_without_a_word(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "inferengine.cli", "config"],
            stdout=writer,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            timeout=20,
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (ExitCode.UNREAD, b"")


def test_a_pipe_that_broke_elsewhere_is_no_quiet_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("inferengine.cli.serve.config", fail)
    with open(os.devnull, "w") as read_by_all:
        monkeypatch.setattr("sys.stdout", read_by_all)
        monkeypatch.setattr("sys.stderr", read_by_all)
        with pytest.raises(BrokenPipeError):
            cli.main(["config"])
