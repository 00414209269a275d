"""Files and batches: every line ends once, whatever becomes of the front end, and tenants never see each other's."""

from __future__ import annotations

import io
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from frontends.common.auth import entry, new_key
from frontends.http.openai import batch_runner, batch_store
from frontends.http.openai.batch_store import BatchStore
from frontends.http.openapi import ANSWERS
from inferengine.config import Config
from inferengine.wire.messages import Submit
from tests.frontends.http.builders import House, house, ids, says, wait_until
from tests.frontends.http.test_openapi import answer_validator
from tests.frontends.scripted_engine import Script

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "LOOK_S", 0.02)
    monkeypatch.setattr(batch_runner, "HOLD_S", 0.01)
    monkeypatch.setattr(batch_runner, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def client(served: House) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.front.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    body = body or HELLO
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def upload(http: httpx.Client, *lines: str, **headers: str) -> httpx.Response:
    content = "\n".join(lines)
    parts = {"file": ("lines.jsonl", content)}
    with httpx.Client(base_url=http.base_url, headers=headers) as plain:  # without the JSON content type
        return plain.post("/v1/files", data={"purpose": "batch"}, files=parts)


def begin(house: House, *lines: str, **body: Any) -> dict[str, Any]:
    file = upload(house.http, *lines).json()
    response = house.post("/v1/batches", **{"input_file_id": file["id"], "endpoint": CHAT, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def ended(house: House, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(house.http.get(f"/v1/batches/{batch_id}").json())
        return found["status"] in ENDED

    wait_until(has_ended)
    return found


def results(house: House, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(one) for one in house.http.get(f"/v1/files/{file_id}/content").text.splitlines()]


def test_openais_client_runs_a_batch_from_file_to_file(client: openai.OpenAI, served: House) -> None:
    text = "\n".join([line("one"), line("two", **HELLO, max_tokens=4), line("bad", **HELLO, temperature=9), ""])
    file = client.files.create(file=("naïve 1.jsonl", io.BytesIO(text.encode())), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(text.encode()), "naïve 1.jsonl", "batch")
    assert client.files.content(file.id).text == text
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"job": "nightly"}
    )
    done = ended(served, batch.id)
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.metadata) == ("completed", {"job": "nightly"})
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    assert batch.usage is not None
    told = [
        one["body"]["usage"]
        for one in (
            json.loads(text)["response"] for text in client.files.content(batch.output_file_id or "").text.splitlines()
        )
    ]
    assert batch.usage.input_tokens == sum(one["prompt_tokens"] for one in told) > 0
    assert batch.usage.output_tokens == sum(one["completion_tokens"] for one in told) > 0
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    output = [json.loads(one) for one in client.files.content(batch.output_file_id or "").text.splitlines()]
    assert [one["custom_id"] for one in output] == ["one", "two"]
    assert output[0]["response"]["status_code"] == 200
    assert output[0]["response"]["body"]["choices"][0]["message"]["content"] == "the quick brown fox"
    (error,) = results(served, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert done["completed_at"] >= done["in_progress_at"] >= done["created_at"]
    assert batch.id in [one.id for one in client.batches.list(limit=5)]
    listed = [one.id for one in client.files.list(purpose="batch_output")]
    assert {batch.output_file_id, batch.error_file_id} <= set(listed)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "say"}, "text_completion"),
        ("/v1/embeddings", {"input": "say"}, "list"),
        ("/v1/responses", {"input": "hi"}, "response"),
    ],
)
def test_every_endpoint_answers_as_it_does_at_once(served: House, url: str, body: dict[str, Any], kind: str) -> None:
    done = ended(served, begin(served, line("a", url, **body), endpoint=url)["id"])
    assert done["status"] == "completed"
    (output,) = results(served, done["output_file_id"])
    assert output["response"]["body"]["object"] == kind
    assert done["usage"]["total_tokens"] == output["response"]["body"]["usage"]["total_tokens"] > 0


