"""Keys at the door of the HTTP front end: who comes in, as whom, and what each may do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import frontends.http
from frontends.common.auth import KeyRing, check_protection, entry, new_key
from frontends.http.app import ROUTES
from frontends.http.middleware import is_open
from inferengine.errors import ConfigError
from inferengine.wire.messages import DRAINING
from tests.frontends.http.builders import HEADERS, House, house, ids, says, wait_until
from tests.frontends.scripted_engine import Script

ADMIN, ALICE, BOB = new_key(), new_key(), new_key()
OPEN = ["/", "/health", "/ready", "/ping", "/docs", "/redoc", "/docs/swagger_page.js"]
CLOSED = [route for route in ROUTES if not is_open(route.path)]


class Guarded:
    """A house whose door asks for keys."""

    def __init__(self, built: House) -> None:
        self.house = built

    def ask(self, method: str, path: str, key: str | None = ALICE, **arguments: Any) -> httpx.Response:
        headers = {**HEADERS, **({} if key is None else {"authorization": f"Bearer {key}"})}
        return self.house.http.request(method, path, headers={**headers, **arguments.pop("headers", {})}, **arguments)

    def complete(self, key: str | None = ALICE, **body: Any) -> httpx.Response:
        return self.ask("POST", "/v1/completions", key, content=json.dumps({"prompt": "say", **body}))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(
        "\n".join(
            [
                entry("root", ADMIN, admin=True),
                entry("alice", ALICE, tenant="team-a", priority=4, max_in_flight=2),
                entry("bob", BOB, requests_per_minute=3, models=["another"]),
            ]
        )
    )
    sections = {"auth": {"keys_file": str(file)}, "http": {"cors_origins": "https://page.example"}}
    with house(running=False, **sections) as built:
        built.engine.start()
        wait_until(lambda: built.http.get("/ready").status_code == 200)
        yield Guarded(built)


@pytest.mark.parametrize("path", OPEN)
def test_health_and_pages_need_no_key(guarded: Guarded, path: str) -> None:
    assert guarded.ask("GET", path, None).status_code == 200


@pytest.mark.parametrize("route", CLOSED, ids=lambda route: route.path)
def test_every_other_route_does(guarded: Guarded, route: Any) -> None:
    path = route.path.replace("{model:path}", "x").replace("{id}", "0" * 32).replace("{item}", "x")
    for method in route.methods - {"HEAD"}:
        for key in (None, new_key()):
            answer = guarded.ask(method, path, key, content=b"{}" if method == "POST" else None)
            error = answer.json()["error"]
            assert answer.status_code == 401
            if path.startswith("/api/"):
                assert "key" in error
            elif path.startswith("/v1/messages"):
                assert error["type"] == "authentication_error"
            else:
                assert error["code"] == "unauthorized"
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("headers", [{"host": "x/health"}, {"x-original-url": "/health"}, {"host": "a?/ping"}])
def test_the_path_alone_decides(guarded: Guarded, headers: dict[str, str]) -> None:
    assert guarded.ask("GET", "/v1/models", None, headers=headers).status_code in (400, 401)


def test_the_header_of_other_sdks_works(guarded: Guarded) -> None:
    assert guarded.ask("GET", "/v1/models", None, headers={"x-api-key": ALICE}).status_code == 200


def test_a_request_is_its_keys_tenant_s(guarded: Guarded) -> None:
    guarded.house.script = says("fox")
    guarded.house.engine.submits.clear()
    for key, wanted in ((ALICE, -7), (ALICE, 3), (ADMIN, 0)):
        assert guarded.complete(key, priority=wanted, cache_salt="mine").status_code == 200
    alice, later, root = guarded.house.engine.submits
    assert (alice.tenant, alice.priority, later.priority, root.tenant) == ("team-a", 4, 7, "root")
    assert alice.salt == later.salt != root.salt
    assert alice.salt.endswith(b"mine")


def test_a_key_for_other_models_may_not_use_this_one(guarded: Guarded) -> None:
    answer = guarded.complete(BOB)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


def test_a_key_sees_the_models_that_it_may_use(guarded: Guarded) -> None:
    (served,) = guarded.ask("GET", "/v1/models").json()["data"]
    assert guarded.ask("GET", "/v1/models", BOB).json()["data"] == []
    assert guarded.ask("GET", "/v1/models", BOB, headers={"anthropic-version": "2023-06-01"}).json()["data"] == []
    answers = [guarded.ask("GET", f"/v1/models/{served['id']}", key) for key in (ALICE, BOB)]
    assert [answer.status_code for answer in answers] == [200, 404]


def test_requests_beyond_the_keys_limit_in_flight_are_refused(guarded: Guarded) -> None:
    guarded.house.script = lambda submit, choice: Script(ids("fox " * 60), pause_s=0.01)
    waiting = [threading.Thread(target=guarded.complete, kwargs={"max_tokens": 200}) for _ in range(2)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: guarded.house.engine.num_running == 2)
    answer = guarded.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limited")
    assert answer.headers["retry-after"] == "1"
    for thread in waiting:
        thread.join()
    guarded.house.script = says("fox")
    assert guarded.complete().status_code == 200


def test_requests_beyond_the_keys_limit_per_minute_are_refused_with_retry_after(guarded: Guarded) -> None:
    answers = [guarded.ask("POST", "/tokenize", BOB, content=b'{"prompt": "x"}') for _ in range(5)]
    assert answers[-1].status_code == 429
    assert int(answers[-1].headers["retry-after"]) >= 1


def test_a_page_of_another_origin_learns_why_it_was_refused(guarded: Guarded) -> None:
    origin = {"origin": "https://page.example"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert guarded.ask("OPTIONS", "/v1/completions", None, headers=asked).status_code == 200
    refused = guarded.ask("GET", "/v1/models", None, headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.example"


def test_operators_act_on_the_engine(guarded: Guarded) -> None:
    engine = guarded.house.engine
    engine.admin = {"drain": {"active_requests": 0}, "resume": {"state": "READY"}}
    engine.admin |= {"cancel_all": {"requests": 2}, "flush": {"blocks": 7}}
    for path, result in (
        ("/pause", {"active_requests": 0}),
        ("/resume", {"state": "READY"}),
        ("/abort_requests", {"requests": 2}),
        ("/reset_prefix_cache", {"blocks": 7}),
    ):
        assert guarded.ask("POST", path, ALICE).json()["error"]["code"] == "forbidden"
        answer = guarded.ask("POST", path, ADMIN)
        assert (answer.status_code, answer.json()["engines"]) == (200, {"scripted": result})
    assert guarded.ask("GET", "/is_paused", ADMIN).json() == {"is_paused": False}


def test_operators_record_a_profile(guarded: Guarded) -> None:
    guarded.house.engine.admin = {"profile": {"steps": 7, "seconds": 0.1, "trace": b"a trace"}}
    assert guarded.ask("POST", "/profile?steps=7", ALICE).json()["error"]["code"] == "forbidden"
    answer = guarded.ask("POST", "/profile?steps=7&wait_s=2.5", ADMIN)
    assert (answer.status_code, answer.content, answer.headers["x-steps"]) == (200, b"a trace", "7")
    assert answer.headers["content-type"] == "application/gzip"
    assert "trace.json.gz" in answer.headers["content-disposition"]


@pytest.mark.parametrize(
    ("path", "field"),
    [("/profile?steps=many", "steps"), ("/profile?engine=other", "engine"), ("/pause?wait=1", "wait")],
)
def test_a_bad_query_of_an_operator_is_refused_by_name(guarded: Guarded, path: str, field: str) -> None:
    answer = guarded.ask("POST", path, ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("path", ["/pause", "/profile?steps=7"])
def test_an_engine_that_refuses_names_no_field_of_the_wire(guarded: Guarded, path: str) -> None:
    guarded.house.engine.admin = {}  # it knows no operation
    error = guarded.ask("POST", path, ADMIN).json()["error"]
    assert (error["code"], error["param"], error["message"]) == ("not_found", None, "no such op")


def test_without_keys_operators_routes_are_closed(served: House) -> None:
    answer = served.http.post("/abort_requests")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


def test_keys_are_read_again_while_others_are_served(tmp_path: Path) -> None:
    """By an operator's word at once; a file that cannot be used is told to him, and changes nothing."""
    file, carol = tmp_path / "keys.toml", new_key()
    root = entry("root", ADMIN, admin=True)
    file.write_text("\n".join([root, entry("alice", ALICE)]))
    with house(running=False, auth={"keys_file": str(file)}) as built:
        guarded = Guarded(built)
        built.engine.start()
        wait_until(lambda: built.http.get("/ready").status_code == 200)
        file.write_text("\n".join([root, entry("carol", carol, max_in_flight=1)]))
        assert guarded.ask("POST", "/reload_keys", ADMIN).json() == {"status": "read", "keys": 2}
        assert guarded.complete(carol).status_code == 200
        assert guarded.complete(ALICE).status_code == 401
        file.write_text("[[key]]")
        answer = guarded.ask("POST", "/reload_keys", ADMIN)
        assert (answer.status_code, "name is required" in answer.json()["error"]["message"]) == (400, True)
        assert guarded.complete(carol).status_code == 200
        told = guarded.ask("GET", "/stats", ADMIN).json()["http"]["keys"]
        assert (told["count"], "name is required" in told["complaint"]) == (2, True)


