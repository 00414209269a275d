"""Which host names and origins a front end answers to while it asks nobody for a key."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from frontends.common.auth import AllowedHosts, public_ports, read_names, read_origins
from inferengine.errors import ConfigError, InferEngineError

LOOPBACK = ("127.0.0.1", 8000)


def hosts(names: str = "", origins: tuple[str, ...] = (), public: tuple[int, ...] = ()) -> AllowedHosts:
    return AllowedHosts("http", read_names("http", names), origins, public)


def refusal(
    allowed: AllowedHosts, host: str | None, origin: str | None = None, server: Any = LOOPBACK
) -> InferEngineError | None:
    headers = [(b"host", host.encode())] if host is not None else []
    headers += [(b"origin", origin.encode())] if origin is not None else []
    try:
        allowed.check({"type": "http", "server": server, "headers": headers})
    except InferEngineError as error:
        return error
    return None


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8000", "127.9.9.9:1", "[::1]:8000", "[::1]", "localhost", "LocalHost:8000", "localhost.",
     "app.localhost:8000", "0.0.0.0:8000", "[::]:8000", None],
)  # fmt: skip
def test_this_machine_s_own_names_are_answered(host: str | None) -> None:
    assert refusal(hosts(), host) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost",
     "10.0.0.1", "[fe80::1]", "", "127.0.0.1:8000@evil.example", "127.0.0.1/evil.example", "evil.example:127.0.0.1",
     "[::1", "[::1]evil.example", "2130706433"],
)  # fmt: skip
def test_a_page_s_own_name_that_resolves_to_this_machine_is_refused(host: str) -> None:
    error = refusal(hosts(), host)
    assert error is not None
    assert (error.code, error.http_status) == ("forbidden", 403)
    assert "http.allowed_hosts" in error.message


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://127.0.0.1:8001", True),
        ("http://localhost:3000", True),
        ("http://[::1]:3000", True),
        ("http://0.0.0.0:3000", True),
        ("https://page.example", True),
        ("https://PAGE.example/", True),
        ("http://evil.example", False),
        ("http://127.0.0.1.evil.example", False),
        ("null", False),
        ("file://", False),
        ("http://[::1", False),
    ],
)
def test_pages_of_other_origins_are_refused_unless_listed(origin: str, allowed: bool) -> None:
    error = refusal(hosts(origins=("https://page.example",)), "127.0.0.1:8000", origin)
    assert (error is None) is allowed
    if error is not None:
        assert "http.cors_origins" in error.message


def test_listed_names_are_answered_and_those_below_a_star() -> None:
    allowed = hosts("chat.internal, *.Example.com")
    for host in ("chat.internal", "CHAT.internal:8000", "a.example.com", "a.b.example.com", "localhost"):
        assert refusal(allowed, host) is None
    for host in ("example.com", "notexample.com", "other.internal"):
        assert refusal(allowed, host) is not None


def test_a_listed_origin_s_host_is_a_name_of_the_server_too() -> None:
    assert refusal(hosts(origins=("https://chat.example",)), "chat.example", "https://chat.example") is None


@pytest.mark.parametrize(
    ("listed", "as_sent"),
    [
        ("https://Chat.Example/", "https://chat.example"),
        ("http://chat.example:3000, https://b.example", "http://chat.example:3000"),
        ("https://chat.example:443", "https://chat.example"),
        ("http://chat.example:80", "http://chat.example"),
        ("http://[::2]:3000", "http://[::2]:3000"),
        ("tauri://app.example", "tauri://app.example"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_an_origin_is_listed_as_browsers_send_it(listed: str, as_sent: str) -> None:
    assert as_sent in read_origins("http.cors_origins", listed)


@pytest.mark.parametrize(
    "text", ["chat.example", "https://chat.example/page", "https://*.example", '["https://chat.example"]', "https://"]
)
def test_what_is_no_origin_is_refused_with_what_to_write(text: str) -> None:
    """It would match no page, whose refusal says to list it."""
    with pytest.raises(ConfigError, match=r"ws.origins: .* is no origin: write https://app.example.com"):
        read_origins("ws.origins", text)


def test_a_star_takes_any_name() -> None:
    assert refusal(hosts("*"), "evil.example", "http://evil.example") is None
    assert refusal(hosts(origins=("*",)), "evil.example", "http://evil.example") is None


def test_every_host_header_counts() -> None:
    scope = {"server": LOOPBACK, "headers": [(b"host", b"localhost"), (b"host", b"evil.example")]}
    with pytest.raises(InferEngineError):
        hosts().check(scope)


@pytest.mark.parametrize("server", [("/run/inferengine.sock", None), None, ("testserver", 80)])
def test_where_no_page_can_connect_any_name_will_do(server: Any) -> None:
    assert refusal(hosts(), "evil.example", server=server) is None


def test_an_address_that_others_reach_answers_to_any_name_until_some_are_listed() -> None:
    for server in (("127.0.0.1", 8000), ("10.0.0.5", 8000)):
        assert refusal(hosts(public=(8000,)), "gateway.example", server=server) is None
        listed = hosts("api.example", public=(8000,))
        assert refusal(listed, "gateway.example", server=server) is not None
        for host in ("api.example", "10.0.0.5:8000", "localhost"):
            assert refusal(listed, host, server=server) is None


def test_listeners_on_every_address_are_public() -> None:
    with socket.create_server(("0.0.0.0", 0)) as public, socket.create_server(("127.0.0.1", 0)) as local:
        assert public_ports([public, local]) == [public.getsockname()[1]]


@pytest.mark.parametrize("text", ["http://a.example", "a.example:80", "a b", "a/b", "*.*"])
def test_what_is_no_host_name_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.allowed_hosts"):
        read_names("http", text)
