"""What Ollama's Python client gets of a server. usage: ollama_client.py BASE_URL → one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

import ollama

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a KV cache?"}]
OPTIONS = {"num_predict": 24, "temperature": 0, "seed": 1}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city's name.
    """
    return f"sunny in {city}"


def main(host: str) -> dict[str, Any]:
    client = ollama.Client(host=host)
    (listed,) = client.list().models
    model = listed.model or ""
    whole = client.chat(model, messages=CHAT, options=OPTIONS, keep_alive="5m")
    streamed = list(client.chat(model, messages=CHAT, options=OPTIONS, stream=True))
    formatted = client.chat(model, messages=CHAT, format=PERSON, options={**OPTIONS, "num_predict": 200})
    asked = client.chat(model, messages=CHAT, tools=[weather], options=OPTIONS)
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    turns = [
        {"role": "user", "content": "How is the weather in Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": weather("Paris")},
    ]
    after = client.chat(model, messages=turns, tools=[weather], options=OPTIONS)
    generated = client.generate(model, "Once upon a time", options=OPTIONS, raw=True)
    pieces = list(client.generate(model, "Once upon a time", options=OPTIONS, raw=True, stream=True))
    shown = client.show(model)
    try:
        client.chat("llama3", messages=CHAT)
        error: list[Any] = []
    except ollama.ResponseError as refused:
        error = [refused.status_code, refused.error]
    refusals = []
    for change in (
        lambda: client.pull("llama3"),
        lambda: list(client.pull("llama3", stream=True)),
        lambda: client.create("mine", from_=model),
        lambda: client.copy(model, "mine"),
        lambda: client.delete(model),
        lambda: client.push(model),
        lambda: client.create_blob(__file__),
    ):
        try:
            change()
        except ollama.ResponseError as refused:
            refusals.append([refused.status_code, refused.error])
    return {
        "model": model,
        "pulled": [client.pull(model).status, *(line.status for line in client.pull(model, stream=True))],
        "refusals": refusals,
        "text": whole.message.content,
        "streamed": "".join(chunk.message.content or "" for chunk in streamed),
        "num_chunks": len(streamed),
        "usage": [whole.prompt_eval_count, whole.eval_count],
        "durations": [whole.total_duration, whole.load_duration, whole.prompt_eval_duration, whole.eval_duration],
        "done_reason": whole.done_reason,
        "formatted": json.loads(formatted.message.content or ""),
        "roles": [asked.message.role, after.message.role],
        "generated": generated.response,
        "pieces": "".join(piece.response or "" for piece in pieces),
        "context_length": (shown.modelinfo or {})["transformer.context_length"],
        "capabilities": shown.capabilities,
        "running": [one.model for one in client.ps().models],
        "embeddings": [len(vector) for vector in client.embed(model, ["one", "two"]).embeddings],
        "embedding": len(client.embeddings(model, "one").embedding),
        "error": error,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
