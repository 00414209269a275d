"""One service for the tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.service import Service


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Yield the embedded model, served; do not kill its parts."""
    running = Service(tmp_path_factory.mktemp("service"))
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture(scope="module")
def mended_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Yield a service whose parts may be killed: it starts them again, and the test waits until it serves."""
    running = Service(tmp_path_factory.mktemp("mended"))
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture
def own_service(tmp_path: Path) -> Iterator[Service]:
    """Yield a service that this test may end."""
    running = Service(tmp_path / "own")
    try:
        yield running.wait_ready()
    finally:
        running.stop()