def test_lines_ask_for_the_lowest_priority_and_keep_their_order(served: House) -> None:
    done = ended(served, begin(served, *(line(f"{place}") for place in range(40)))["id"])
    assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert [int(one["custom_id"]) for one in results(served, done["output_file_id"])] == list(range(40))
    assert {submit.priority for submit in served.engine.submits} == {batch_runner.LOWEST_PRIORITY}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid_json_line"),
        ("[]", "invalid_json_line"),
        (json.dumps({"method": "POST", "url": CHAT, "body": HELLO}), "invalid_custom_id"),
        (line("a", "/v1/completions", prompt="say"), "mismatched_url"),
        (line("a").replace("POST", "GET"), "invalid_method"),
        (json.dumps({"custom_id": "b", "method": "POST", "url": CHAT}), "missing_required_parameter"),
        (line("good"), "duplicate_custom_id"),
    ],
)
def test_a_file_with_a_broken_line_runs_nothing_and_says_where(served: House, text: str, code: str) -> None:
    done = ended(served, begin(served, line("good"), text)["id"])
    assert done["status"] == "failed"
    assert [(error["line"], error["code"]) for error in done["errors"]["data"]] == [(2, code)]
    assert not served.engine.submits


def test_what_cannot_be_in_a_batch_fails_alone(served: House) -> None:
    done = ended(served, begin(served, line("streams", **HELLO, stream=True), line("good"))["id"])
    assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    (error,) = results(served, done["error_file_id"])
    assert error["response"]["body"]["error"]["param"] == "stream"


def test_a_refusal_of_the_moment_is_no_result(served: House) -> None:
    asked = []

    def script(submit: Submit, choice: int) -> Script:
        asked.append(submit)
        if len(asked) < 3:
            return Script(ids("x"), reason="error", detail=["overloaded", "full"])
        return Script(ids("the fox"))

    served.script = script
    done = ended(served, begin(served, line("a"))["id"])
    assert (done["request_counts"]["completed"], len(asked)) == (1, 3)


