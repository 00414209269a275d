"""Many at once through HTTP: exact counts, and nothing left behind."""

from __future__ import annotations

import asyncio
import time

import httpx

from tests.e2e.service import Service, events

CONCURRENCY, TOKENS = 64, 80


async def _post_all(service: Service, bodies: list[dict[str, object]]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=service.http, timeout=100, limits=limits) as client:
        return list(await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)))


def test_64_concurrent_requests_finish_and_hold_no_block_afterwards(service: Service) -> None:
    bodies: list[dict[str, object]] = [
        {"prompt": f"Story number {number}. Once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
        for number in range(CONCURRENCY)
    ]
    answers = asyncio.run(_post_all(service, bodies))
    assert [answer.status_code for answer in answers] == [200] * CONCURRENCY
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [TOKENS] * CONCURRENCY
    figures = service.wait_idle()
    assert figures["cache"]["used_pages"] == 0
    assert figures["max_batch_observed"] > 1


def test_mixed_lengths_get_exact_counts(service: Service) -> None:
    lengths = [1, 2, 3, 16, 17, 31, 64, 100]
    bodies: list[dict[str, object]] = [{"prompt": "A", "max_tokens": n, "ignore_eos": True} for n in lengths]
    answers = asyncio.run(_post_all(service, bodies))
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == lengths


def test_the_first_answer_of_a_burst_comes_long_before_the_last(service: Service) -> None:
    async def first_and_last() -> tuple[float, float]:
        async def first_event(client: httpx.AsyncClient, number: int) -> tuple[float, float]:
            body = {"prompt": f"Burst {number}:", "max_tokens": 40, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                seen: list[float] = [time.monotonic() async for line in response.aiter_lines() if line]
                return seen[0], seen[-1]

        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=service.http, timeout=100, limits=limits) as client:
            times = await asyncio.gather(*(first_event(client, number) for number in range(100)))
        return min(first for first, _ in times), max(last for _, last in times)

    began = time.monotonic()
    first, last = asyncio.run(first_and_last())
    assert (first - began) < (last - began) / 2


def test_a_greedy_request_is_the_same_alone_and_in_a_crowd(service: Service) -> None:
    body: dict[str, object] = {"prompt": "The engine", "max_tokens": 24, "temperature": 0.0}
    alone = asyncio.run(_post_all(service, [body]))[0].json()["choices"][0]["text"]
    crowd: list[dict[str, object]] = [
        {"prompt": f"Number {number}", "max_tokens": 40, "temperature": 1.0} for number in range(15)
    ]
    among = asyncio.run(_post_all(service, [*crowd, body]))[-1].json()["choices"][0]["text"]
    assert among == alone


def test_a_streamed_answer_is_the_unstreamed_one(service: Service) -> None:
    body = {"temperature": 0.0, "max_tokens": 40}
    whole = service.complete(**body).json()["choices"][0]["text"]
    *chunks, last = events(service.complete(**body, stream=True).text)
    assert last == "[DONE]"
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole
