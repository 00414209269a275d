"""What a type checker sees of the public names: mypy checks it with the rest, scripts/check-packages with pyright."""

from __future__ import annotations

from typing import assert_type

import inferengine
from inferengine import LLM, SamplingParams
from inferengine.client import AsyncClient, Client, Delta
from inferengine.llm import Generation


def library() -> list[str]:
    params = SamplingParams(max_tokens=16, temperature=0)
    assert_type(params.max_tokens, int | None)
    with inferengine.LLM("folder", cache={"num_blocks": 512}) as llm:
        assert_type(llm, LLM)
        generations = llm.generate(["Once"], params)
        assert_type(generations, list[Generation])
        assert_type(llm.embed("Once")[0].values, list[float])
        return [generation.text for generation in generations]


def threads(address: str) -> str:
    with Client(address) as client:
        request = client.submit(text="Once", reply="text", params=SamplingParams(max_tokens=4))
        for delta in request.streams[0]:
            assert_type(delta, Delta)
            return delta.text
    return ""


async def asynchronous(address: str) -> list[str]:
    async with AsyncClient(address) as client, client.submit(text="Once", reply="text") as request:
        await request.accepted()
        return [delta.text async for delta in request.streams[0]]