@pytest.mark.parametrize(
    ("url", "body"),
    [(CHAT, HELLO), ("/v1/responses", {"input": "hi"})],
    ids=["choices", "status"],
)
def test_a_line_whose_answer_was_cancelled_has_failed(served: House, url: str, body: dict[str, Any]) -> None:
    """As an operator cancels all requests: the answer is cut."""
    served.script = says("the fox", reason="abort", detail=["cancelled", "An operator cancelled all requests."])
    done = ended(served, begin(served, line("a", url, **body), endpoint=url)["id"])
    assert done["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    (error,) = results(served, done["error_file_id"])
    assert error["response"]["status_code"] == 499
    assert error["response"]["body"]["error"]["code"] == "cancelled"


def test_an_answer_that_repeats_the_word_of_its_request_is_complete(served: House) -> None:
    metadata = {"status": "cancelled", "finish_reason": "abort"}
    asked = line("a", "/v1/responses", input="hi", metadata=metadata)
    done = ended(served, begin(served, asked, endpoint="/v1/responses")["id"])
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def test_results_wait_for_room_on_a_full_disk(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    write, failures = BatchStore._end_line, 25  # more than MAX_STARTS

    def is_full(self: BatchStore, *arguments: Any) -> bool:
        nonlocal failures
        if failures:
            failures -= 1
            raise sqlite3.OperationalError("database or disk is full")
        return write(self, *arguments)

    monkeypatch.setattr(BatchStore, "_end_line", is_full)
    monkeypatch.setattr(batch_runner, "LONGEST_WAIT_S", 0.02)
    done = ended(served, begin(served, line("one"), line("two"))["id"])
    assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert len(served.engine.submits) == 2, "the engine was asked again"


def test_cancelling_keeps_what_was_answered_and_ends_every_line_once(served: House) -> None:
    """The engine answers the first three lines and falls silent."""
    answered: list[Submit] = []

    def script(submit: Submit, choice: int) -> Script:
        answered.append(submit)
        return Script(ids("the fox"), stop_after=None if len(answered) <= 3 else 1)

    served.script = script
    begun = begin(served, *(line(f"{place}") for place in range(80)))
    wait_until(lambda: served.http.get(f"/v1/batches/{begun['id']}").json()["request_counts"]["completed"] == 3)
    assert served.post(f"/v1/batches/{begun['id']}/cancel").json()["status"] == "cancelling"
    done = ended(served, begun["id"])
    assert done["status"] == "cancelled"
    assert done["request_counts"] == {"total": 80, "completed": 3, "failed": 77}
    written = results(served, done["output_file_id"]) + results(served, done["error_file_id"])
    assert sorted(int(one["custom_id"]) for one in written) == list(range(80))
    assert {one["error"]["code"] for one in written if one["error"]} == {"batch_cancelled"}
    assert len(answered) <= served.front.service.config.http.batch_in_flight + 3
    again = served.post(f"/v1/batches/{begun['id']}/cancel").json()
    assert again["status"] == "cancelled"


def test_a_batch_whose_time_is_over_ends_with_what_it_has(served: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(batch_routes_units(), "m", 0.2)
    served.script = says("the fox", stop_after=1)
    done = ended(served, begin(served, line("a"), completion_window="1m")["id"])
    assert (done["status"], done["output_file_id"]) == ("expired", None)
    (error,) = results(served, done["error_file_id"])
    assert (error["response"], error["error"]["code"]) == (None, "batch_expired")


def batch_routes_units() -> dict[str, Any]:
    from frontends.http.openai import batch_routes

    return batch_routes._UNITS


def test_the_next_front_end_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    """The first front end leaves with lines in flight; of the others it has written the results."""
    answered: list[Submit] = []

    def script(submit: Submit, choice: int) -> Script:
        answered.append(submit)
        return Script(ids("the fox"), stop_after=None if len(answered) <= 5 else 1)

    http = {"files_folder": str(tmp_path), "batch_in_flight": 4}
    with house(http=http) as first:
        first.script = script
        begun = begin(first, *(line(f"{place}") for place in range(20)))
        wait_until(lambda: first.http.get(f"/v1/batches/{begun['id']}").json()["request_counts"]["completed"] == 5)
    with house(http=http) as second:
        done = ended(second, begun["id"])
        assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        written = results(second, done["output_file_id"])
        assert [int(one["custom_id"]) for one in written] == list(range(20))
        texts = [one["response"]["body"]["choices"][0]["message"]["content"] for one in written]
        assert texts.count("the fox") == 5
        assert texts.count("the quick brown fox") == len(second.engine.submits) == 15


def test_a_default_folder_that_cannot_be_written_is_told_at_start_and_refuses_nothing_but_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "file"))
    batch_store.check_folder(Config())
    assert "file is no folder. Uploaded files and batches are refused: set http.files_folder" in caplog.text
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "new"))
    caplog.clear()
    batch_store.check_folder(Config())
    assert not caplog.records
    assert not (tmp_path / "new").exists()


def test_only_one_front_end_runs_the_batches_of_a_folder(tmp_path: Path) -> None:
    http = {"files_folder": str(tmp_path)}
    with house(http=http) as first, house(http=http) as second:
        ended(first, begin(first, line("a"))["id"])
        done = ended(second, begin(second, line("b"))["id"])
        assert done["status"] == "completed"
        assert sorted([len(first.engine.submits), len(second.engine.submits)]) == [0, 2]


def test_a_line_waits_while_others_wait_in_the_engine(served: House) -> None:
    runner = served.front.service.batches
    batch = batch_store.OpenBatch("batch_1", "", "", "in_progress", CHAT, 0)
    busy = [served.front.service.engines.health()[0]._replace(status={"waiting_requests": 2})]

    class Busy:
        def health(self) -> list[Any]:
            return busy

    busy_host = type("Host", (), {"engines": Busy(), "keys": runner._host.keys, "quotas": runner._host.quotas})()
    host, runner._host = runner._host, busy_host
    try:
        assert runner._may_begin(batch)  # one goes on in any case
        runner._by_key[""] += 1
        assert not runner._may_begin(batch)
        busy[:] = [busy[0]._replace(status={"waiting_requests": 0})]
        assert runner._may_begin(batch)
    finally:
        runner._host = host
        runner._by_key.clear()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[House, str, str]]:
    alice, bob = new_key(), new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("alice", alice, max_in_flight=2) + "\n" + entry("bob", bob))
    http = {"max_file_bytes": 2048, "max_stored_bytes": 4096, "batch_in_flight": 3}
    with house(running=False, auth={"keys_file": str(keys)}, http=http) as built:
        built.engine.start()
        wait_until(lambda: built.http.get("/ready").status_code == 200)
        yield built, alice, bob


