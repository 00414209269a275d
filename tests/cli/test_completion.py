"""`inferengine completion`: the scripts, and what bash completes with its one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from inferengine import config
from inferengine.cli import main as cli
from inferengine.errors import ExitCode


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from inferengine.cli.completion import bash, commands, configuration_flags

    path = tmp_path_factory.mktemp("completion") / "inferengine.bash"
    path.write_text(bash(commands(), configuration_flags()))
    return path


def completed(script: Path, *words: str) -> set[str]:
    """Return what bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in ("inferengine", *words))
    setting = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}"
    program = f'source {script}; {setting}; _inferengine; printf "%s\\n" "${{COMPREPLY[@]}}"'
    ran = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=20, cwd=script.parent)
    assert ran.stderr == ""
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pl"], {"plan-memory"}),
        (["up", "--engine.dev"], {"--engine.device"}),
        (["up", "--engine.device", ""], {"auto", "cpu", "cuda"}),
        (["up", "--engine.cuda_graphs", "t"], {"true"}),
        (["up", "qwen3-0"], {"qwen3-0.6b", "qwen3-0.6b-fp8"}),
        (["keygen", "--ad"], {"--admin"}),
        (["keygen", "--http"], set()),
        (["completion", "z"], {"zsh"}),
        (["up", "--config", "inferengine.b"], {"inferengine.bash"}),
    ],
)
def test_bash_offers_commands_flags_values_models_and_files(script: Path, words: list[str], offered: set[str]) -> None:
    assert completed(script, *words) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_script_knows_every_command_and_key_and_is_valid(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", shell]) == ExitCode.OK
    text = capsys.readouterr().out
    dashes = "-l " if shell == "fish" else "--"
    assert [key for key in list(config.keys()) if f"{dashes}{key}" not in text] == []
    assert [name for name in cli.COMMANDS if " " not in name and name not in text] == []
    assert "concurrencies" in text, "the flags of `bench sweep` are completed behind `bench`"
    if shutil.which(shell):
        (tmp_path / "script").write_text(text)
        checked = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, timeout=20)
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("words", [[], ["tcsh"]])
def test_other_shells_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", *words]) == ExitCode.USAGE
    assert "must be one of bash, zsh, fish" in capsys.readouterr().err
