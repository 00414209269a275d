"""Fixtures: an engine with a simulated device, and peers that are closed with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from inferengine.engine.service import EngineService
from tests.engine.builders import RawPeer, address_of, run_service

Connect = Callable[..., RawPeer]


@pytest.fixture
def engine() -> Iterator[EngineService]:
    with run_service() as service:
        yield service


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`connect(service, **hello)` gives a greeted peer."""
    peers: list[RawPeer] = []

    def make(service: EngineService, **arguments: object) -> RawPeer:
        peers.append(RawPeer(address_of(service), **arguments))  # type: ignore[arg-type]
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()
