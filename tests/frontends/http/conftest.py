"""One front end for all tests of a module; those that break something build their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frontends.http.builders import House, house, says


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