def test_a_tenant_finds_neither_files_nor_batches_of_another(guarded: tuple[House, str, str]) -> None:
    built, alice, bob = guarded
    as_alice, as_bob = ({"authorization": f"Bearer {key}"} for key in (alice, bob))
    file = upload(built.http, line("a"), **as_alice).json()
    body = json.dumps({"input_file_id": file["id"], "endpoint": CHAT})
    assert built.http.post("/v1/batches", content=body, headers=as_bob).status_code == 404
    batch = built.http.post("/v1/batches", content=body, headers=as_alice).json()
    for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", f"/v1/batches/{batch['id']}"):
        assert built.http.get(path).status_code == 401
        assert built.http.get(path, headers=as_bob).status_code == 404
    assert built.http.post(f"/v1/batches/{batch['id']}/cancel", headers=as_bob).status_code == 404
    assert built.http.delete(f"/v1/files/{file['id']}", headers=as_bob).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert built.http.get(path, headers=as_bob).json()["data"] == []
        assert built.http.get(path, headers=as_bob, params={"after": file["id"]}).status_code in (400, 404)
    path = f"/v1/batches/{batch['id']}"
    wait_until(lambda: built.http.get(path, headers=as_alice).json()["status"] == "completed")
    assert built.engine.submits[-1].tenant == "alice"


def test_a_key_at_its_limit_keeps_no_place_from_other_tenants(guarded: tuple[House, str, str]) -> None:
    """Alice may have two requests in flight, and the engine never ends hers."""
    built, alice, bob = guarded
    as_alice, as_bob = ({"authorization": f"Bearer {key}"} for key in (alice, bob))
    built.script = lambda submit, choice: Script(ids("the fox"), stop_after=1 if submit.tenant == "alice" else None)

    def start(headers: dict[str, str]) -> str:
        file = upload(built.http, line("a"), line("b"), **headers).json()
        body = json.dumps({"input_file_id": file["id"], "endpoint": CHAT})
        return str(built.http.post("/v1/batches", content=body, headers=headers).json()["id"])

    for _ in range(3):
        start(as_alice)
    wait_until(lambda: len(built.engine.submits) == 2)
    path = f"/v1/batches/{start(as_bob)}"
    wait_until(lambda: built.http.get(path, headers=as_bob).json()["status"] == "completed")
    assert [submit.tenant for submit in built.engine.submits].count("alice") == 2


