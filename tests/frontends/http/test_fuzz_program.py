"""scripts/fuzz_http.py in short: no request of a seed is answered by a 5xx, and the same seed sends the same bytes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.frontends.http.embedded import Embedded

FILE = Path(__file__).resolve().parents[3] / "scripts" / "fuzz_http.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_http", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_http"] = module
    spec.loader.exec_module(module)
    return module


def test_no_mutated_request_is_the_server_s_fault(fuzz: ModuleType, embedded: Embedded) -> None:
    statuses, faults = fuzz.run(embedded.front.url, seed=7, count=300)
    assert not faults
    assert sum(statuses.values()) == 300
    assert any(status.startswith("200") for status in statuses)


def test_a_seed_stands_for_its_requests(fuzz: ModuleType) -> None:
    assert list(fuzz.cases(3, 50)) == list(fuzz.cases(3, 50))
    assert list(fuzz.cases(3, 50)) != list(fuzz.cases(4, 50))
