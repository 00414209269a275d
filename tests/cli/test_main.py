"""`inferengine COMMAND ...`: what is understood, what is refused, and with which exit code."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inferengine import __version__, config
from inferengine.cli import main as cli
from inferengine.cli.command import MOST_USED_KEYS, resolve
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
        (b"[http]\nworkers = 100000\n", r"http\.workers: must be at most 256; got 100000"),
        (b"[cache]\nmemory_fraction = 90\n", r"cache\.memory_fraction: must be at most 1; got 90"),
        (b'[engine]\nname = "a/b"\n', r"engine\.name: must have letters, digits, _, - and \. only: .*; got 'a/b' \(in"),
        (b'[engine]\nname = ""\n', r"engine\.name: must have letters, digits, _, - and \. only"),
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


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["serve", "./model"], "did you mean 'up'?"),
        (["pull", "qwen3-0.6b"], "did you mean 'fetch'?"),
        (["qwen3-0.6b"], "to serve that model: inferengine up qwen3-0.6b"),
        (["./model", "--http.port", "1"], "to serve that model: inferengine up ./model --http.port 1"),
        (["--http.port", "1"], "a command comes first, as in 'inferengine up --http.port 1'"),
        (["config", "--max-model-len", "1"], "did you mean --model.max_model_len?"),
        (["config", "--gpu-memory-utilization", "0.9"], "did you mean --cache.memory_fraction?"),
        (["config", "--tensor-parallel-size", "2"], "did you mean --engine.tensor_parallel?"),
        (["config", "--data-parallel-size", "2"], "did you mean --up.engines?"),
        (["config", "--cache.policy", "fcfs"], "did you mean --scheduler.policy?"),
        (["config", "--model", "x"], "the model is a bare word"),
        (["config", "model", "--jsno"], "did you mean --json?"),
    ],
)
def test_words_of_other_programs_lead_to_ours(
    words: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == ExitCode.USAGE
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize("words", [["zebra"], ["config", "--zebra", "1"], ["config", "--zebra.crossing", "1"]])
def test_where_nothing_is_alike_nothing_is_suggested(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == ExitCode.USAGE
    assert "did you mean" not in capsys.readouterr().err


def test_a_variable_that_is_no_key_is_refused_with_the_nearest_if_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENGINE_HTTP_PROT", "1")
    with pytest.raises(ConfigError, match="did you mean INFERENGINE_HTTP_PORT"):
        resolve([])
    monkeypatch.delenv("INFERENGINE_HTTP_PROT")
    monkeypatch.setenv("INFERENGINE_ZEBRA", "1")
    with pytest.raises(ConfigError, match=r"INFERENGINE_ZEBRA: no such key$"):
        resolve([])


def test_the_general_help_has_the_twenty_keys_and_says_how_to_see_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(MOST_USED_KEYS) == 20
    cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"--{key} " in shown for key in MOST_USED_KEYS)
    assert "inferengine --help-all" in shown
    for words in (["--help-all"], ["bench", "--help"], ["up", "--help-all"]):
        assert cli.main(words) == ExitCode.OK
        shown = capsys.readouterr().out
        assert all(f"--{key} " in shown for key in list(config.keys())) == ("--help-all" in words)


def test_config_says_what_each_key_takes(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["config"])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith('device = "auto"') and "(one of auto, cpu, cuda)" in line for line in lines)
    assert any(line.startswith("block_size = 0") and "one of 0, 8, 16" in line for line in lines)
    assert any(line.startswith("max_num_seqs") and "(a whole number, at least 0)" in line for line in lines)
    assert any(line.startswith("cuda_graphs") and "(true or false)" in line for line in lines)


def test_config_as_json_describes_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--json", "--engine.device", "cpu"]) == ExitCode.OK
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == list(config.keys())
    device = printed["engine.device"]
    assert (device["value"], device["default"], device["choices"]) == ("cpu", "auto", ["auto", "cpu", "cuda"])


def test_every_command_but_completion_writes_json() -> None:
    for name in set(cli.COMMANDS) - {"completion"}:
        entry = cli.COMMANDS[name]
        declared = getattr(importlib.import_module(f"inferengine.cli.{entry.module}"), entry.function)
        assert "--json" in [option.flag for option in declared.options], name


def test_an_error_is_json_where_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--json", "--compare", "--http.port", "x", "--engine.device", "y"]) == ExitCode.USAGE
    assert cli.main(["config", "--json", "--http.port", "many"]) == ExitCode.USAGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert json.loads(last)["error"]["field"] == "http.port"


def test_without_the_engines_packages_a_command_says_which_extra_brings_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "EXTRAS", {"engine": "no_such_package", "server": "uvicorn"})
    monkeypatch.setattr(cli, "OTHER_EXECUTORS", ())
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert cli.main(["up"]) == ExitCode.USAGE
    assert "pip install 'inferengine[engine]'" in capsys.readouterr().err
    assert cli.main(["up", "--help"]) == ExitCode.OK


def test_the_package_lists_its_names_and_imports_them_late() -> None:
    program = (
        "import inferengine, sys; print(dir(inferengine)); inferengine.SamplingParams; print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    names, has_torch = ran.stdout.splitlines()
    assert "'LLM'" in names
    assert "'SamplingParams'" in names
    assert has_torch == "False"


def test_an_engine_that_leaves_the_computing_to_others_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"aiohttp"}
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: name if name in there else None)
    cli.require(cli.EXECUTOR)
    with pytest.raises(ConfigError, match=r"inferengine\[engine\]"):
        cli.require("engine")
    there.clear()
    with pytest.raises(ConfigError, match=r"inferengine\[engine\]"):
        cli.require(cli.EXECUTOR)


def test_an_engine_with_the_executor_of_another_package_needs_no_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "EXTRAS", {"engine": "no_such_package"})
    monkeypatch.setattr(cli, "OTHER_EXECUTORS", ())
    with pytest.raises(ConfigError):
        cli.require(cli.EXECUTOR)
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[inferengine.executors]\nmine = mine:build\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cli.require(cli.EXECUTOR)
