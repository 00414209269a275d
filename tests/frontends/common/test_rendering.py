"""Where conversations become prompts: short ones at once, long ones in another thread than the streams'."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from frontends.common.model import ServedModel
from inferengine.client import ModelInfo


class Template:
    """Tells in which thread it was rendered."""

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return threading.current_thread().name


def called(arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("message", "is_elsewhere"),
    [
        ({"role": "user", "content": "Hi"}, False),
        ({"role": "user", "content": "x" * 3000}, True),
        (called('{"a": [1, '), False),
        (called('{"a": [' + "1, " * 1000), True),  # was cut: reading what is left of 8 MB takes ten seconds
        (called({"a": 1}), False),
    ],
)
def test_a_long_message_does_not_hold_up_the_streams(message: dict[str, Any], is_elsewhere: bool) -> None:
    info = ModelInfo(name="m", fingerprint="f", vocab_size=300, max_model_len=4096)
    served = ServedModel(info, None, Template())  # type: ignore[arg-type]
    where = asyncio.run(served.render([message]))
    assert (where != threading.main_thread().name) == is_elsewhere
