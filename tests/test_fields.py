"""Values of clients read into Structs: whole numbers written as floats, wrong types, ranges, and nesting."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import pytest

from inferengine.errors import InvalidRequest
from inferengine.fields import FieldError, about, check, read
from inferengine.sampling_params import SamplingParams, from_map


class Example(msgspec.Struct):
    count: Annotated[int, about("a number", ge=0, le=9)] = 0
    ids: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()
    flag: bool = False


class Limits:
    most = 3


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_whole_number_may_be_written_as_a_float_in_lists_too() -> None:
    found = read(Example, {"count": 3.0, "ids": [1.0, 2], "words": [[1.0], [2]]})
    assert (found.count, found.ids, found.words) == (3, (1, 2), ((1,), (2,)))
    assert type(found.count) is int


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"count": 3.5}, "count", "must be a whole number"),
        ({"count": True}, "count", "must be a whole number"),
        ({"count": 10}, "count", "must lie in [0, 9]"),
        ({"count": 10**400}, "count", "must lie in [0, 9]"),
        ({"ids": [1, 2.5]}, "ids[1]", "must be a whole number"),
        ({"ids": 7}, "ids", "must be a list"),
        ({"flag": 1}, "flag", "must be true or false"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(values: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(FieldError) as refused:
        read(Example, values)
    assert (refused.value.field, refused.value.message) == (field, message)


@pytest.mark.parametrize("depth", [3, 400, 5000])
@pytest.mark.parametrize("name", ["stop_token_ids", "bad_words_ids", "allowed_token_ids", "stop"])
def test_lists_nested_for_ever_are_refused_like_any_wrong_value(name: str, depth: int) -> None:
    with pytest.raises(InvalidRequest, match=name):
        from_map({name: [2.0, nested(depth)]})


def test_a_bound_of_the_configuration_is_told_with_its_running_value() -> None:
    class Named(msgspec.Struct):
        ids: Annotated[tuple[int, ...], about(most="most")] = ()

    check(Named((1, 2, 3)), Limits)
    with pytest.raises(FieldError, match="at most 3 entries"):
        check(Named((1, 2, 3, 4)), Limits)


def test_parameters_travel_as_what_differs_from_the_defaults() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, seed=7, stop=("a",))
    assert params.to_map() == {"temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ("a",)}
    assert from_map(params.to_map()) == params
    assert params.replace(seed=None).seed is None
