"""What LiteLLM gets of a server. usage: litellm_client.py BASE_URL MODEL → one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a KV cache?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


def main(base_url: str, model: str) -> dict[str, Any]:
    name = f"openai/{model}"
    common: dict[str, Any] = {"model": name, "api_base": base_url, "api_key": "none", "max_retries": 0, "seed": 1}
    short = {**common, "max_tokens": 24, "temperature": 0}
    answer = litellm.completion(messages=CHAT, **short)
    chunks = list(litellm.completion(messages=CHAT, stream=True, stream_options={"include_usage": True}, **short))
    called = litellm.completion(messages=CHAT, tools=[WEATHER], tool_choice="required", max_tokens=200, **common)
    text = litellm.text_completion(prompt="Once upon a time", **{**short, "model": f"text-completion-openai/{model}"})

    async def streamed() -> str:
        parts = await litellm.acompletion(messages=CHAT, stream=True, **short)
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    async def awaited() -> str:
        return str((await litellm.acompletion(messages=CHAT, **short)).choices[0].message.content)

    try:
        litellm.completion(messages=CHAT, **{**short, "model": "openai/another"})
        error = "none"
    except litellm.NotFoundError as refusal:
        error = type(refusal).__name__
    return {
        "text": answer.choices[0].message.content,
        "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
        "finish_reason": answer.choices[0].finish_reason,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "streamed_usage": [chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens],
        "awaited": asyncio.run(awaited()),
        "awaited_stream": asyncio.run(streamed()),
        "calls": [call.function.name for call in called.choices[0].message.tool_calls],
        "completed": len(text.choices[0].text),
        "error": error,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
