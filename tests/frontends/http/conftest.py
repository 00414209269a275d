"""One front end for all tests of a module; those that break something build their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frontends.http.builders import House, house, says
from tests.frontends.http.embedded import Embedded, embedded_model


@pytest.fixture(scope="module")
def shared_house() -> Iterator[House]:
    with house() as built:
        yield built


@pytest.fixture
def served(shared_house: House) -> House:
    shared_house.script = says("the quick brown fox")
    shared_house.engine.submits.clear()
    shared_house.engine.cancelled.clear()
    return shared_house


@pytest.fixture(scope="module")
def thinker() -> Iterator[House]:
    """Yield a front end that reads reasoning between <think> marks."""
    with house(http={"reasoning_parser": "think"}) as built:
        yield built


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    with embedded_model(str(tmp_path_factory.mktemp("e"))) as built:
        yield built
