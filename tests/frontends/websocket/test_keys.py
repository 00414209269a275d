"""Keys at the door of the websocket: in a header or a subprotocol, once for all requests of the socket."""

from __future__ import annotations

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from frontends.common.auth import entry, new_key
from frontends.websocket.app import SOCKET_PATH
from frontends.websocket.channel import JSON_SUBPROTOCOL
from tests.engine.builders import address_of, check_idle, run_service
from tests.frontends.websocket.builders import Socket, open_socket, serving, wait_until

ALICE, BOB = new_key(), new_key()


@pytest.fixture(scope="module")
def engine():
    with run_service(step_s=0.004) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(
        entry("alice", ALICE, tenant="team-a", max_in_flight=2, priority=1) + entry("bob", BOB, models=["another"])
    )
    sections = {"auth": {"keys_file": str(file)}, "ws": {"max_sockets": 4}}
    with serving(address_of(engine), **sections) as server:
        wait_until(lambda: server.front_end.engine_state.state == "READY")
        yield server


def by_header(server, key):
    return open_socket(server, additional_headers={"Authorization": f"Bearer {key}"})


def refused(server, **options):
    with pytest.raises(InvalidStatus) as refusal, connect(f"ws://127.0.0.1:{server.port}{SOCKET_PATH}", **options):
        pass
    return refusal.value.response.status_code


def test_a_key_in_a_header_opens_the_socket(engine, server):
    with by_header(server, ALICE) as client:
        client.generate("a", params={"max_tokens": 3})
        assert client.read("a")["a"].done[0]["finish_reason"] == "length"
    assert "team-a" in {submission.tenant for submission in engine.io.publisher.submissions.values()}


def test_a_browser_s_key_is_a_subprotocol_that_is_not_returned(server):
    protocols = [JSON_SUBPROTOCOL, f"inferengine.key.{ALICE}"]
    with connect(f"ws://127.0.0.1:{server.port}{SOCKET_PATH}", subprotocols=protocols) as connection:
        assert connection.subprotocol == JSON_SUBPROTOCOL
        assert Socket(connection, binary=False).hello["type"] == "hello"


@pytest.mark.parametrize("headers", [{}, {"Authorization": f"Bearer {new_key()}"}, {"Authorization": ALICE}])
def test_without_a_known_key_the_handshake_is_refused(server, headers):
    assert refused(server, additional_headers=headers) == 401


def test_health_and_the_page_need_no_key(server):
    for path in ("/health", "/ready", "/"):
        assert httpx.get(server.url + path).status_code == 200


def test_a_key_s_open_requests_are_limited_over_its_sockets(engine, server):
    with by_header(server, ALICE) as first, by_header(server, ALICE) as second:
        for client, name in ((first, "a"), (second, "b")):
            client.generate(name, params={"max_tokens": 500, "ignore_eos": True})
            client.until("accepted")
        first.generate("c")
        assert first.until("error", id="c")["error"]["code"] == "rate_limited"
        second.send(type="cancel", id="b")
        second.until("done", id="b")
        first.generate("d", params={"max_tokens": 2})
        assert first.until("done", "error", id="d")["type"] == "done"
    check_idle(engine)


def test_a_model_that_the_key_may_not_use_is_refused(server):
    with by_header(server, BOB) as client:
        client.generate("a")
        assert client.until("error")["error"]["code"] == "forbidden"


def test_another_tenant_s_request_is_not_found(engine, server):
    with by_header(server, ALICE) as alice, by_header(server, BOB) as bob:
        alice.generate("a", detached=True, params={"max_tokens": 100, "ignore_eos": True})
        request_id = alice.until("accepted")["request_id"]
        bob.send(type="resume", id="b", request_id=request_id)
        assert bob.until("error", "accepted")["error"]["code"] == "not_found"
        assert alice.until("done")["finish_reason"] == "length", "whoever may not read it may not end it either"
    with by_header(server, ALICE) as alice:
        alice.send(type="resume", id="again", request_id=request_id)
        assert alice.until("done", "error")["type"] == "done"


def test_sockets_are_limited(server):
    with by_header(server, ALICE), by_header(server, ALICE), by_header(server, ALICE), by_header(server, ALICE):
        assert refused(server, additional_headers={"Authorization": f"Bearer {ALICE}"}) == 503
    wait_until(lambda: not server.front_end._socket.connections)
