"""The commands of a fleet, as far as they go without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inferengine.cli import fleet
from inferengine.cli import main as cli
from inferengine.errors import ConfigError, ExitCode


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a cluster is used: a refusal must come before that."""

    @contextmanager
    def connect(arguments: Any) -> Iterator[None]:
        raise AssertionError("a mistake was not seen before Ray was asked")
        yield

    monkeypatch.setattr(fleet, "_cluster", connect)


def test_without_ray_a_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "EXTRAS", {**cli.EXTRAS, "ray": "no_such_package"})
    assert cli.main(["fleet", "up"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "pip install 'inferengine[ray]'" in said
    assert "scripts/install ray" in said
    assert cli.main(["fleet", "up", "--help"]) == ExitCode.OK


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("command", "words", "complaint"),
    [
        (fleet.up, ["--engines", "9", "--most", "4"], "--engines: 9 must be between --least, 1, and --most, 4"),
        (fleet.up, ["--surge", "2"], "--surge: must be 1 or 0; got 2"),
        (fleet.up, ["--queue", "0"], "--queue: must be above 0"),
        (fleet.up, ["--fleet", "a/b"], "--fleet: a name has letters"),
        (fleet.up, ["one", "--model", "other"], "--model: and 'one' name two models: give one"),
        (fleet.up, ["--wire.tcp", "tcp://127.0.0.1:1"], "wire.tcp: a fleet chooses addresses and keys itself"),
        (fleet.up, ["--engine.executor", "upstream"], "engine.executor: upstream has its devices elsewhere"),
        (fleet.scale, [], "--engines: give either --engines N, or --least N, --most N or both"),
        (fleet.scale, ["--engines", "2", "--most", "4"], "--engines: give either"),
        (fleet.drain, [], "--engine: a name must follow"),
        (fleet.drain, ["--engine", "first"], "such as engine-3"),
    ],
)
def test_a_refusal_names_the_flag_and_the_remedy(command: Any, words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        command(words)
    assert complaint in str(refused.value)


def engine(state: str = "ready", *, revision: int = 1, pid: int = 7) -> dict[str, Any]:
    return {"state": state, "revision": revision, "pid": pid}


@pytest.mark.parametrize(
    ("engines", "revision", "line"),
    [
        ([engine()] * 2, 1, "2 of 2 engines are READY"),
        ([engine(), engine("starting")], 1, "1 of 2 engines are READY"),
        ([engine(), engine("starting", pid=0)], 1, "1 wait for room on a machine or for Ray ('ray status' shows"),
        ([engine(), engine(), engine("starting", revision=2, pid=0)], 2, "--surge 0 needs no more"),
        ([engine(), engine("draining"), engine(revision=2)], 2, "2 are still to be replaced, 1 drain"),
    ],
)
def test_a_fleet_says_what_it_lacks(engines: list[dict[str, Any]], revision: int, line: str) -> None:
    assert line in fleet.what_is_missing({"engines": engines, "wanted": 2, "revision": revision})
