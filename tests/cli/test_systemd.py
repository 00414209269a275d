"""The units name the Python that installs them, wherever it lies, and see no more of /root and /home than that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferengine.cli import main, systemd
from inferengine.cli.systemd import Install, bound_folders, data_folder, units
from inferengine.errors import ConfigError

SERVICES = [f"/etc/systemd/system/inferengine-{name}.service" for name in ("engine", "http", "ws")]


def written(python: str, *folders: str, search: str = "") -> dict[str, str]:
    """Return the text of each file for an interpreter that needs these folders."""
    found = Install(python, tuple(map(Path, folders)), search)
    return {file.path: file.text for file in units(data_folder(), found)}


def lines(text: str, name: str) -> list[str]:
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{name}=")]


@pytest.mark.parametrize(
    "python", ["/usr/bin/python3", "/opt/inferengine/.venv/bin/python", "/srv/venv/bin/python3.13"]
)
def test_a_python_that_all_may_run_is_named_and_nothing_else_changes(python: str) -> None:
    files = written(python, "/usr", "/srv/venv")
    for path, command in zip(SERVICES, ("engine", "http", "ws"), strict=True):
        (started,) = lines(files[path], "ExecStart")
        assert started == f"{python} -P -m inferengine.cli {command} --config /etc/inferengine/inferengine.toml"
        assert lines(files[path], "ExecStartPre")[0].endswith(f" {python}")
        assert lines(files[path], "ProtectHome") in (["yes"], ["read-only"])
        assert lines(files[path], "BindReadOnlyPaths") == []


@pytest.mark.parametrize(
    ("python", "folders"),
    [
        ("/home/ann/.pyenv/versions/3.12.4/bin/python3.12", ["/home/ann/.pyenv/versions/3.12.4"]),
        ("/srv/venv/bin/python", ["/srv/venv", "/root/python-3.12"]),
        (
            "/home/ann/.local/share/pipx/venvs/inferengine/bin/python",
            ["/home/ann/.local/share/pipx/venvs/inferengine", "/usr"],
        ),
        (
            "/home/ann/.local/share/uv/tools/inferengine/bin/python",
            ["/home/ann/.local/share/uv/python/cpython-3.12-linux", "/home/ann/.local/share/uv/tools/inferengine"],
        ),
    ],
    ids=["pyenv", "venv of pyenv", "pipx", "uv tool"],
)
def test_of_a_python_below_a_home_the_units_see_its_folders_alone(python: str, folders: list[str]) -> None:
    hidden = [folder for folder in folders if folder.startswith(systemd.HIDDEN)]
    for path, text in written(python, *folders, f"{folders[0]}/lib").items():
        if path in SERVICES:
            assert lines(text, "ProtectHome") == ["tmpfs"]
            assert lines(text, "BindReadOnlyPaths") == [" ".join(hidden)]
            assert lines(text, "ExecStart")[0].startswith(f"{python} -P ")


def test_folders_are_bound_by_name_and_where_links_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "HIDDEN", (str(tmp_path),))
    (tmp_path / "cpython-3.12.8" / "lib").mkdir(parents=True)
    (tmp_path / "cpython-3.12").symlink_to("cpython-3.12.8")
    found = bound_folders([tmp_path / "cpython-3.12", tmp_path / "cpython-3.12.8" / "lib", Path("/usr")])
    assert found == [tmp_path / "cpython-3.12", tmp_path / "cpython-3.12.8"]


def test_signs_of_systemd_s_own_are_written_twice_and_spaces_quoted() -> None:
    text = written("/home/a b/100%/$x/python", "/home/a b/100%/$x")[SERVICES[0]]
    assert lines(text, "ExecStart")[0].startswith('"/home/a b/100%%/$$x/python" -P -m')
    assert lines(text, "BindReadOnlyPaths") == ['"/home/a b/100%%/$x"']


def test_a_checkout_that_python_does_not_find_by_itself_is_named() -> None:
    text = written("/usr/bin/python3", "/srv/checkout", search="/srv/checkout")[SERVICES[0]]
    assert "PYTHONPATH=/srv/checkout" in lines(text, "Environment")


def test_nothing_of_another_place_is_left() -> None:
    for path, text in written("/usr/bin/python3").items():
        assert "/opt/" not in text, path


def test_an_image_gets_files_and_keeps_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["systemd", "install", "--root", str(tmp_path)]) == 0
    config = tmp_path / "etc/inferengine/inferengine.toml"
    assert config.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / SERVICES[0].lstrip("/")).stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "etc/tmpfiles.d/inferengine.conf").exists()
    assert "systemctl enable --now inferengine-http.socket" in capsys.readouterr().out
    config.write_text("# mine")
    assert main.main(["systemd", "install", "--root", str(tmp_path)]) == 0
    assert config.read_text() == "# mine"


def test_a_dry_run_prints_every_file_and_writes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["systemd", "install", "--dry-run", "--root", str(tmp_path), "--config", "/srv/mine.toml"]) == 0
    printed = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    for path in (*SERVICES, "/etc/sysusers.d/inferengine.conf", "/srv/mine.toml"):
        assert f"# ---- {path} (mode" in printed
    assert main.main(["systemd", "install", "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {file["path"] for file in found["files"]} >= set(SERVICES)
    assert found["commands"][-1] == "systemctl daemon-reload"


def test_units_that_are_absent_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["systemd", "--config", str(tmp_path / "none.toml")]) == 1
    assert f"absent   {tmp_path / 'none.toml'}" in capsys.readouterr().out


def test_a_relative_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="absolute"):
        systemd.install(["--config", "mine.toml"])


def test_a_unit_that_differs_is_shown_by_its_first_line_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.service"
    path.write_text("[Service]\nRestart=no\n")
    file = systemd.File(str(path), "[Service]\nRestart=always\n")
    monkeypatch.setattr(systemd, "units", lambda *_: [file])
    assert systemd.compare([]) == 1
    assert capsys.readouterr().out == f"differs  {path}: 'Restart=no', would be 'Restart=always'\n"
