"""Clients without API keys share the engine by address, and within an address by the users that they name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from frontends.common.auth import entry, new_key
from frontends.common.shares import name_of
from tests.engine.builders import small_capacity
from tests.frontends.http.builders import HEADERS, House, house, says
from tests.frontends.http.test_engine import serve_held, wait_until

OTHER = "127.0.0.2"


def client_at(address: str, url: str) -> httpx.Client:
    """Return a client that connects from this address of the machine."""
    limits = httpx.Limits(max_connections=64)
    transport = httpx.HTTPTransport(local_address=address, limits=limits)
    return httpx.Client(base_url=url, timeout=60.0, headers=HEADERS, transport=transport)


@pytest.fixture(scope="module")
def built() -> Iterator[House]:
    with house() as built:
        built.script = says("fox")
        yield built


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "say"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say"}]}),
        ("/v1/responses", {"input": "say"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "say"}], "max_tokens": 3}),
        ("/v1/completions", {"prompt": "say", "detached": True, "stream": True}),
    ],
)
def test_a_request_says_from_which_address_it_comes_and_for_whom(built: House, path: str, body: dict[str, Any]) -> None:
    who = {"metadata": {"user_id": "alice"}} if path == "/v1/messages" else {"user": "alice"}
    with client_at(OTHER, built.front.url) as other:
        for client, address in ((built.http, "127.0.0.1"), (other, OTHER)):
            assert client.post(path, content=json.dumps({**body, **who})).status_code == 200
            assert built.engine.submits[-1].share == (address, name_of("alice"))
            assert client.post(path, content=json.dumps(body)).status_code == 200
            assert built.engine.submits[-1].share == (address, "")
    assert {submit.tenant for submit in built.engine.submits} == {""}


def test_the_session_of_the_header_divides_an_address(built: House) -> None:
    built.http.post("/v1/completions", content=json.dumps({"prompt": "say"}), headers={"x-session-id": "one"})
    assert built.engine.submits[-1].share == ("127.0.0.1", name_of("one"))


def test_a_key_s_tenant_is_divided_by_address_and_user(tmp_path: Any) -> None:
    key = new_key()
    (tmp_path / "keys.toml").write_text(entry("alice", key, tenant="team-a"))
    with house(auth={"keys_file": str(tmp_path / "keys.toml")}, running=False) as guarded:
        guarded.engine.start()
        wait_until(lambda: guarded.http.get("/ready").status_code == 200)
        headers = {"authorization": f"Bearer {key}"}
        body = json.dumps({"prompt": "say", "user": "u"})
        assert guarded.http.post("/v1/completions", content=body, headers=headers).status_code == 200
        submit = guarded.engine.submits[-1]
        assert (submit.tenant, submit.share) == ("team-a", ("127.0.0.1", name_of("u")))


@pytest.mark.parametrize(("loud", "quiet"), [((OTHER, ""), ("127.0.0.1", "")), ((OTHER, "a"), (OTHER, "b"))])
def test_a_quiet_client_is_answered_while_another_has_many_requests_open(
    loud: tuple[str, str], quiet: tuple[str, str]
) -> None:
    """The other's requests would take 20 times 6 steps before it. It takes its turn after one of them at most."""
    with serve_held(small_capacity(max_num_seqs=1)) as (served, device), ThreadPoolExecutor(21) as pool:

        def ask(client: httpx.Client, user: str) -> int:
            body = {"prompt": "the fox", "max_tokens": 6, "ignore_eos": True, "user": user}
            return client.post("/v1/completions", content=json.dumps(body)).status_code

        def num_active() -> int:
            return int(served.http.get("/stats").json()["active_requests"])

        with client_at(loud[0], served.front.url) as many, client_at(quiet[0], served.front.url) as one:
            flood = [pool.submit(ask, many, loud[1]) for _ in range(20)]
            wait_until(lambda: num_active() == 20)
            answer = pool.submit(ask, one, quiet[1])
            wait_until(lambda: num_active() == 21)
            device.let(24)
            assert answer.result(60.0) == 200
            assert not all(future.done() for future in flood)
            device.let()
            assert {future.result(60.0) for future in flood} == {200}
