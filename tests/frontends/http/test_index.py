"""GET /: what whoever opens the port finds."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from frontends.http.app import ROUTES
from frontends.http.middleware import TrustedProxies
from frontends.http.routes.pages import chat_address
from inferengine.config import Config
from inferengine.errors import ConfigError
from tests.frontends.http.builders import House, house


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


def proxied(house: House, proto: str) -> str:
    headers = {"accept": "text/html", "host": "llm.localhost", "x-forwarded-proto": proto}
    (address,) = re.findall("curl (http[^ ]*)/v1", house.http.get("/", headers=headers).text)
    return str(address)


@pytest.mark.parametrize(
    ("proto", "address"),
    [
        ("https", "https://llm.localhost"),
        ("HTTPS, http", "https://llm.localhost"),
        ("http", "http://llm.localhost"),
        ("ftp", "http://llm.localhost"),
        ("", "http://llm.localhost"),
    ],
)
def test_a_proxy_of_this_machine_says_what_the_client_speaks(served: House, proto: str, address: str) -> None:
    assert proxied(served, proto) == address


@pytest.mark.parametrize(
    ("listed", "scheme"),
    [("", "http"), ("10.0.0.0/8,unix", "http"), ("127.0.0.1", "https"), ("::/0,0.0.0.0/0", "https")],
)
def test_other_proxies_are_not_believed(listed: str, scheme: str) -> None:
    with house(http={"trusted_proxies": listed}) as built:
        assert proxied(built, "https") == f"{scheme}://llm.localhost"


@pytest.mark.parametrize("listed", ["10.0.0.1/8", "proxy.internal", "https://10.0.0.1", "10.0.0.1 10.0.0.2"])
def test_what_is_no_address_is_refused_at_the_start(listed: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.trusted_proxies: .*write addresses, networks such as"):
        TrustedProxies(listed)


@pytest.mark.parametrize(
    ("client", "is_trusted"),
    [
        (None, True),
        (("::ffff:127.0.0.9", 1), True),
        (("::1", 1), True),
        (("10.0.0.1", 1), False),
        (("testclient", 1), False),
    ],
)
def test_by_default_only_this_machine_is_trusted(client: tuple[str, int] | None, is_trusted: bool) -> None:
    assert TrustedProxies(Config().http.trusted_proxies).include(client) is is_trusted


def test_behind_a_proxy_the_chat_page_is_not_guessed(served: House) -> None:
    assert served.http.get("/", headers={"x-forwarded-proto": "https"}).json()["chat"] is None


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
