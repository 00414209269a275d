"""docs/http.md is true: its curl lines run, its lists are those of the code."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from frontends.http.app import ROUTES
from frontends.http.bodies import REFUSED, SAMPLING, STRUCTURE
from tests.frontends.http.builders import House

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text(encoding="utf-8")
CURL_LINES = re.findall(r"^curl .*$", PAGE, re.MULTILINE)


def test_the_page_has_lines_to_try() -> None:
    assert len(CURL_LINES) >= 10


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("line", CURL_LINES)
def test_a_curl_line_works(served: House, line: str) -> None:
    served.engine.admin["stats"] = {"running": True}
    line = line.replace("http://127.0.0.1:8000", served.front.url).replace('"inferengine-embedded"', '"tiny"')
    ended = subprocess.run(
        [*shlex.split(line), "--fail", "--max-time", "60"], capture_output=True, text=True, timeout=90
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
    assert not ended.stdout.startswith('{"error":')


def test_every_route_is_on_the_page() -> None:
    for route in ROUTES:
        assert f" {route.path.replace('{model:path}', '{id}')}`" in PAGE


@pytest.mark.parametrize("name", [*REFUSED, *SAMPLING, *STRUCTURE])
def test_every_field_is_on_the_page(name: str) -> None:
    assert f"`{name}" in PAGE or (name.startswith("guided_") and "`guided_*`" in PAGE)
