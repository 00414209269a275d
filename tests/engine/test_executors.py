"""engine.executor names what computes, of this package or of another one that is installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inferengine.config import Config
from inferengine.engine.model_info import read_model_card
from inferengine.engine.process import build_executor
from inferengine.engine.service import EngineService
from inferengine.errors import ConfigError
from tests.engine.builders import RawClient, address_of, make_card, run_service

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
from inferengine.simulation.simulated_executor import SimulatedExecutor
from tests.engine.builders import small_capacity

def build(config):
    return SimulatedExecutor(small_capacity(max_num_seqs=config.engine.max_num_seqs))
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    """Install a distribution with an executor of this name, as pip would leave it."""
    info = folder / f"{name}_executor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-executor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[inferengine.executors]\n{name} = {name}_executor:build\n")
    (folder / f"{name}_executor.py").write_text(module)
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution with an executor named tiny."""
    install(tmp_path, monkeypatch, "tiny", MODULE)


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the executor of docs/executor.md, named echo."""
    page = (ROOT / "docs/executor.md").read_text(encoding="utf-8")
    (module,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "def build(config)" in block]
    install(tmp_path, monkeypatch, "echo", module)


@contextmanager
def echo(**sections: Any) -> Iterator[tuple[EngineService, RawClient]]:
    """Yield an engine with the embedded model's files and the documented executor, and a client."""
    sections["engine"] = {"executor": "echo"}
    config = Config().with_values(**sections)
    card = read_model_card(config)
    with run_service(lambda: build_executor(config, card), card=card, **sections) as service:
        assert service.lifecycle.state == "READY", service.lifecycle.last_error
        client = RawClient(address_of(service))
        yield service, client
        client.close()


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


@pytest.mark.usefixtures("documented")
def test_the_executor_of_the_documents_says_the_prompt_again() -> None:
    with echo() as (_, client):
        for stream in range(20):  # more than it has slots
            client.submit(stream + 1, prompt=[100 + stream, 200, 300], max_tokens=7)
        found = client.collect(set(range(1, 21)))
    assert [found.tokens[stream] for stream in range(1, 21)] == [
        [100 + stream, 200, 300, 100 + stream, 200, 300, 100 + stream] for stream in range(20)
    ]


@pytest.mark.usefixtures("documented")
def test_the_executor_of_the_documents_confirms_draft_tokens() -> None:
    with echo(speculation={"method": "ngram"}) as (service, client):
        client.submit(1, prompt=[100, 200, 300, 100, 200, 300], max_tokens=40)
        found = client.collect({1})
        stats = service.io.read_stats()
    assert found.tokens[1] == ([100, 200, 300] * 14)[:40]
    assert stats is not None
    assert stats["speculation"]["accepted"] > 0  # how many are drafted depends on the time of steps


@pytest.mark.usefixtures("documented")
def test_the_executor_of_the_documents_follows_a_grammar() -> None:
    with echo() as (_, client):
        client.submit(1, reply="text", grammar=("regex", "[0-9]{6}"), params={"ignore_eos": False}, max_tokens=60)
        found = client.collect({1})
    assert re.fullmatch("[0-9]{6}", found.text[1])


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
