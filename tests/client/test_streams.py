"""What a call knows of its output, without an engine."""

from __future__ import annotations

import pytest

from inferengine.client.streams import Call, Collector
from inferengine.wire.messages import Attach


@pytest.mark.parametrize("news", [lambda c: c.add_tokens([1]), lambda c: c.add_text("a"), lambda c: c.fail("e", "m")])
def test_a_call_has_begun_with_a_token_a_character_or_an_end_of_any_choice(news) -> None:  # type: ignore[no-untyped-def]
    quiet, speaking = Collector(1), Collector(2)
    call = Call(Attach(bytes(16), 1), [quiet, speaking])
    assert not call.begun
    news(speaking)
    assert call.begun
