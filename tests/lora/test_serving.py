"""Adapters of a running engine over the wire: named by requests, loaded and unloaded while it serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferengine.engine.model_info import read_model_card
from inferengine.engine.process import build_executor
from inferengine.engine.service import EngineService
from inferengine.wire.messages import Accept, Admin, AdminReply, Reject, Welcome
from tests.engine.builders import RawClient, address_of, check_idle, make_config, wait_until
from tests.lora.adapters import write_adapter
from tests.models.checkpoints import greedy_reference, make_model, save

PROMPT = [5, 9, 200, 31, 7]


class Served:
    """An engine with one adapter, "a"; the files of another, "b"; and what merged weights say."""

    def __init__(self, folder: Path) -> None:
        model = make_model("llama")
        save(model, folder / "model")
        adapters = folder / "adapters"
        self.models = {"": model, "a": write_adapter(adapters / "a", model, seed=1)}
        self.models["b"] = write_adapter(folder / "later" / "b", model, seed=2)
        self.later = folder / "later" / "b"
        self.adapters = adapters
        config = make_config(
            str(folder),
            model={"path": str(folder / "model"), "adapters": str(adapters)},
            engine={"threads": 1, "max_num_seqs": 4},
            cache={"num_blocks": 64},
        )
        self.engine = EngineService(config, read_model_card(config), lambda: build_executor(config))
        self.engine.start()
        wait_until(lambda: self.engine.lifecycle.state == "READY" or self.engine.wait(0.0) is not None, 60.0)

    def expected(self, name: str, tokens: list[int]) -> list[int]:
        return greedy_reference(self.models[name], PROMPT, tokens)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("s"))
    yield served
    served.engine.abort()
    served.engine.wait(20.0)


@pytest.fixture
def peer(served: Served) -> Iterator[RawClient]:
    peer = RawClient(address_of(served.engine))
    yield peer
    peer.close()


def admin(peer: RawClient, op: str, **arguments: Any) -> AdminReply:
    peer.send(Admin(op, 7, arguments))
    return peer.expect(AdminReply, 20.0)


def submit(peer: RawClient, stream: int, adapter: str, max_tokens: int = 12) -> None:
    params = {"temperature": 0.0, "ignore_eos": True}
    peer.submit(stream, prompt=PROMPT, max_tokens=max_tokens, adapter=adapter, params=params)


def test_requests_choose_by_name_side_by_side(served: Served, peer: RawClient) -> None:
    for stream, name in ((1, ""), (2, "a"), (3, "")):
        submit(peer, stream, name)
    tokens = peer.collect({1, 2, 3}).tokens
    assert tokens[1] == tokens[3] == served.expected("", tokens[1])
    assert tokens[2] == served.expected("a", tokens[2])
    check_idle(served.engine)


def test_an_unknown_name_is_rejected(peer: RawClient) -> None:
    submit(peer, 1, "nobody")
    reject = peer.expect(Reject)
    assert (reject.code, reject.field) == ("model_not_found", "adapter")


def test_adapters_come_and_go_while_requests_run(served: Served, peer: RawClient) -> None:
    refused = admin(peer, "load_adapter", name="b")
    assert (refused.ok, refused.code) == (False, "not_found")
    served.later.rename(served.adapters / "b")
    submit(peer, 1, "a", max_tokens=150)
    peer.expect(Accept)
    assert admin(peer, "load_adapter", name="b").result == {"adapters": ["a", "b"]}
    assert admin(peer, "load_adapter", name="b").code == "conflict"
    wait_until(lambda: served.engine.io.connections.model.adapters == ("a", "b"))
    submit(peer, 2, "b")
    assert peer.expect(Accept).stream == 2
    unloaded = admin(peer, "unload_adapter", name="b")
    assert unloaded.ok
    submit(peer, 3, "b")
    assert peer.expect(Reject).code == "model_not_found"
    other = RawClient(address_of(served.engine))
    for stream, name in ((4, "a"), (5, "")):
        submit(other, stream, name)
    tokens = other.collect({4, 5}).tokens
    assert tokens[4] == served.expected("a", tokens[4])
    other.close()
    wait_until(lambda: served.engine.core.executor.adapters.names() == {"a": 1}, 20.0)
    assert admin(peer, "adapters").result == {"adapters": ["a"]}


def test_what_runs_with_an_unloaded_adapter_runs_on(served: Served, peer: RawClient) -> None:
    submit(peer, 1, "a", max_tokens=60)
    peer.expect(Accept)
    peer.send(Admin("unload_adapter", 7, {"name": "a"}))
    tokens = peer.collect({1}).tokens[1]
    assert len(tokens) == 60
    assert tokens == served.expected("a", tokens)
    assert admin(peer, "load_adapter", name="a").ok
    submit(peer, 2, "a")
    again = peer.collect({2}).tokens[2]
    assert again == tokens[:12]


def test_an_adapter_that_does_not_fit_is_refused_and_costs_nobody(
    served: Served, peer: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(served.adapters / "large", served.models[""], seed=3)

    def fails(adapter: object) -> int:
        raise MemoryError

    submit(peer, 1, "a", max_tokens=60)
    peer.expect(Accept)
    monkeypatch.setattr(served.engine.core.executor.adapters.bank, "add", fails)
    refused = admin(peer, "load_adapter", name="large")
    assert (refused.ok, refused.code) == (False, "engine_error")
    assert "no memory for the adapter large" in refused.message
    assert len(peer.collect({1}).tokens[1]) == 60
    monkeypatch.undo()
    assert admin(peer, "load_adapter", name="large").ok
    assert admin(peer, "unload_adapter", name="large").ok


def test_peers_are_told_which_adapters_there_are(served: Served) -> None:
    peer = RawClient(address_of(served.engine), greet=True)
    assert isinstance(peer.welcome, Welcome)
    assert peer.welcome.model.adapters == ("a",)
    peer.close()
