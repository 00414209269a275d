"""`inferengine up`: how long a start may take, and the model that it brings first."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferengine.cli import up
from inferengine.cli.up import ModelNotFetched, StartTimes, bring_model, first_estimate_s
from inferengine.config import Config
from inferengine.errors import ConfigError, ExitCode


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


# -- several engines ---------------------------------------------------------------------------------------------------


def several(count: int, **sections: dict[str, object]) -> Config:
    return (
        Config().with_values(up={"engines": count}, wire={"socket": "ipc:///run/x/engine.sock"}).with_values(**sections)
    )


def test_each_engine_has_its_own_cards_name_socket_and_ports() -> None:
    config = several(2, engine={"tensor_parallel": 2, "metrics_port": 9000}, wire={"tcp": "tcp://127.0.0.1:5555"})
    first, second = up.engine_specs(config, ["4", "5", "GPU-1f", "GPU-2f"])
    assert (first.name, second.name) == ("engine-0", "engine-1")
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in (first, second)] == ["4,5", "GPU-1f,GPU-2f"]
    assert second.command[-2:] == ["--engine.name", "engine-1"]
    found = [second.environment[f"INFERENGINE_{key}"] for key in ("WIRE_SOCKET", "WIRE_TCP", "ENGINE_METRICS_PORT")]
    assert found == ["ipc:///run/x/engine-1.sock", "tcp://127.0.0.1:5558", "9001"]


def test_engines_publish_kv_events_at_ports_of_their_own() -> None:
    """Each takes two: the events and their replay."""
    specs = up.engine_specs(several(2, cache={"events": True, "events_address": "tcp://127.0.0.1:7000"}), [])
    addresses = [spec.environment["INFERENGINE_CACHE_EVENTS_ADDRESS"] for spec in specs]
    assert addresses == ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7002"]


@pytest.mark.parametrize(
    ("key", "last"),
    [
        ("wire.tcp", "tcp://127.0.0.1:65530"),
        ("wire.socket", "tcp://127.0.0.1:65530"),
        ("cache.events_address", "tcp://127.0.0.1:65532"),
        ("engine.metrics_port", 65534),
    ],
)
def test_ports_above_the_highest_are_refused_at_the_start(key: str, last: str | int) -> None:
    section, _, name = key.partition(".")
    values: dict[str, dict[str, object]] = {section: {name: last}}
    assert len(up.engine_specs(several(2, **values), [])) == 2
    with pytest.raises(ConfigError, match=rf"{key}: each engine .* those of engine 2 would be above 65535; choose a"):
        up.engine_specs(several(3, **values), [])


def test_on_a_cpu_engines_share_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(up.os, "sched_getaffinity", lambda pid: set(range(8)))
    specs = up.engine_specs(several(2), [])
    assert {spec.environment["OMP_NUM_THREADS"] for spec in specs} == {"4"}
    assert {spec.environment["INFERENGINE_CACHE_MEMORY_FRACTION"] for spec in specs} == {"0.125"}
    assert not any("CUDA_VISIBLE_DEVICES" in spec.environment for spec in specs)


def test_front_ends_know_all_engines_and_send_equal_beginnings_to_one() -> None:
    wire = up.config_of_front_ends(several(2, wire={"engines": "tcp://10.0.0.2:5555"})).wire
    assert wire.engines == "ipc:///run/x/engine-0.sock,ipc:///run/x/engine-1.sock,tcp://10.0.0.2:5555"
    assert wire.load_balancing == "prefix_affinity"
    assert (
        up.config_of_front_ends(several(2, wire={"load_balancing": "round_robin"})).wire.load_balancing == "round_robin"
    )


def test_a_single_engine_has_the_configuration_as_it_is() -> None:
    config = several(1)
    (spec,) = up.engine_specs(config, ["0", "1"])
    assert (spec.name, spec.environment["INFERENGINE_WIRE_SOCKET"]) == ("engine", "ipc:///run/x/engine.sock")
    assert up.config_of_front_ends(config) == config


@pytest.mark.parametrize(
    ("wanted", "each", "device", "cards", "found"),
    [(0, 2, "auto", "0123", 2), (4, 1, "auto", "0123", 4), (3, 1, "cpu", "", 3), (0, 1, "cpu", "01", 1)],
)
def test_the_number_of_engines_is_what_the_cards_allow(
    wanted: int, each: int, device: str, cards: str, found: int
) -> None:
    config = several(wanted, engine={"tensor_parallel": each, "device": device})
    assert up.num_engines(config, list(cards)) == found


@pytest.mark.parametrize(
    ("engine", "cards", "message"),
    [
        ({"tensor_parallel": 2}, "012", r"3 engines of 2 cards .* need 6 cards, and 3 are visible .*ask for at most 1"),
        ({"device": "cuda"}, "", "3 engines need 3 cards, and 0 are visible"),
        ({"executor": "remote"}, "012", "engine.executor = remote has its devices elsewhere"),
    ],
)
def test_more_engines_than_cards_are_refused(engine: dict[str, object], cards: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        up.num_engines(several(3, engine=engine), list(cards))
    assert caught.value.field == "up.engines"
