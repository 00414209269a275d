"""The shrinker without an engine: whoever runs a round is a function that knows what makes it fail."""

from __future__ import annotations

from dataclasses import replace

from tests.gauntlet.asks import Ask
from tests.gauntlet.rounds import Round
from tests.gauntlet.shrinker import shrink


def ask(name: int, **params: object) -> Ask:
    return Ask(name, 0.1 * name, "wire", {"ids": [20, 21, 22, 23]}, {"max_tokens": 4, **params})


def some_round(count: int = 24) -> Round:
    asks = [ask(number, temperature=0.0) for number in range(count)]
    asks[5] = ask(5, temperature=1.0, top_p=0.5, logprobs=2)
    asks[17] = replace(ask(17, temperature=0.0, min_tokens=3), options={"tenant": "a", "priority": 3})
    settings = {"speculation.method": "draft", "cache.block_size": 8, "cache.num_blocks": 64}
    return Round("embedded", settings, tuple(asks), kills_s=(1.0,))


def needs_both(one: Round) -> set[str]:
    """Return the difference that 5 with its top_p beside 17 makes, under a draft model."""
    asks = {ask.name: ask for ask in one.asks}
    fails = 5 in asks and 17 in asks and "top_p" in asks[5].params and "speculation.method" in one.settings
    return {"tokens"} if fails else set()


def test_two_requests_are_left_of_many_with_only_what_matters() -> None:
    small = shrink(some_round(), {"tokens"}, needs_both, seconds=60.0)
    assert [ask.name for ask in small.asks] == [5, 17]
    assert small.asks[0].params == {"max_tokens": 4, "temperature": 1.0, "top_p": 0.5}
    assert small.asks[1].options == {}
    assert small.asks[1].params == {"max_tokens": 4, "temperature": 0.0}
    assert "speculation.method" in small.settings
    assert small.kills_s == ()


def test_a_failure_that_comes_now_and_then_is_tried_several_times() -> None:
    calls = 0

    def flaky(one: Round) -> set[str]:
        nonlocal calls
        calls += 1
        return needs_both(one) if calls % 3 == 0 else set()

    small = shrink(some_round(), {"tokens"}, flaky, seconds=60.0, tries=4)
    assert [ask.name for ask in small.asks] == [5, 17]


def test_another_failure_is_not_followed() -> None:
    one = some_round()
    assert shrink(one, {"tokens"}, lambda candidate: {"left"}, seconds=60.0, tries=1) == one


def test_shrinking_ends_when_its_time_is_over() -> None:
    now = iter(range(1000))
    tried: list[Round] = []

    def slow(one: Round) -> set[str]:
        tried.append(one)
        return needs_both(one)

    shrink(some_round(), {"tokens"}, slow, seconds=5.0, clock=lambda: float(next(now)))
    assert len(tried) < 10
