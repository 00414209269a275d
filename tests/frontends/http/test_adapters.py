"""LoRA adapters as models of their own: listed, chosen by name, the model itself for every other request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frontends.http.builders import House, house


@pytest.fixture(scope="module")
def adapted() -> Iterator[House]:
    with house(running=False) as built:
        built.engine.info = built.engine.info.replace(adapters=("pirate", "poet"))
        built.start_engine()
        yield built


def test_adapters_are_listed_as_children_of_the_model(adapted: House) -> None:
    cards = adapted.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("pirate", "tiny"), ("poet", "tiny")]
    assert adapted.http.get("/v1/models/poet").json()["parent"] == "tiny"
    assert adapted.http.get("/v1/models/nobody").status_code == 404


@pytest.mark.parametrize(("name", "adapter"), [("pirate", "pirate"), ("poet", "poet"), ("tiny", ""), (None, "")])
def test_the_name_of_a_model_reaches_the_engine_as_an_adapter(adapted: House, name: str | None, adapter: str) -> None:
    document = adapted.complete(model=name)
    assert adapted.engine.submits[-1].adapter == adapter
    assert document["model"] == (name or "tiny")
    chat = adapted.post("/v1/chat/completions", model=name, messages=[{"role": "user", "content": "hi"}])
    assert chat.status_code == 200, chat.text
    assert adapted.engine.submits[-1].adapter == adapter


def test_another_name_is_not_found(adapted: House) -> None:
    response = adapted.post("/v1/completions", prompt="say", model="nobody")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
