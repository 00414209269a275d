"""Stored responses with several workers: whichever takes the request knows what another one made."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from frontends.http.openai.responses import store as response_shelf
from frontends.http.openai.responses.store import ResponseShelf, ResponseStore, Stored, make_folder, remove_folder
from inferengine.errors import InferEngineError
from tests.engine.builders import check_idle, run_service
from tests.frontends.http.builders import FrontEnd, wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = make_folder(tmp_path)
    yield made
    remove_folder(made)


def shelf_in(folder: Path, **limits: float) -> ResponseShelf:
    values = {"max_bytes": 10**6, "max_records": 100, "keep_s": 60.0, **limits}
    return ResponseShelf(folder, **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """Clients of two front ends that share a shelf, on one engine."""
    folder = make_folder(tmp_path_factory.mktemp("shelf"))
    with run_service(step_s=0.005) as engine:
        fronts = [FrontEnd(engine.config, shelf=shelf_in(folder)) for _ in range(2)]
        try:
            for front in fronts:
                wait_until(lambda front=front: httpx.get(f"{front.url}/ready").status_code == 200)
            first, second = (
                openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) for front in fronts
            )
            with first, second:
                yield first, second
            check_idle(engine)
        finally:
            for front in fronts:
                front.stop()
            remove_folder(folder)


def test_a_response_is_read_continued_and_deleted_elsewhere(workers: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    first, second = workers
    made = first.responses.create(model="", input="hi", max_output_tokens=5)
    assert second.responses.retrieve(made.id).output_text == made.output_text
    more = second.responses.create(model="", input="more", previous_response_id=made.id, max_output_tokens=5)
    assert first.responses.retrieve(more.id).previous_response_id == made.id
    second.responses.delete(made.id)
    for client in (first, second):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)


def test_one_in_the_background_is_watched_and_cancelled_elsewhere(
    workers: tuple[openai.OpenAI, openai.OpenAI],
) -> None:
    first, second = workers
    short = first.responses.create(model="", input="hi", max_output_tokens=5, background=True)
    wait_until(lambda: second.responses.retrieve(short.id).status == "incomplete")
    long = first.responses.create(model="", input="hi", max_output_tokens=900, background=True)
    assert second.responses.retrieve(long.id).status in ("queued", "in_progress")
    assert second.responses.cancel(long.id).status == "cancelled"
    assert first.responses.retrieve(long.id).status == "cancelled"


def test_one_deleted_while_it_was_made_does_not_come_back(workers: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    first, second = workers
    begun = first.responses.create(model="", input="hi", max_output_tokens=900, background=True)
    second.responses.delete(begun.id)
    ended = first.responses.create(model="", input="hi", max_output_tokens=40)  # the other one has ended by then
    for client in (first, second):
        assert client.responses.retrieve(ended.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(begun.id)


def test_what_a_dead_worker_was_making_has_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ResponseStore(shelf_in(folder)).put(Stored("", [], {"id": "r", "status": "in_progress"}))
    survivor = ResponseStore(shelf_in(folder))
    assert survivor.get("r", "").document["status"] == "in_progress"
    monkeypatch.setattr("frontends.http.openai.responses.store.is_alive", lambda process: False)
    assert survivor.get("r", "").document["status"] == "failed"


def test_what_was_deleted_is_not_kept_by_whoever_writes_it_a_moment_later(folder: Path) -> None:
    making, other = shelf_in(folder), shelf_in(folder)
    making.put("t", "r", {"document": "begun"})
    other.delete("t", "r")
    making.put("t", "r", {"document": "whole"})
    assert making.get("t", "r") is None


def test_a_tenant_finds_its_own_alone(folder: Path) -> None:
    store, other = ResponseStore(shelf_in(folder)), ResponseStore(shelf_in(folder))
    store.put(Stored("ada", [], {"id": "r"}))
    assert other.get("r", "ada")
    store.put(Stored("bob", [], {"id": "r", "status": "completed"}))  # the same id takes nothing from ada
    assert "status" not in other.get("r", "ada").document
    with pytest.raises(InferEngineError, match="no such response"):
        other.get("r", "eve")


def test_the_shelf_is_bounded_in_bytes_number_and_time(folder: Path) -> None:
    now = [time.time()]
    shelf = ResponseShelf(folder, max_bytes=4000, max_records=10, keep_s=60.0, clock=lambda: now[0])
    for number in range(40):
        now[0] += response_shelf.PRUNE_EVERY_S / 10
        shelf.put("", f"r{number}", {"text": "x" * 100})
    assert len(list(folder.iterdir())) <= 10 + 10
    shelf.put("", "large", {"text": "x" * 5000})
    now[0] += 100.0
    shelf.put("", "last", {})
    assert {path.read_bytes() for path in folder.iterdir()} <= {b"{}"}


def test_without_room_a_response_is_not_kept_and_nobody_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = shelf_in(folder)
    shelf.put("", "r", {"text": "old"})

    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    shelf.put("", "r", {"text": "new"})
    assert shelf.get("", "r") is None
    assert not list(folder.iterdir())


def test_the_folder_is_its_owner_s_and_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    first = make_folder(tmp_path)
    assert first.stat().st_mode & 0o077 == 0
    left = first.with_name(first.name.replace(f"-{first.name.split('-')[3]}-", "-999999999-"))
    first.rename(left)
    second = make_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [second]
