"""Keys of the configuration that were renamed: the old names are read for one release, with a warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from inferengine import config
from inferengine.cli.command import resolve
from inferengine.config.schema import RENAMED
from inferengine.errors import ConfigError


def test_every_old_name_leads_to_a_key_and_is_none_itself() -> None:
    known = config.keys()
    assert [old for old, new in RENAMED.items() if old in known or new not in known] == []


def test_the_old_name_is_read_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "service.toml").write_text('[wire]\nchoice = "round_robin"\n')
    assert config.load(tmp_path / "service.toml", environment={}).wire.load_balancing == "round_robin"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "wire.choice (in service.toml) is now wire.load_balancing (in service.toml)" in record.message


@pytest.mark.parametrize("words", [["--wire.choice", "round_robin"], ["--wire.choice=round_robin"]])
def test_the_old_name_is_read_as_a_flag(words: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert resolve(words).wire.load_balancing == "round_robin"
    assert [record.message for record in caplog.records] == [
        "--wire.choice is now --wire.load_balancing; the old name is read for one more release"
    ]


def test_the_old_name_is_read_from_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    found = config.load(environment={"INFERENGINE_SCHEDULER_PRESSURE": "swap"})
    assert found.scheduler.preemption == "swap"
    assert "INFERENGINE_SCHEDULER_PRESSURE is now INFERENGINE_SCHEDULER_PREEMPTION;" in caplog.text


def test_the_old_name_is_read_by_a_program(caplog: pytest.LogCaptureFixture) -> None:
    assert config.Config().with_values(scheduler={"pressure": "reject"}).scheduler.preemption == "reject"
    assert "scheduler.pressure is now scheduler.preemption;" in caplog.text


def test_todays_names_warn_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve(["--wire.load_balancing", "round_robin"]).wire.load_balancing == "round_robin"
    assert caplog.records == []


def test_both_names_at_once_are_refused(tmp_path: Path) -> None:
    (tmp_path / "service.toml").write_text('[wire]\nload_balancing = "round_robin"\nchoice = "round_robin"\n')
    with pytest.raises(ConfigError, match=r"wire\.choice: is the old name of wire\.load_balancing"):
        config.load(tmp_path / "service.toml", environment={})
    with pytest.raises(ConfigError, match="is the old name of INFERENGINE_WIRE_LOAD_BALANCING"):
        config.load(environment={"INFERENGINE_WIRE_CHOICE": "a", "INFERENGINE_WIRE_LOAD_BALANCING": "b"})
