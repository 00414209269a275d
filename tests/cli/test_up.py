"""`inferengine up`: how long a start may take, and the model that it brings first."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferengine.cli import up
from inferengine.cli.up import ModelNotFetched, StartTimes, bring_model, first_estimate_s
from inferengine.config import Config
from inferengine.errors import ExitCode


def test_the_last_start_of_the_same_model_is_remembered(tmp_path: Path) -> None:
    file = tmp_path / "made" / "starts.json"
    assert StartTimes(file, "a").usual_s() == 0
    StartTimes(file, "a").keep(3.14)
    StartTimes(file, "b").keep(50.0)
    StartTimes(file, "a").keep(2.0)
    assert (StartTimes(file, "a").usual_s(), StartTimes(file, "b").usual_s()) == (2.0, 50.0)


@pytest.mark.parametrize("text", ["", "[]", '{"a": "soon"}', '{"a": -1}', '{"a": true'])
def test_a_broken_memory_is_no_memory(tmp_path: Path, text: str) -> None:
    (tmp_path / "starts.json").write_text(text)
    times = StartTimes(tmp_path / "starts.json", "a")
    assert times.usual_s() == 0
    times.keep(4.0)
    assert times.usual_s() == 4.0


def test_a_memory_that_cannot_be_kept_is_no_failure() -> None:
    times = StartTimes(Path("/proc/no/starts.json"), "a")
    times.keep(1.0)
    assert times.usual_s() == 0


def test_only_so_many_starts_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "starts.json"
    for number in range(StartTimes.MOST + 5):
        StartTimes(file, str(number)).keep(1.0)
    assert StartTimes(file, "0").usual_s() == 0
    assert StartTimes(file, str(StartTimes.MOST + 4)).usual_s() == 1.0


def test_the_first_estimate_grows_with_the_weights(tmp_path: Path) -> None:
    small = first_estimate_s(Config().with_values(engine={"device": "cpu"}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(8_000_000_000)
    large = first_estimate_s(Config().with_values(engine={"device": "cpu"}, model={"path": str(tmp_path)}))
    assert 1 < small < large


def test_a_model_that_is_there_is_not_fetched_and_one_that_is_not_ends_the_start_where_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    started: list[list[str]] = []

    class Failed:
        returncode = ExitCode.USAGE

    def run(command: list[str], **_: object) -> Failed:
        started.append(command)
        return Failed()

    monkeypatch.setattr(up.subprocess, "run", run)
    bring_model(Config())
    bring_model(Config().with_values(model={"path": str(tmp_path)}))
    assert started == []
    with pytest.raises(ModelNotFetched):
        bring_model(Config().with_values(model={"path": "qwen3-0.6b"}))
    assert started[0][-2:] == ["fetch", "qwen3-0.6b"]
