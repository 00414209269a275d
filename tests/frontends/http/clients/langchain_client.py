"""What LangChain's ChatOpenAI gets of a server. usage: langchain_client.py BASE_URL MODEL → one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

CHAT = [SystemMessage("Be brief."), HumanMessage("What is a KV cache?")]


class Person(BaseModel):
    """Somebody."""

    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=150)]


@tool
def weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def main(base_url: str, model: str) -> dict[str, Any]:
    llm = ChatOpenAI(
        model=model, base_url=base_url, api_key="none", max_retries=0, temperature=0, max_tokens=24, seed=1
    )
    answer = llm.invoke(CHAT)
    chunks = list(llm.stream(CHAT, stream_usage=True))
    default = ChatOpenAI(model=model, base_url=base_url, api_key="none", max_tokens=24)  # or the model decides
    unasked = list(default.stream("What is a KV cache?"))
    long = ChatOpenAI(model=model, base_url=base_url, api_key="none", max_retries=0, max_tokens=400, seed=2)
    called = long.bind_tools([weather], tool_choice="weather").invoke("How is the weather in Paris?")
    results = [ToolMessage(weather.invoke(call).content, tool_call_id=call["id"]) for call in called.tool_calls]
    return {
        "text": answer.text,
        "usage": dict(answer.usage_metadata or {}),
        "finish_reason": answer.response_metadata["finish_reason"],
        "streamed": "".join(chunk.text for chunk in chunks),
        "num_chunks": len(chunks),
        "streamed_usage": next(dict(chunk.usage_metadata) for chunk in reversed(chunks) if chunk.usage_metadata),
        "unasked_usage": [dict(chunk.usage_metadata) for chunk in unasked if chunk.usage_metadata],
        "awaited": asyncio.run(llm.ainvoke(CHAT)).text,
        "batched": [one.text for one in llm.batch([CHAT, CHAT])],
        "calls": [[call["name"], sorted(call["args"])] for call in called.tool_calls],
        "after_tools": len(llm.invoke([HumanMessage("Weather?"), called, *results]).text),
        "structured": {
            method: type(long.with_structured_output(Person, method=method).invoke("Who is Ada?")).__name__
            for method in ("json_schema", "function_calling")
        },
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
