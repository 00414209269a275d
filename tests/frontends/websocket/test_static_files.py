"""The chat page as files over HTTP, and who may open the socket from a browser."""

from __future__ import annotations

import re
import socket

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from frontends.common.auth import read_names, read_origins
from frontends.websocket.app import CLIENT, FOLDER
from frontends.websocket.connection import may_connect
from frontends.websocket.frames import GenerateFrame
from tests.frontends.websocket.builders import make_engine, open_socket, serving

OWN = [path for path in sorted(FOLDER.rglob("*")) if path.is_file() and FOLDER / "vendor" not in path.parents]
VENDORED = [path for path in sorted((FOLDER / "vendor").rglob("*")) if path.is_file()]
SERVED = OWN + [path for path in VENDORED if path.suffix not in (".md", ".json")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with make_engine(tmp_path_factory.mktemp("engine")) as engine, serving(engine) as server:
        yield server


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url) as client:
        yield client


def test_the_page_is_at_the_root_and_runs_only_its_own_scripts(http):
    answer = http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.name)
def test_every_file_is_served_unchanged(http, path):
    answer = http.get(f"/{path.relative_to(FOLDER).as_posix()}")
    assert answer.content == path.read_bytes()
    assert answer.headers.get("content-encoding") == (None if path.suffix == ".woff2" else "gzip")


@pytest.mark.parametrize("path", CLIENT, ids=lambda path: path.name)
def test_the_client_of_the_npm_package_is_served_beside_the_page(http, path):
    assert http.get(f"/{path.name}").content == path.read_bytes()
    assert http.get("/package.json").status_code == 404


def test_a_current_copy_gets_304(http):
    first = http.get("/chat.js")
    again = http.get("/chat.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/nothing.js", "/..%2fserver.py", "/%2e%2e/server.py", "/static/chat.js", "/.env", "/katex.min.js"]
)
def test_nothing_else_is_served(http, path):
    assert http.get(path).status_code == 404


def test_the_page_loads_nothing_from_other_servers():
    for path in [*OWN, *CLIENT]:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        for line in text.splitlines():
            assert "//" not in line.replace("://127.0.0.1", "") or not any(
                mark in line for mark in ('src="http', 'href="http', "url(http", "@import", 'from "http')
            )


def test_scripts_do_not_assign_html():
    scripts = "".join(path.read_text() for path in [*OWN, *CLIENT] if path.suffix == ".js")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser"):
        assert way not in scripts


def test_health_and_readiness_report_the_engines_state(http):
    assert http.get("/health").json()["status"] == "ok"
    assert http.get("/ready").json() == {"ready": True, "engine": "READY"}


def test_not_ready_without_an_engine(tmp_path):
    with serving(f"ipc://{tmp_path}/nobody.sock") as server:
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_socket_of_another_site_is_refused_with_the_remedy(server):
    url = f"ws://127.0.0.1:{server.port}/v1/ws"
    with pytest.raises(InvalidStatus) as refused, connect(url, origin="https://evil.example"):
        pass
    assert refused.value.response.status_code == 403
    assert b"ws.origins" in refused.value.response.body


def test_a_page_can_ask_why_its_socket_is_refused(server):
    """A browser hides the answer to a refused handshake from the page."""
    answers = [
        httpx.post(f"{server.url}/v1/ws", headers={"origin": origin})
        for origin in (server.url, "http://127.0.0.1:1", "http://127.0.0.1:1'<script>")
    ]
    assert [answer.status_code for answer in answers] == [200, 403, 403]
    assert [answer.json()["may_connect"] for answer in answers] == [True, False, False]
    assert "--ws.origins http://127.0.0.1:1 " in answers[1].json()["reason"]
    assert "script" not in answers[2].text


def test_the_servers_own_page_and_programs_may_connect(server):
    for origin in (f"http://127.0.0.1:{server.port}", None):
        with open_socket(server, origin=origin) as client:
            assert client.hello["type"] == "hello"


def test_an_unknown_subprotocol_is_refused(server):
    url = f"ws://127.0.0.1:{server.port}/v1/ws"
    with pytest.raises(InvalidStatus) as refused, connect(url, subprotocols=["graphql-ws"]):
        pass
    assert refused.value.response.status_code == 400


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        (None, "anything", True),
        ("http://localhost:8001", "localhost:8001", True),
        ("http://[::1]:8001", "[::1]:8001", True),
        ("https://192.168.1.7", "192.168.1.7", True),
        ("https://chat.example", "127.0.0.1:8001", True),
        ("http://localhost:9999", "localhost:8001", False),
        ("http://rebound.example:8001", "rebound.example:8001", False),
        ("http://localhost.evil.example:8001", "localhost.evil.example:8001", False),
        ("null", "localhost:8001", False),
        ("file://", "", False),
        ("http://[::1", "[::1", False),
        ("", "", False),
    ],
)
def test_a_page_may_connect_from_its_own_host_or_a_listed_origin(origin, host, allowed):
    assert may_connect(origin, host, read_origins("ws.origins", "https://chat.example/, ")) is allowed


def test_a_star_allows_every_origin():
    assert may_connect("https://evil.example", "127.0.0.1:8001", read_origins("ws.origins", "*"))


@pytest.mark.parametrize(
    ("names", "host", "allowed"),
    [
        ("chat.example", "chat.example:8001", True),
        ("*.example", "chat.example:8001", True),
        ("*", "chat.example", True),
        ("*.example", "example", False),
        ("other.example", "chat.example", False),
    ],
)
def test_the_servers_own_page_under_a_listed_name_may_connect(names, host, allowed):
    listed = read_names("ws", names)
    assert may_connect(f"http://{host}", host, (), listed) is allowed
    assert not may_connect("http://evil.test", host, (), listed)


@pytest.mark.parametrize("path", ["/", "/stats", "/metrics", "/health"])
def test_without_keys_a_rebound_name_is_refused(server, path):
    answer = httpx.get(f"http://127.0.0.1:{server.port}{path}", headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert "ws.allowed_hosts" in answer.json()["error"]["message"]


def test_a_browser_under_a_rebound_name_is_shown_what_to_do(server):
    headers = {"host": "chat.example:8001", "accept": "text/html,application/xhtml+xml"}
    answer = httpx.get(server.url, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (403, "text/html; charset=utf-8")
    assert "--ws.allowed_hosts chat.example" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_a_program_s_handshake_under_a_rebound_name_is_refused(server):
    connection = socket.create_connection(("127.0.0.1", server.port))
    with pytest.raises(InvalidStatus) as refused, connect("ws://evil.example/v1/ws", sock=connection):
        pass
    assert refused.value.response.status_code == 403
    assert b"ws.allowed_hosts" in refused.value.response.body


def test_the_browser_client_sends_each_option_under_its_key():
    source = CLIENT[0].read_text(encoding="utf-8")
    keys = dict(
        re.findall(r'^  (\w+): "(\w+)",$', source.partition("const FRAME_KEYS = {")[2].partition("};")[0], re.M)
    )
    several_words = {name for name in GenerateFrame.__struct_fields__ if "_" in name}
    assert set(keys.values()) == several_words - {"request_id"}  # an argument of its own
    for option, key in keys.items():
        assert option == "deadlineSeconds" or re.sub("[A-Z]", lambda upper: "_" + upper[0].lower(), option) == key