def test_lines_count_towards_the_rate_of_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten requests a minute: the upload, the batch and seven lines; the tenth is left to what cannot wait."""
    alice, file = new_key(), tmp_path / "keys.toml"
    file.write_text(entry("alice", alice, requests_per_minute=10))
    headers = {"authorization": f"Bearer {alice}"}
    with house(running=False, auth={"keys_file": str(file)}) as built:
        built.engine.start()
        wait_until(lambda: built.http.get("/ready").status_code == 200)
        uploaded = upload(built.http, *(line(f"{place}") for place in range(9)), **headers).json()
        body = json.dumps({"input_file_id": uploaded["id"], "endpoint": CHAT})
        path = f"/v1/batches/{built.http.post('/v1/batches', content=body, headers=headers).json()['id']}"

        def completed() -> int:
            return int(built.http.get(path, headers=headers).json()["request_counts"]["completed"])

        wait_until(lambda: completed() == 7)
        quotas = built.front.service.quotas
        assert [quotas.rate(key) for key in built.front.service.keys.keys] == [9]
        assert built.http.post(CHAT, content=json.dumps(HELLO), headers=headers).status_code == 200
        assert built.http.post(CHAT, content=json.dumps(HELLO), headers=headers).status_code == 429
        now = quotas._clock()
        monkeypatch.setattr(quotas, "_clock", lambda: now + 61.0)  # a minute later
        wait_until(lambda: completed() == 9)


def test_files_are_bounded_one_by_one_and_together(guarded: tuple[House, str, str]) -> None:
    built, alice, bob = guarded
    as_alice, as_bob = ({"authorization": f"Bearer {key}"} for key in (alice, bob))
    assert upload(built.http, "x" * 2049, **as_alice).status_code == 413
    for _ in range(2):
        assert upload(built.http, "x" * 2000, **as_alice).status_code == 200
    refused = upload(built.http, "x" * 2000, **as_alice)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
    assert len(built.http.get("/v1/files", headers=as_alice).json()["data"]) == 2  # of the refused nothing is left
    assert upload(built.http, "x" * 2000, **as_bob).status_code == 200


@pytest.mark.parametrize(
    ("content_type", "content", "named"),
    [
        ("application/json", b"{}", "Content-Type"),
        ("multipart/form-data", b"", "Content-Type"),
        ("multipart/form-data; boundary=b", b"", "body"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx\r\n--b--", "body"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx', "body"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--',
            "file",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--',
            "purpose",
        ),
    ],
)
def test_a_broken_form_is_refused_by_name(served: House, content_type: str, content: bytes, named: str) -> None:
    before = len(served.http.get("/v1/files").json()["data"])
    response = served.http.post("/v1/files", content=content, headers={"content-type": content_type})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == named
    assert len(served.http.get("/v1/files").json()["data"]) == before


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "25 hours"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"seconds": 1}}, "output_expires_after"),
    ],
)
def test_a_batch_that_cannot_be_made_is_refused_by_name(served: House, body: dict[str, Any], named: str) -> None:
    file = upload(served.http, line("a")).json()
    response = served.post("/v1/batches", **{"input_file_id": file["id"], "endpoint": CHAT, **body})
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"].startswith(named)


def test_pages_follow_each_other(served: House) -> None:
    made = [upload(served.http, line(f"{place}")).json()["id"] for place in range(3)][::-1]
    first = served.http.get("/v1/files", params={"limit": 2}).json()
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (made[:2], True)
    rest = served.http.get("/v1/files", params={"limit": 1, "after": first["last_id"]}).json()
    assert rest["first_id"] == made[2]
    assert served.http.get("/v1/files", params={"limit": "x"}).status_code == 400


def test_answers_are_what_the_document_says(served: House) -> None:
    document = served.http.get("/openapi.json").json()
    made = begin(served, line("a"))
    done = ended(served, made["id"])
    file_id = done["output_file_id"]
    held = {
        ("POST", "/v1/files"): upload(served.http, line("a")).json(),
        ("GET", "/v1/files"): served.http.get("/v1/files").json(),
        ("GET", "/v1/files/{id}"): served.http.get(f"/v1/files/{file_id}").json(),
        ("POST", "/v1/batches"): made,
        ("GET", "/v1/batches"): served.http.get("/v1/batches").json(),
        ("GET", "/v1/batches/{id}"): done,
        ("POST", "/v1/batches/{id}/cancel"): served.post(f"/v1/batches/{made['id']}/cancel").json(),
        ("DELETE", "/v1/files/{id}"): served.http.delete(f"/v1/files/{file_id}").json(),
    }
    assert held.keys() == {one for one in ANSWERS if one[1].startswith(("/v1/files", "/v1/batches"))}
    for (method, path), answer in held.items():
        answer_validator(document, method, path, "application/json").validate(answer)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_are_the_same_however_a_file_is_cut(size: int) -> None:
    content = b"one\n\ntwo\r\nthree"
    chunks = (content[at : at + size] for at in range(0, len(content), size))
    assert list(batch_store._lines(chunks)) == [b"one", b"", b"two\r", b"three"]


def test_a_line_of_a_whole_file_is_read_in_linear_time() -> None:
    begun = time.process_time()
    assert [len(line) for line in batch_store._lines(b"a" * 4096 for _ in range(8192))] == [8192 * 4096]
    assert time.process_time() - begun < 1.0
