"""docs/http.md is true: its curl lines run, its lists are those of the code."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
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


def routes_on_the_page() -> set[str]:
    """Return method and path of each route of the table. `GET`, `POST /path` stands for both methods."""
    found: set[str] = set()
    for row in re.findall(r"^\| (`(?:GET|POST|DELETE)\b.*?) \| ", PAGE, re.MULTILINE):
        methods = []
        for span in re.findall(r"`([^`]+)`", row):
            method, _, path = span.partition(" ")
            methods.append(method)
            if path:
                found |= {f"{each} {path}" for each in methods}
                methods = []
    return found


def test_the_table_of_routes_is_that_of_the_code() -> None:
    expected = {
        f"{method} {route.path.replace('{model:path}', '{id}')}"
        for route in ROUTES
        for method in route.methods or ()
        if method != "HEAD" or "GET" not in (route.methods or ())  # Starlette adds HEAD to every GET
    }
    assert routes_on_the_page() == expected


def part_of_the_page(begin: str, end: str) -> str:
    return PAGE.partition(begin)[2].partition(end)[0]


@pytest.mark.parametrize(
    ("names", "begin", "end"),
    [
        pytest.param(SAMPLING, "\n## Fields\n", "\nRefused by name", id="sampling"),
        pytest.param(REFUSED, "\nRefused by name", "\n\n", id="refused"),
        pytest.param(STRUCTURE, "\n### Structured output\n", "\n### ", id="structure"),
    ],
)
def test_every_field_is_where_the_page_lists_its_kind(names: Iterable[str], begin: str, end: str) -> None:
    listed = part_of_the_page(begin, end)
    assert [name for name in names if re.search(rf"`{re.escape(name)}[`:]", listed) is None] == []
