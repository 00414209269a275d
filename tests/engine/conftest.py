"""Fixtures: an engine with a simulated device, and clients that are closed with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from inferengine.engine.service import EngineService
from tests.engine.builders import RawClient, address_of, run_service

Connect = Callable[..., RawClient]


@pytest.fixture
def engine() -> Iterator[EngineService]:
    with run_service() as service:
        yield service


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Yield `connect(service, **hello)`, which returns a greeted client."""
    clients: list[RawClient] = []

    def make(service: EngineService, **arguments: object) -> RawClient:
        clients.append(RawClient(address_of(service), **arguments))  # type: ignore[arg-type]
        return clients[-1]

    yield make
    for client in clients:
        client.close()
