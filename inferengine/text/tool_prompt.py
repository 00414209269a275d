"""Tools for models whose chat template does not speak of them: described in the system message, in Hermes' words.

From the prompt format that Nous Research published with Hermes 2 Pro.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message, and calls and results as plain text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    described = _describe(tools)
    if plain[0]["role"] in ("system", "developer"):
        plain[0]["content"] = f"{plain[0]['content']}\n\n{described}"
        return plain
    return [{"role": "system", "content": described}, *plain]


def _describe(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more functions. They are described here as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "For each call answer with its name and arguments as JSON:\n"
        '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
    )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": "\n".join(filter(None, [content, *calls]))}
