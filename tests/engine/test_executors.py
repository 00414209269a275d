"""engine.executor names what computes, of this package or of another one that is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inferengine.config import Config
from inferengine.engine.process import build_executor
from inferengine.errors import ConfigError
from tests.engine.builders import RawClient, address_of, make_card, run_service

MODULE = """
from inferengine.simulation.simulated_executor import SimulatedExecutor
from tests.engine.builders import small_capacity

def build(config):
    return SimulatedExecutor(small_capacity(max_num_seqs=config.engine.max_num_seqs))
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with an executor, as pip would leave it."""
    info = tmp_path / "tiny_executor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-executor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[inferengine.executors]\ntiny = tiny_executor:build\n")
    (tmp_path / "tiny_executor.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
def test_an_installed_executor_computes() -> None:
    engine = {"executor": "tiny", "max_num_seqs": 3}
    config = Config().with_values(engine=engine)

    with run_service(lambda: build_executor(config, make_card()), engine=engine) as service:
        assert service.loaded.loop.most_running == 3
        client = RawClient(address_of(service))
        client.submit(1, max_tokens=5)
        found = client.collect({1})
        client.close()
        assert found.done[1][0].reason == "length"
        assert len(found.tokens[1]) == 5


@pytest.mark.usefixtures("installed")
def test_an_unknown_executor_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"one of torch, .*upstream.*tiny") as refusal:
        build_executor(Config().with_values(engine={"executor": "tinny"}), make_card())
    assert refusal.value.field == "engine.executor"


def test_an_executor_that_lacks_a_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("inferengine.engine.upstream.relay", "inferengine.engine.upstream.servers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    config = Config().with_values(engine={"executor": "upstream"}, upstream={"url": "http://127.0.0.1:1"})
    with pytest.raises(ConfigError, match=r"inferengine\[upstream\]"):
        build_executor(config, make_card())
