"""Stored responses: their bounds, and several workers, of which each knows what another one made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from frontends.http.openai.response_store import (
    ResponseStore,
    StoredResponse,
    make_database,
    read_events,
    remove_database,
)
from inferengine.errors import InferEngineError
from tests.engine.builders import check_idle, run_service
from tests.frontends.http.builders import FrontEnd, wait_until


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    made = make_database(tmp_path)
    yield made
    remove_database(made)


@contextmanager
def store_in(path: Path | None, **limits: Any) -> Iterator[ResponseStore]:
    """Yield the store of one worker."""
    store = ResponseStore(path, **limits)
    try:
        yield store
    finally:
        store.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def response(number: int, size: int = 0, tenant: str = "", **values: Any) -> StoredResponse:
    return StoredResponse(tenant, [], {"id": f"r{number}", "text": "x" * size, **values})


async def kept(store: ResponseStore, number: int, tenant: str = "") -> bool:
    """Return whether this worker finds it."""
    try:
        return bool(await store.get(f"r{number}", tenant))
    except InferEngineError:
        return False


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """Yield clients of two front ends that share a database, on one engine."""
    path = make_database(tmp_path_factory.mktemp("responses"))
    with run_service(step_s=0.005) as engine:
        fronts = [FrontEnd(engine.config, responses_path=path) for _ in range(2)]
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
            remove_database(path)


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


def test_a_response_deleted_while_it_was_made_does_not_come_back(workers: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    first, second = workers
    begun = first.responses.create(model="", input="hi", max_output_tokens=900, background=True)
    second.responses.delete(begun.id)
    ended = first.responses.create(model="", input="hi", max_output_tokens=40)  # the other one has ended by then
    for client in (first, second):
        assert client.responses.retrieve(ended.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(begun.id)


def test_the_store_is_bounded_in_bytes_number_and_time(path: Path) -> None:
    async def test() -> None:
        now = [0.0]
        limits = {"max_bytes": 1700, "max_records": 6, "clock": lambda: now[0]}
        for place in (None, path):
            now[0] = 0.0
            with store_in(place, **limits) as store:
                for number in range(20):
                    store.put(response(number, 200))
                assert [await kept(store, number) for number in (14, 15, 19)] == [False, True, True]
                for number in range(20, 30):
                    store.put(response(number))
                assert [await kept(store, number) for number in (23, 24, 29)] == [False, True, True]
                now[0] = 4000.0
                store.put(response(30))
                assert [await kept(store, number) for number in (29, 30)] == [False, True]

    run(test)


def test_the_bounds_hold_over_all_workers(path: Path) -> None:
    async def test() -> None:
        with store_in(path, max_records=4) as first, store_in(path, max_records=4) as second:
            for number in range(4):
                first.put(response(number))
            await first.saved()
            for number in range(4, 7):
                second.put(response(number))
            await second.saved()
            assert [await kept(first, number) for number in range(7)] == [False] * 3 + [True] * 4

    run(test)


def test_the_database_does_not_grow_with_what_was_forgotten(path: Path) -> None:
    async def test() -> None:
        with store_in(path, max_bytes=10**6) as store:
            for number in range(100):
                store.put(response(number, 100_000))
            await store.saved()
            assert path.stat().st_size < 3 * 10**6

    run(test)


def test_a_response_that_is_still_being_made_is_not_dropped() -> None:
    async def test() -> None:
        with store_in(None, max_records=2) as store:
            making = response(0, status="in_progress")
            making.task = asyncio.create_task(asyncio.sleep(60))
            store.put(making)
            for number in range(1, 5):
                store.put(response(number))
            assert await store.get("r0", "") is making
            assert [await kept(store, number) for number in range(1, 5)] == [False, False, True, True]

    run(test)


def test_closing_ends_what_is_being_made() -> None:
    async def test() -> None:
        with store_in(None) as store:
            making = response(0, status="in_progress")
            making.task = asyncio.create_task(asyncio.sleep(60))
            store.put(making)
        with pytest.raises(asyncio.CancelledError):
            await making.task

    run(test)


def test_what_a_dead_worker_was_making_has_failed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        with store_in(path) as store, store_in(path) as survivor:
            store.put(response(1, status="in_progress"))
            await store.saved()
            assert (await survivor.get("r1", "")).document["status"] == "in_progress"
            monkeypatch.setattr("frontends.http.openai.response_store.is_alive", lambda process: False)
            assert (await survivor.get("r1", "")).document["status"] == "failed"

    run(test)


def test_events_that_a_dead_worker_left_end_with_its_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontends.http.openai.response_store.POLL_S", 0.001)

    async def test() -> None:
        with store_in(path) as store, store_in(path) as survivor:
            begun = response(1, status="in_progress", has_events=True)
            store.put(begun)
            store.put_events(begun.name, 0, [b"event: response.created\n\n", b"event: response.in_progress\n\n"])
            await store.saved()
            monkeypatch.setattr("frontends.http.openai.response_store.is_alive", lambda process: False)
            *_, last = [event async for event in read_events(survivor, await survivor.get("r1", ""), 1)]
            name, data = last.decode().split("\n")[:2]
            assert name == "event: response.failed"
            told = json.loads(data.removeprefix("data: "))
            assert (told["sequence_number"], told["response"]["status"]) == (2, "failed")

    run(test)


def test_what_was_deleted_is_not_kept_by_whoever_writes_it_a_moment_later(path: Path) -> None:
    async def test() -> None:
        for place in (None, path):
            with store_in(place) as making:
                making.put(response(1, status="in_progress"))
                await making.saved()
                if place is None:
                    await making.delete("r1", "")
                else:
                    with store_in(place) as other:
                        await other.delete("r1", "")
                making.put(response(1, status="completed"))
                assert not await kept(making, 1)

    run(test)


def test_workers_that_write_and_delete_at_once_lose_nothing_and_bring_nothing_back(path: Path) -> None:
    async def write(store: ResponseStore, numbers: range) -> None:
        for number in numbers:
            store.put(response(number, status="in_progress"))
            await store.saved()
            store.put(response(number, status="completed"))

    async def delete(store: ResponseStore, numbers: range) -> None:
        for number in numbers:
            while not await kept(store, number):
                await asyncio.sleep(0)
            await store.delete(f"r{number}", "")

    async def test() -> None:
        with store_in(path) as first, store_in(path) as second, store_in(path) as third:
            await asyncio.gather(
                write(first, range(100)), write(second, range(100, 200)), delete(third, range(0, 200, 2))
            )
            await asyncio.gather(first.saved(), second.saved())
            assert [await kept(third, number) for number in range(200)] == [number % 2 == 1 for number in range(200)]

    run(test)


def test_a_tenant_finds_its_own_alone(path: Path) -> None:
    async def test() -> None:
        with store_in(path) as store, store_in(path) as other:
            store.put(response(1, tenant="ada"))
            await store.saved()
            assert await kept(other, 1, "ada")
            store.put(response(1, tenant="bob", status="completed"))  # the same id takes nothing from ada
            await store.saved()
            assert "status" not in (await other.get("r1", "ada")).document
            for act in (other.get, other.delete):
                with pytest.raises(InferEngineError, match="no such response"):
                    await act("r1", "eve")

    run(test)


def test_without_room_a_response_is_not_kept_and_nobody_fails(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        with store_in(path, max_bytes=1000) as store:
            store.put(response(1, 100))
            assert await kept(store, 1)
            store.put(response(1, 10**6))  # more than the database's file may have
            assert not await kept(store, 1)
            assert "a response cannot be kept" in caplog.text
            store.put(response(2, 100))
            assert await kept(store, 2)

    run(test)


def test_the_folder_is_its_owner_s_and_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    first = make_database(tmp_path).parent
    assert first.stat().st_mode & 0o077 == 0
    left = first.with_name(first.name.replace(f"-{first.name.split('-')[3]}-", "-999999999-"))
    first.rename(left)
    second = make_database(tmp_path).parent
    assert list(tmp_path.iterdir()) == [second]
    remove_database(second / "any")
    assert not list(tmp_path.iterdir())
