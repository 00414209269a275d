"""/docs and /redoc show every route, in a browser that reaches nothing but the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from frontends.common.auth import entry, new_key
from tests.frontends.http.builders import House, house

pytestmark = pytest.mark.browser
KEY = new_key()
REDOC_LOGO = "https://cdn.redoc.ly/redoc/logo-mini.svg"  # the policy keeps the browser from asking for it


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(entry("alice", KEY))
    with house(auth={"keys_file": str(file)}) as built:
        yield built


def open_page(chromium: Any, house: House, name: str) -> tuple[Any, list[str]]:
    """Return the page with the key typed in, and what its scripts or the browser complain about."""
    page, problems = chromium.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(f"{house.front.url}/{name}")
    page.locator("input[type=password]").fill(KEY)
    page.get_by_role("button", name="Show").click()
    return page, problems


def unexpected(problems: list[str]) -> list[str]:
    """Return the complaints without the 401 that makes the page ask for a key, and without Redoc's logo."""
    return [text for text in problems if "401" not in text and REDOC_LOGO not in text]


def test_swagger_ui_asks_for_the_key_and_tries_a_route_with_it(guarded: House, chromium: Any) -> None:
    page, problems = open_page(chromium, guarded, "docs")
    route = page.locator("#operations-default-post_tokenize")
    route.locator(".opblock-summary").click()
    route.get_by_role("button", name="Execute").click()
    route.locator(".live-responses-table .response-col_status").get_by_text("200").wait_for()
    assert unexpected(problems) == []
    page.close()


def test_redoc_asks_for_the_key_and_shows_the_routes(guarded: House, chromium: Any) -> None:
    page, problems = open_page(chromium, guarded, "redoc")
    page.get_by_text("/v1/chat/completions").first.wait_for(state="attached")
    assert unexpected(problems) == []
    page.close()


def test_only_the_files_of_the_pages_are_served(guarded: House) -> None:
    for name in ("manifest.json", "..%2f..%2fapp.py", "nothing.js"):
        assert guarded.http.get(f"/docs/{name}").status_code == 404
    kept = guarded.http.get("/docs/redoc.standalone.js?2.5.4")
    assert "immutable" in kept.headers["cache-control"]
    assert kept.headers["content-type"].startswith("text/javascript")
