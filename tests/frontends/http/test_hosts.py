"""Host names and origins over HTTP: a page whose name resolves to this machine is refused, before any route."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from pathlib import Path

import pytest

from frontends.common.auth import digest_of, entry, read_keys
from tests.frontends.http.builders import House, house

EVIL = {"host": "evil.example", "origin": "http://evil.example"}


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/", "/metrics", "/nowhere"])
def test_without_keys_a_rebound_name_is_refused_on_every_path(served: House, path: str) -> None:
    for headers in (EVIL, {"host": "evil.example:8000"}):
        response = served.http.get(path, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
        assert "http.allowed_hosts" in response.json()["error"]["message"]


def with_two_hosts(built: House, method: str, path: str, second: str = "evil.example") -> tuple[int, str]:
    """Return the status and code of the answer to a request with two Host headers."""
    connection = http.client.HTTPConnection("127.0.0.1", built.http.base_url.port or 0, timeout=60)
    with contextlib.closing(connection):
        connection.putrequest(method, path, skip_host=True)
        for name, value in (("Host", "127.0.0.1"), ("Host", second), ("Content-Length", "0")):
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())["error"]["code"]


@pytest.mark.parametrize("second", ["127.0.0.1", "evil.example"])
def test_two_host_headers_are_a_bad_request(served: House, second: str) -> None:
    for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
        assert with_two_hosts(served, method, path, second) == (400, "invalid_request")


@pytest.mark.parametrize(("version", "status"), [(b"1.1", b"400"), (b"1.0", b"200")])
def test_a_host_header_is_required_since_http_1_1(served: House, version: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.http.base_url.port or 0), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/%b\r\nConnection: close\r\n\r\n" % version)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.split()[1] == status
    assert (b'"param":"Host"' in answer) is (status == b"400")


def test_a_page_of_another_origin_may_not_even_ask(served: House) -> None:
    """Without a content type a browser sends the request without a preflight: it would run."""
    body = b'{"prompt": "x"}'
    response = served.http.post("/v1/completions", content=body, headers={"origin": "http://evil.example"})
    assert response.status_code == 403
    assert not served.engine.submits


def test_refusals_are_counted(served: House) -> None:
    served.http.get("/health", headers=EVIL)
    lines = served.http.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith('inferengine_http_refused_connections_total{reason="host"}')]
    assert float(line.split()[1]) >= 1


def test_listed_names_are_served() -> None:
    with house(http={"allowed_hosts": "chat.internal"}) as built:
        assert built.http.get("/v1/models", headers={"host": "chat.internal"}).status_code == 200
        assert built.http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


def test_with_keys_the_name_is_free(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("alice", "secret"))
    assert digest_of("secret").hex() in file.read_text()
    assert read_keys(str(file)).required
    with house(running=False, auth={"keys_file": str(file)}) as built:
        assert built.http.get("/ping", headers=EVIL).status_code == 200
        assert built.http.get("/v1/models", headers=EVIL).status_code == 401
        assert with_two_hosts(built, "GET", "/ping") == (400, "invalid_request")
