"""`inferengine keygen`: keys that the front ends and the wire take as they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from frontends.common.auth import read_keys
from inferengine.cli import main as cli
from inferengine.errors import ExitCode
from inferengine.wire.curve import read_pair


def keygen(*words: str) -> int:
    return cli.main(["keygen", *words])


def test_an_api_key_is_printed_once_and_kept_as_a_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    assert keygen("--api", "alice", "--file", str(file), "--tenant", "a", "--requests-per-minute", "60") == ExitCode.OK
    alice = capsys.readouterr().out.strip()
    assert keygen("--api", "root", "--file", str(file), "--admin", "--models", "x,y", "--priority=-2") == ExitCode.OK
    root = capsys.readouterr().out.strip()
    assert alice not in file.read_text()
    assert not file.stat().st_mode & 0o007
    keys = read_keys(str(file))
    assert (keys.identify(alice).tenant, keys.identify(alice).requests_per_minute) == ("a", 60)
    found = keys.identify(root)
    assert (found.admin, found.models, found.priority) == (True, ("x", "y"), -2)


def test_without_a_file_the_entry_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert keygen("--api", "alice") == ExitCode.OK
    key, _, entry = capsys.readouterr().out.partition("\n")
    (tmp_path / "keys.toml").write_text(entry)
    assert read_keys(str(tmp_path / "keys.toml")).identify(key).name == "alice"


def test_a_curve_pair_is_written_once_and_its_public_key_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keygen("--curve", "engine", "--folder", str(tmp_path)) == ExitCode.OK
    assert read_pair(str(tmp_path / "engine.key")).public.decode() == capsys.readouterr().out.strip()
    assert keygen("--curve", "engine", "--folder", str(tmp_path)) == ExitCode.USAGE
    assert "exists" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot give files to another group")
def test_what_root_makes_in_a_service_s_folder_the_service_can_read_and_nobody_else(tmp_path: Path) -> None:
    os.chown(tmp_path, 0, 4242)
    keygen("--api", "alice", "--file", str(tmp_path / "keys.toml"))
    keygen("--curve", "engine", "--folder", str(tmp_path))
    for name in ("keys.toml", "engine.key"):
        found = (tmp_path / name).stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (0, 4242, 0o640)


def test_a_folder_that_is_not_there_is_made_for_its_owner_and_group_alone(tmp_path: Path) -> None:
    assert keygen("--api", "alice", "--file", str(tmp_path / "new" / "keys.toml")) == ExitCode.OK
    assert keygen("--curve", "engine", "--folder", str(tmp_path / "deep" / "down")) == ExitCode.OK
    for folder in ("new", "deep", "deep/down"):
        assert (tmp_path / folder).stat().st_mode & 0o027 == 0


def test_json_output_has_the_key_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "keys.toml")
    assert keygen("--api", "alice", "--file", file, "--json") == ExitCode.OK
    printed = json.loads(capsys.readouterr().out)
    assert (printed["name"], printed["file"]) == ("alice", file)
    assert read_keys(file).identify(printed["key"]).name == "alice"


def test_a_pair_in_a_folder_of_one_s_own_is_for_its_owner_alone(tmp_path: Path) -> None:
    keygen("--curve", "engine", "--folder", str(tmp_path))
    assert (tmp_path / "engine.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "--api NAME or --curve NAME"),
        (["--api", "a", "--curve", "b"], "--api NAME or --curve NAME"),
        (["--api"], "a value must follow"),
        (["--api", "a", "--priority", "high"], "whole number"),
        (["--api", "a", "--folder", "x"], "--folder"),
        (["--curve", "a/b"], "file's name"),
        (["--curve", "a", "--admin"], "--admin"),
        (["--curve", "a", "--folder", "/proc/no/folder"], "cannot be written"),
        (["--api", "a", "--file", "/proc/no/folder/keys.toml"], "cannot be written"),
        (["--secret", "a"], "no such option"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert keygen(*words) == ExitCode.USAGE
    assert complaint in capsys.readouterr().err


def test_a_second_key_of_the_same_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "keys.toml")
    assert keygen("--api", "alice", "--file", file) == ExitCode.OK
    assert keygen("--api", "alice", "--file", file) == ExitCode.USAGE
    assert "choose another" in capsys.readouterr().err
