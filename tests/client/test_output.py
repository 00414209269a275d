"""An open request's state, without an engine."""

from __future__ import annotations

import pytest

from inferengine.client.requests import OpenRequest, OutputCollector
from inferengine.errors import InferEngineError
from inferengine.wire.messages import Attach


@pytest.mark.parametrize(
    "news",
    [lambda c: c.add_tokens([1]), lambda c: c.add_text("a"), lambda c: c.fail(InferEngineError("engine_error", "m"))],
)
def test_a_request_has_begun_with_a_token_a_character_or_an_end_of_any_choice(news) -> None:  # type: ignore[no-untyped-def]
    quiet, speaking = OutputCollector(1), OutputCollector(2)
    request = OpenRequest(Attach(bytes(16), 1), [quiet, speaking])
    assert not request.begun
    news(speaking)
    assert request.begun
