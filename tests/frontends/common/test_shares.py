"""Whose share of the engine a request uses: the client's address, then whom it names."""

from __future__ import annotations

from typing import Any

import pytest

from frontends.common.shares import client_of, name_of, share_of


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("127.0.0.2", "127.0.0.2"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("::1", "::1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1:2%eth0", "fe80::"),
        ("testclient", ""),
        ("", ""),
    ],
)
def test_an_address_is_a_client_and_of_ipv6_a_network_of_64_bits(host: str, client: str) -> None:
    assert client_of(host) == client


@pytest.mark.parametrize(
    ("document", "who"),
    [
        ({"user": "alice"}, "alice"),
        ({"user": "alice", "safety_identifier": "s-1"}, "s-1"),
        ({"user": "alice", "prompt_cache_key": "chat-7"}, "alice"),
        ({"prompt_cache_key": "chat-7"}, "chat-7"),
        ({"session_id": "chat-8", "prompt_cache_key": "chat-7"}, "chat-8"),
        ({"metadata": {"user_id": "u-9"}}, "u-9"),
        ({"user": 7, "metadata": {"user_id": None}}, "header"),
        ({}, "header"),
    ],
)
def test_a_person_goes_before_a_session_and_both_before_the_header(document: dict[str, Any], who: str) -> None:
    assert share_of(("10.1.2.3", 5), document, "header") == ("10.1.2.3", name_of(who))


def test_without_address_and_user_both_names_are_empty() -> None:
    assert share_of(None, {}) == ("", "")


def test_what_a_client_calls_a_user_is_sent_as_a_short_digest() -> None:
    assert len(name_of("x" * 100_000)) == len(name_of("\ud800")) == 16
    assert name_of("alice") != name_of("bob")
