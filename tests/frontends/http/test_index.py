"""GET /: what whoever opens the port finds."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from frontends.http.app import ROUTES
from frontends.http.routes.pages import chat_address
from inferengine.config import Config
from tests.frontends.http.builders import House


def test_a_program_reads_every_route_and_what_it_is_for(served: House) -> None:
    document = served.http.get("/").json()
    listed = {name.split()[1] for name in document["routes"]}
    assert listed == {route.path.replace(":path", "") for route in ROUTES}
    assert all(document["routes"].values())
    assert document["chat"] == "http://127.0.0.1:8001/"


def test_a_browser_gets_a_page_that_runs_no_script_and_only_its_own_style(served: House) -> None:
    response = served.http.get("/", headers={"accept": "text/html,*/*;q=0.8"})
    assert response.headers["content-type"].startswith("text/html")
    assert '<a href="http://127.0.0.1:8001/">' in response.text
    assert '<a href="/v1/models">' in response.text
    assert f"curl {served.front.url}/v1/chat/completions" in response.text
    (style,) = re.findall("<style>(.*?)</style>", response.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = response.headers["content-security-policy"]
    assert f"style-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_a_forged_host_is_not_markup(served: House) -> None:
    headers = {"accept": "text/html", "host": 'a"><script>alert(1)</script>:80"'}
    assert "<script" not in served.http.get("/", headers=headers).text


@pytest.mark.parametrize(
    ("host", "called", "address"),
    [
        ("127.0.0.1", "box:8000", "http://127.0.0.1:8001/"),
        ("::1", "box:8000", "http://[::1]:8001/"),
        ("0.0.0.0", "box.example:8000", "http://box.example:8001/"),
        ("0.0.0.0", "[fe80::1]:8000", "http://[fe80::1]:8001/"),
        ("0.0.0.0", "<b>", "http://127.0.0.1:8001/"),
    ],
)
def test_the_chat_page_is_where_the_client_can_reach_it(host: str, called: str, address: str) -> None:
    assert chat_address(Config().with_values(ws={"host": host}), called) == address


def test_a_chat_page_on_any_free_port_is_not_guessed() -> None:
    assert chat_address(Config().with_values(ws={"port": 0}), "box") is None