def test_a_public_address_without_keys_is_refused() -> None:
    class Listener:
        def getsockname(self) -> tuple[str, int]:
            return ("0.0.0.0", 8000)

    listener: Any = Listener()
    with pytest.raises(ConfigError, match=r"auth\.keys_file"):
        check_protection("http", [listener], KeyRing(), allow_public=False)
    check_protection("http", [listener], KeyRing(), allow_public=True)
    check_protection("http", [listener], KeyRing(required=True), allow_public=False)


def test_a_paused_engine_is_shown_so(guarded: Guarded, tmp_path: Path) -> None:
    guarded.house.engine.kill()
    guarded.house.engine.state = DRAINING
    guarded.house.engine.start()
    wait_until(lambda: guarded.ask("GET", "/is_paused", ADMIN).json() == {"is_paused": True})


def test_no_route_goes_around_the_keys() -> None:
    """A generation is given to what `engines_for` chooses, which knows tenant, priority and models of the key."""
    folder = Path(frontends.http.__file__).parent
    for path in folder.glob("*.py"):
        assert "Generation(service.engines," not in path.read_text(), path.name


def test_adapters_come_and_go_by_name_alone(guarded: Guarded) -> None:
    guarded.house.engine.admin |= {"load_adapter": {"adapters": ["x"]}, "unload_adapter": {"running_requests": 1}}
    for path, result in (("load", {"adapters": ["x"]}), ("unload", {"running_requests": 1})):
        answer = guarded.ask("POST", f"/v1/{path}_lora_adapter", ADMIN, content=b'{"lora_name": "x"}')
        assert answer.json()["engines"] == {"scripted": result}
    for body, field in ((b"{}", "lora_name"), (b'{"lora_name": "x", "lora_path": "/etc"}', "lora_path")):
        answer = guarded.ask("POST", "/v1/load_lora_adapter", ADMIN, content=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
